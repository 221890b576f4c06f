"""
One model on a cluster of H100s, by formula: what a rank holds, sends and waits for on each of ZeRO's stages, its states
shared by a host and by all; the last line is the fastest of all layouts that fit. Passes reach half of the peak. Exit
code 1: none fits.

    python -m bench.layouts --gpus=8 --depth=24 --link=pcie5
    python -m bench.layouts --gpus=64 --depth=32 --between=eth10
"""
from configurator import configure

gpus = 8                    # [1..] a power of two; eight on each host
link = "nvlink4"            # between GPUs of a host: a name in bench/links.toml
between = "ndr"             # between hosts, for each GPU
depth = 24                  # [1..] layers
device_batch_size = 8       # [1..] rows per rank and micro-step
total_batch_size = 1048576  # [1..] tokens per optimizer step, over all ranks; a power of two
configure(globals())

import itertools

from bench.machines import LINKS, Cluster, Layout, fastest_layout, plan_step
from nanochat.model.gpt_config import config_from_depth
from nanochat.optim.recipe import accumulation_steps
from nanochat.plan.memory import GIB, shaped
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
micro_steps = accumulation_steps(total_batch_size, device_batch_size, 2048, gpus)
flops = total_batch_size * shaped(config).estimate_flops() / gpus  # of a GPU in a step

sharing = [(0, 1), *itertools.product((1, 2, 3), sorted({cluster.per_host, gpus}))]
layouts = [Layout(*stage_and_shards, device_batch_size, micro_steps) for stage_and_shards in sharing]
layouts.append(fastest_layout(config, cluster, kind.peak / 2, total_batch_size, kind.memory * GIB))
table = []
for layout in layouts:
    plan = plan_step(config, cluster, layout, kind.peak / 2)
    table.append([*layout, *(f"{n / 1e9:.2f}" for n in (plan.needs, plan.within, plan.between)),
                  *(f"{n:.3f}" for n in (plan.exposed, plan.bubble, plan.seconds)),
                  f"{flops / plan.seconds / kind.peak:.1%}"])
print(markdown_table(["stage", "shard_size", "rows", "micro-steps", "recompute", "pipeline", "needs, GB",
                      "sends within a host, GB", "to others, GB", "waits, s", "bubble, s", "step, s", "MFU"], table))
