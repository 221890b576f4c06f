"""
Models trained on or cut over several ranks, compared with one rank, and ways to get that wrong: the tables of
docs/data_parallel.md, docs/tensor_parallel.md and, for bench/stage3.py, docs/zero.md.

    python -m bench.parallel --idea=data --write    # without --write it is only printed
"""
from typing import Literal

from configurator import configure

idea: Literal["data", "tensor", "context", "stage3"] = "data"  # tensor: and sequence
ranks: Literal[2, 4] = 4    # ranks to start here
write = False               # put the table into the page
configure(globals())

from bench import context, naive, stage3, tensor
from bench.harness import PageBlock, on_ranks
from nanochat.runtime.tables import cell, markdown_table

block = PageBlock({"data": "data_parallel.md", "stage3": "zero.md"}.get(idea, "tensor_parallel.md"),
                  f"bench.parallel --idea={idea}", write)

module = {"data": naive, "tensor": tensor, "context": context, "stage3": stage3}[idea]


def measure_all(rank: int, ranks: int) -> list[list]:
    return [[variant, *map(cell, module.measure(variant))] for variant in module.VARIANTS]


columns = getattr(module, "COLUMNS", tensor.COLUMNS)
end = "." if idea == "data" else "; in bytes."
block.show(f"{markdown_table(['how', *columns], on_ranks(ranks, measure_all))}\n\nOn {ranks} ranks{end}")
