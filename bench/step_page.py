"""
The numbers of models and links that docs/step.html computes with, and two recorded steps, written into it.

    python -m bench.step_page --record      # without --record the recorded steps stay as they are
"""
import json
import platform
import re
from pathlib import Path

from configurator import configure

from bench.harness import DOCS, on_ranks
from bench.profiled import DEPTH, MICRO_STEPS, ROWS, Spans, profile_steps
from nanochat.files import write_text
from nanochat.flops import datasheet_peak
from nanochat.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.machines import LINKS
from nanochat.plan.memory import Part, parts

record = False              # run and record steps on two ranks of this machine
configure(globals())

PAGE, DEPTHS, LENGTH, PIPELINES = DOCS / "step.html", (4, 12, 20, 24, 32), 2048, (1, 2, 4, 8)
DATA = re.compile(r'(<script type="application/json" id="data">)(.*?)(</script>)', re.DOTALL)


def config_of(depth: int) -> GPTConfig:
    return config_from_depth(depth, 65536, LENGTH, arch="modern")


def numbers(part: Part) -> dict:
    return {"total": part.adamw + part.muon, "muon": part.muon, "units": part.units, "flops": part.flops,
            "products": sum(part.products), "product": max(part.products),
            "layers": [part.layers.start, part.layers.stop]}


def model_numbers(depth: int) -> dict:
    config = config_of(depth)
    possible = [stages for stages in PIPELINES if stages <= depth]
    return {"head": config.padded_vocab_size * config.n_embd, "width": config.n_embd,
            "parts": {stages: [numbers(part) for part in parts(config, stages)] for stages in possible}}


def tape(of_ranks: list[list[Spans]]) -> dict:
    """The last step of each rank, in ms to a tenth."""
    ranks = [{kind: [[round(ms, 1) for ms in span] for span in spans] for kind, spans in steps[-1].items() if spans}
             for steps in of_ranks]
    return {"ms": max(sum(span) for spans in ranks for of_kind in spans.values() for span in of_kind), "ranks": ranks}


def processor() -> str:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0] if names else platform.machine()


def recorded_steps() -> dict:
    what = f"a step of depth {DEPTH}, {ROWS} rows of 256 tokens at a time, on two processes with a thread each"
    steps = {f"ZeRO stage 2, {MICRO_STEPS} micro-steps": tape(on_ranks(2, profile_steps, 2)),
             f"a pipeline of 2 stages, {2 * MICRO_STEPS} micro-batches": tape(on_ranks(2, profile_steps, 1, 2))}
    return {"machine": f"{what}, {processor()}, gloo over the loopback, by torch.profiler", "steps": steps}


steps = recorded_steps() if record else None
html = PAGE.read_text(encoding="utf-8")
before = json.loads(DATA.search(html)[2])
data = {"models": {depth: model_numbers(depth) for depth in DEPTHS},
        "links": {name: link._asdict() for name, link in LINKS.items()},
        "rate": datasheet_peak("H100") / 2, "length": LENGTH,
        "recorded": steps or before.get("recorded", {"machine": "", "steps": {}})}
write_text(PAGE, DATA.sub(lambda found: found[1] + json.dumps(data) + found[3], html))
