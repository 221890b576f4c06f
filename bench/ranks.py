"""
What several ranks cost on one machine: whole runs of base_train on N ranks with one thread each, against one rank with
N threads, on the same batch and in turns, so that a machine whose speed drifts does not decide.

    python -m bench.ranks
"""
import statistics

from configurator import configure

from bench.harness import scratch_base, train

ranks = 2                   # [2..] processes of the runs with several
stages = "1 2"              # of ZeRO
pairs = 3                   # [1..] runs of each, in turns
steps = 6                   # [3..] optimizer steps of a run; the first two are not counted
depth = 4                   # [1..] of the model
max_seq_len = 512           # [1..] tokens per row
device_batch_size = 8       # [1..] rows per rank and micro-step
grad_accum_steps = 2        # [1..] micro-steps on each of the ranks; one rank alone has so many more
configure(globals())

batch = ranks * grad_accum_steps * device_batch_size * max_seq_len
settings = dict(depth=depth, max_seq_len=max_seq_len, device_batch_size=device_batch_size, total_batch_size=batch)
with scratch_base():
    train(1, ranks, num_iterations=3, **settings)  # makes the data and fills the compiler's caches
    for stage in stages.split():
        ratios = []
        for _ in range(pairs):
            alone = train(1, ranks, num_iterations=steps, **settings).tok_per_sec
            together = train(ranks, 1, num_iterations=steps, zero_stage=stage, **settings).tok_per_sec
            ratios.append(together / alone)
            print(f"stage {stage}: {ranks} ranks {together:,.0f} tok/s, one rank with {ranks} threads "
                  f"{alone:,.0f} tok/s: {ratios[-1]:.1%}", flush=True)
        print(f"stage {stage}: median {statistics.median(ratios):.1%}", flush=True)
