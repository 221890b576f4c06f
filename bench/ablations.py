"""
What a piece of the architecture or a setting is worth: pairs of runs with the same data, seed and number of tokens, one
of them with a change. docs/ablations.md has the results. A finished run is not repeated, a stopped one goes on; after a
change of the code remove base_checkpoints/pair-*.

    python -m bench.ablations --changes="--arch=classic,smear=True + --warmdown_ratio=0.65"
"""
from configurator import configure

data = "python"             # data set
base = """--arch=classic --depth=4 --max_seq_len=512 --device_batch_size=8 --total_batch_size=4096 --num_iterations=150
          --eval_every=1000000 --sample_every=-1"""
changes = "--arch=modern"   # flags of base_train, which replace those of base; several changes are separated by " + "
seeds = 3                   # [2..] pairs for each change
configure(globals())

import statistics
import subprocess
import sys
import zlib

from bench.harness import DOCS
from bench.scaling_fit import read_run
from nanochat.runtime.files import base_dir
from nanochat.runtime.tables import markdown_table
from nanochat.training.records import read_metrics


def result(change: str, seed: int) -> tuple[float, float]:
    """Bits per byte after the last step, and seconds of all steps: the median step's times their number."""
    flags = f"--data={data} {base} {change} --seed={seed}".split()
    tag = f"pair-{zlib.crc32(' '.join(flags).encode()):08x}"
    folder = base_dir() / "base_checkpoints" / tag
    if read_run(folder) is None:
        command = [sys.executable, "-m", "scripts.base_train", *flags, f"--model_tag={tag}", "--resume=auto"]
        subprocess.run(command, cwd=DOCS.parent, check=True, stdout=subprocess.DEVNULL)
    bpb = read_run(folder).bpb
    seconds = [record["train/dt"] for record in read_metrics(folder / "metrics.jsonl") if "train/dt" in record]
    print(f"{change or 'baseline'}, seed {seed}: {bpb:.4f} bits per byte", flush=True)
    return bpb, statistics.median(seconds) * len(seconds)


lines = []
for change in changes.split(" + "):
    pairs = [(result("", seed), result(change, seed)) for seed in range(seeds)]
    differences = [changed[0] - plain[0] for plain, changed in pairs]
    error = statistics.stdev(differences) / seeds**0.5
    time = statistics.median(changed[1] / plain[1] for plain, changed in pairs)
    lines.append([f"`{change.strip()}`", f"{statistics.fmean(differences):+.4f} ± {error:.4f}", f"{time:.2f}"])
print(f"\n{markdown_table(['change', 'bits per byte', 'time'], lines)}\n\n"
      f"Difference to the run without the change, mean ± standard error over {seeds} seeds.")
