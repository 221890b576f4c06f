"""
The numbers of models and links that docs/step.html computes with, written into it.

    python -m bench.step_page
"""
import json
import re

from configurator import configure

from bench.harness import DOCS
from nanochat.files import write_text
from nanochat.flops import datasheet_peak
from nanochat.gpt import GPTConfig, config_from_depth
from nanochat.plan.machines import LINKS, orthogonalizing_flops
from nanochat.plan.memory import parameter_counts, shaped

configure(globals())

PAGE, DEPTHS, LENGTH = DOCS / "step.html", (4, 12, 20, 24, 32), 2048
DATA = re.compile(r'(<script type="application/json" id="data">).*?(</script>)', re.DOTALL)


def config_of(depth: int) -> GPTConfig:
    return config_from_depth(depth, 65536, LENGTH, arch="modern")


def numbers(depth: int) -> dict:
    config = config_of(depth)
    adamw, muon = parameter_counts(config)
    products = orthogonalizing_flops(config)
    units = [sum(p.numel() for p in unit.parameters()) for unit in shaped(config).units()]
    return {"total": adamw + muon, "muon": muon, "head": config.padded_vocab_size * config.n_embd, "units": units,
            "flops": shaped(config).estimate_flops(), "products": sum(products), "product": max(products)}


data = {"models": {depth: numbers(depth) for depth in DEPTHS}, "links": {k: v._asdict() for k, v in LINKS.items()},
        "rate": datasheet_peak("H100") / 2, "length": LENGTH}
html = PAGE.read_text(encoding="utf-8")
write_text(PAGE, DATA.sub(lambda found: found[1] + json.dumps(data) + found[2], html))
