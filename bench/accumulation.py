"""
One optimizer step cut into micro-steps and over ranks: the same loss, other memory. The table of docs/two_loops.md.

    python -m bench.accumulation --write    # without --write it is only printed; Linux

Whole runs of base_train, in float32, on the same rows whatever the cut.
"""
import os

from configurator import configure

from bench.harness import scratch_base, show, train
from nanochat.report import markdown_table

depth = 4                   # [1..] layers
max_seq_len = 256           # [1..] tokens per row
rows = 16                   # [1..] of an optimizer step, over all ranks
steps = 4                   # [3..] optimizer steps of a run; the first two are not timed
micro_steps = "1 2 4 8"     # cuts of the batch on one rank, and then on two
write = False               # put the table into docs/two_loops.md
configure(globals())

cores, lines, whole = len(os.sched_getaffinity(0)), [], None
with scratch_base(vocab_size=4096):
    for ranks, cuts in ((ranks, int(cut)) for ranks in (1, 2) for cut in micro_steps.split()):
        if rows % (ranks * cuts):
            continue
        run = train(
            ranks, max(cores // ranks, 1), dtype="float32", compile=False, depth=depth, max_seq_len=max_seq_len,
            device_batch_size=rows // cuts // ranks, total_batch_size=rows * max_seq_len, num_iterations=steps,
        )
        whole = whole or run.losses
        apart = max(abs(a - b) for a, b in zip(run.losses, whole))
        lines.append([f"{ranks} × {cuts} × {rows // ranks // cuts}", f"{run.losses[-1]:.6f}",
                      f"{apart:.1e}" if apart else "0", f"{run.tok_per_sec:,.0f}", f"{run.peak / 1e6:,.0f}"])
        print(*lines[-1], sep="  ", flush=True)
columns = ["ranks × micro-steps × rows", f"loss of step {steps}", "largest difference in any step", "tok/s",
           "peak MB of a rank"]
show(f"{markdown_table(columns, lines)}\n\nDepth {depth}, {rows} rows of {max_seq_len} tokens in every step, float32, "
     f"{cores} CPU cores shared by the ranks. The loss is in nats per token; differences are to the first line.",
     "two_loops.md", "bench.accumulation", write)
