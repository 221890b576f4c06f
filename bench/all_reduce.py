"""
The seconds of an all-reduce of so many float32 numbers, for each byte that a rank sends; 0 on one rank:

    torchrun --nproc_per_node=2 -m bench.all_reduce 1000000
"""
import statistics
import sys

from bench.harness import all_reduce_seconds
from nanochat.distributed import compute_cleanup, compute_init

rank, ranks, _ = compute_init("cpu")
numbers = int(sys.argv[1])
seconds = statistics.median(all_reduce_seconds(numbers, 9))
if rank == 0:
    print(f"seconds per byte: {seconds / (2 * 4 * numbers * (ranks - 1) / ranks) if ranks > 1 else 0.0}")
compute_cleanup()
