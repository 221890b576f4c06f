"""
Data parallelism in ten lines, the ways in which it goes wrong, and what ZeRO makes of it: the tables of
docs/data_parallel.md.

    python -m bench.data_parallel --write    # without --write they are only printed
"""
from configurator import configure

from bench.harness import on_ranks, show
from bench.naive import CONFIG, OPTIMIZERS, VARIANTS, all_distances
from bench.watch import KEPT, measure_all
from nanochat.plan.memory import parameter_counts
from nanochat.report import markdown_table

ranks = 4                   # [2, 4] processes; they divide the eight rows of a step
write = False               # put the tables into docs/data_parallel.md
configure(globals())

lines, sent, parameters = [], f"{8 * (ranks - 1) / ranks:.2f}", sum(parameter_counts(CONFIG))
for variant, off in on_ranks(ranks, all_distances).items():
    lines.append([VARIANTS[variant], *(f"{number:.1e}" if 0 < number < 1e-3 else f"{number:.3g}" for number in off)])
stages = [["the ten lines, AdamW", "16.00", sent, sent]]
for found in on_ranks(ranks, measure_all, CONFIG, False, ["float32"]):
    kept = sum(found["memory"][part] for part in KEPT)
    stages.append([f"stage {found['stage']}", *(f"{size / parameters:.2f}" for size in (kept, *found["sent"]))])
columns = [f"{kind}: {what}" for kind in OPTIMIZERS for what in ("off", "ranks apart")]
titles = [f"bytes per parameter, {ranks} ranks", "keeps", "sends, 1 micro-step", "sends, 4 micro-steps"]
wrong = markdown_table(["what is done with the gradients", *columns], lines)
show(f"{wrong}\n\n{markdown_table(titles, stages)}",
     "data_parallel.md", "bench.data_parallel", write)
