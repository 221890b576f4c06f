"""
One model on a cluster of H100s, by formula: what a rank holds, sends and waits for on each of ZeRO's stages, its states
shared by a host and by all; the last line is the fastest of all layouts that fit. Exit code 1: none does.

    python -m bench.layouts --gpus=8 --depth=24 --link=pcie5
    python -m bench.layouts --gpus=64 --depth=32 --between=eth10
"""
from configurator import configure

gpus = 8                    # [1..] a power of two; eight on each host
link = "nvlink4"            # between GPUs of a host: a name in bench/links.toml
between = "ndr"             # between hosts, for each GPU
depth = 24                  # [1..] layers
device_batch_size = 8       # [1..] rows per rank and micro-step
total_batch_size = -1       # [-1, 1..] tokens per optimizer step, over all ranks; -1: chosen as in base_train
configure(globals())

from bench.machines import LINKS, Cluster, Layout, fastest_layout, plan_step
from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.choice import pretraining
from nanochat.plan.memory import GIB, shaped
from nanochat.plan.step_time import step_time
from nanochat.runtime.errors import UserError
from nanochat.runtime.flops import datasheet_gpu
from nanochat.runtime.tables import markdown_table

if gpus & (gpus - 1):
    raise UserError(f"gpus={gpus}: expected a power of two")
if unknown := {link, between} - LINKS.keys():
    raise UserError(f"there is no link {unknown.pop()}; expected one of {', '.join(LINKS)}")
kind = datasheet_gpu("H100")
config = config_from_depth(depth, 32768, 2048, arch="modern")
cluster = Cluster(gpus, min(gpus, 8), LINKS[link], LINKS[between])
run = pretraining(config, gpus, device_batch_size, total_batch_size=total_batch_size)
flops = run.total_batch_size * shaped(config).estimate_flops() / gpus  # of a GPU in a step
step = step_time(config, device_batch_size, run.micro_steps, gpus, kind)
rate = flops / (step.seconds - step.muon)
layouts = [Layout(0, 1, device_batch_size, run.micro_steps)]
for zero_stage in (1, 2, 3):
    for shards in sorted({cluster.per_host, gpus}):
        layouts.append(Layout(zero_stage, shards, device_batch_size, run.micro_steps))
best = fastest_layout(config, cluster, rate, run.total_batch_size, kind.memory * GIB)
if best:
    layouts.append(best[0])
table = []
for layout in layouts:
    plan = plan_step(config, cluster, layout, rate)
    table.append([layout.zero_stage, layout.shards, layout.pipeline_stages, layout.rows, layout.checkpointing,
                  *(f"{n / 1e9:.2f}" for n in (plan.needs, plan.within, plan.between)),
                  *(f"{n:.3f}" for n in (plan.exposed, plan.bubble, plan.seconds)),
                  f"{flops / plan.seconds / kind.peak:.1%}"])
print(markdown_table(["stage", "shard_size", "pipeline", "rows", "recompute", "needs, GB", "sends within a host, GB",
                      "to others, GB", "waits, s", "bubble, s", "step, s", "MFU"], table))
if not best:
    raise UserError(f"nothing fits into {kind.memory:g} GiB: take more GPUs or a smaller depth")
