"""
One optimizer step cut into micro-steps and over ranks: the same loss, other memory. The table of docs/two_loops.md.

    python -m bench.accumulation            # prints it; Linux
    python -m bench.accumulation --write    # and puts it into the page

Whole runs of base_train, in float32, on the same rows whatever the cut.
"""
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from configurator import configure
from nanochat.checkpoint import checkpoint_dir
from nanochat.errors import UserError, require_positive
from nanochat.metrics import read_metrics
from bench.pages import put_into_page
from nanochat.report import markdown_table

# ---- Model and batch
depth = 4                   # layers
max_seq_len = 256           # tokens per row
rows = 16                   # of an optimizer step, over all ranks
# ---- Measurement
steps = 4                   # optimizer steps of a run; the first is not timed
micro_steps = "1 2 4 8"     # cuts of the batch on one rank, and then on two
write = False               # put the table into docs/two_loops.md
config = configure(globals())
require_positive(config, "depth", "max_seq_len", "rows")
if sys.platform != "linux":
    raise UserError("cores and the largest resident memory are asked of the kernel: Linux only")
if not all(cut.isdigit() and int(cut) > 0 for cut in micro_steps.split()):
    raise UserError(f"micro_steps={micro_steps} must be whole numbers with blanks between them")
if steps < 2:
    raise UserError(f"steps={steps} must be at least 2: the first is not timed")


def run(ranks: int, cuts: int) -> tuple[list[float], float, float]:
    """(loss of each step, tokens per second in the median, peak memory of the largest process in MB) of one run."""
    tag = f"{ranks}-{cuts}"
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"] if ranks > 1 else []
    command = [
        sys.executable, "-m", *launcher, "scripts.base_train", f"--model_tag={tag}", f"--depth={depth}", f"--max_seq_len={max_seq_len}",
        f"--device_batch_size={rows // cuts // ranks}", f"--total_batch_size={rows * max_seq_len}", f"--num_iterations={steps}",
        "--eval_every=-1", "--sample_every=-1", "--device_type=cpu", "--dtype=float32", "--compile=False",
    ]
    threads = str(max(len(os.sched_getaffinity(0)) // ranks, 1))  # the machine is divided among the ranks
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": threads})
        _, status, usage = os.wait4(process.pid, 0)  # of itself and of the ranks that it has waited for: the largest
        if status:
            log.seek(0)
            raise UserError(f"{' '.join(command)} failed:\n{log.read().decode()[-2000:]}")
    records = read_metrics(checkpoint_dir("base", tag) / "metrics.jsonl")
    speed = statistics.median(record["train/tok_per_sec"] for record in records[1:])
    return [record["train/loss"] for record in records], speed, usage.ru_maxrss * 1024 / 1e6


with tempfile.TemporaryDirectory() as scratch:  # data and checkpoints of its own: nobody's models are touched
    os.environ["NANOCHAT_BASE_DIR"] = str(Path(scratch))
    for module, *settings in (["scripts.dataset"], ["scripts.tok_train", "--vocab_size=4096"]):
        subprocess.run([sys.executable, "-m", module, *settings], check=True, stdout=subprocess.DEVNULL)
    lines, whole = [], None
    for ranks in (1, 2):
        for cuts in map(int, micro_steps.split()):
            if rows % (ranks * cuts):
                continue
            losses, speed, memory = run(ranks, cuts)
            whole = whole or losses
            apart = max(abs(a - b) for a, b in zip(losses, whole))
            lines.append([f"{ranks} × {cuts} × {rows // ranks // cuts}", f"{losses[-1]:.6f}", f"{apart:.1e}" if apart else "0", f"{speed:,.0f}", f"{memory:,.0f}"])
            print(*lines[-1], sep="  ", flush=True)

text = markdown_table(["ranks × micro-steps × rows", f"loss of step {steps}", "largest difference in any step", "tok/s", "peak MB of a rank"], lines)
text += (f"\n\nDepth {depth}, {rows} rows of {max_seq_len} tokens in every step, float32, {len(os.sched_getaffinity(0))} CPU cores "
         "shared by the ranks. The loss is in nats per token; differences are to the first line.")
print(f"\n{text}")
if write:
    put_into_page("two_loops.md", "python -m bench.accumulation --write", text)
