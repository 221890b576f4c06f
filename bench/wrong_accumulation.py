"""
What wrong gradient accumulation does under three optimizers: a table of docs/two_loops.md.

    python -m bench.wrong_accumulation --write    # without --write it is only printed
"""
from configurator import configure

from bench.harness import on_ranks, show
from bench.mistakes import CONFIG, MICRO_STEPS, RANKS, ROWS, STEPS, measure
from nanochat.report import markdown_table

write = False               # put the table into docs/two_loops.md
configure(globals())

columns = ["the summed gradient is", "SGD", "AdamW", "Muon (and AdamW)"]
table = markdown_table(columns, on_ranks(RANKS, measure))
table += (f"\n\nLoss in nats per byte on documents that were not trained on, after {STEPS} steps of {RANKS} "
          f"ranks × {MICRO_STEPS} micro-steps × {ROWS} rows; {CONFIG.n_layer} layers, bytes of the embedded world.")
show(table, "two_loops.md", "bench.wrong_accumulation", write)
