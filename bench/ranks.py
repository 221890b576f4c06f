"""
What several ranks cost on one machine: whole runs of base_train on N ranks with one thread each, against one rank with
N threads, on the same batch and in turns, so that a machine whose speed drifts does not decide.

    python -m bench.ranks
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

ranks = 2                   # processes of the runs with several
stages = "1 2"              # of ZeRO
pairs = 3                   # runs of each, in turns
steps = 6                   # optimizer steps of a run; the first two are not counted
depth = 4                   # of the model
max_seq_len = 512           # tokens per row
device_batch_size = 8       # rows per rank and micro-step
grad_accum_steps = 2        # micro-steps on each of the ranks; one rank alone has so many more
config = configure(globals())

require_positive(config, "ranks", "pairs", "depth", "max_seq_len", "device_batch_size", "grad_accum_steps")
if steps < 3:
    raise UserError(f"steps={steps} must be at least 3: the first two are not counted")
training = ["scripts.base_train", f"--depth={depth}", f"--max_seq_len={max_seq_len}", f"--device_batch_size={device_batch_size}",
            f"--total_batch_size={ranks * grad_accum_steps * device_batch_size * max_seq_len}", f"--num_iterations={steps}",
            "--eval_every=-1", "--sample_every=-1", "--device_type=cpu"]


def tokens_per_second(tag: str, launcher: list[str], threads: int, *settings: str) -> float:
    """The median over the counted steps of a run."""
    command = [sys.executable, "-m", *launcher, *training, "--overwrite", f"--model_tag={tag}", *settings]
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "1000"}, capture_output=True, text=True)
    if result.returncode != 0:
        raise UserError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    records = read_metrics(checkpoint_dir("base", tag) / "metrics.jsonl")
    return statistics.median(record["train/tok_per_sec"] for record in records[2:])


with tempfile.TemporaryDirectory() as scratch:  # data and checkpoints of its own: nobody's models are touched
    os.environ["NANOCHAT_BASE_DIR"] = str(Path(scratch))
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
    tokens_per_second("warm-up", [], ranks)  # makes the data and fills the compiler's caches
    for stage in stages.split():
        ratios = []
        for _ in range(pairs):
            alone = tokens_per_second("alone", [], ranks)
            together = tokens_per_second("together", torchrun, 1, f"--zero_stage={stage}")
            ratios.append(together / alone)
            print(f"stage {stage}: {ranks} ranks {together:,.0f} tok/s, one rank with {ranks} threads {alone:,.0f} tok/s: {together / alone:.1%}", flush=True)
        print(f"stage {stage}: median {statistics.median(ratios):.1%}", flush=True)
