"""The layout: what may import what. Read from the source, so that an import inside a function counts as well."""
import ast
import functools
from pathlib import Path

from conftest import REPO

WINGS = ("corpus", "tasks", "serve", "hf", "plan")
SHARED = {("tasks", "nanochat.corpus.tinyworld"), ("tasks", "nanochat.corpus.tinyworld_facts")}  # the world asked about


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for folder in ("nanochat", "scripts", "bench") for path in (REPO / folder).rglob("*.py")}
MODULES["configurator"] = REPO / "configurator.py"


@functools.cache
def imported(module: str) -> frozenset[str]:
    """What a module imports, ours by the file that is meant (`from nanochat import gpt` is nanochat.gpt)."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return frozenset(found)


def reachable(module: str) -> set[str]:
    """All modules that are imported with a module, ours followed to the end."""
    seen, todo = set(), [module]
    while todo:
        for name in imported(todo.pop()) - seen:
            seen.add(name)
            if name in MODULES:
                todo.append(name)
    return seen


def wing_of(module: str) -> str:
    """The wing a module is in; "" for the core and everything outside of nanochat."""
    parts = module.split(".")
    return parts[1] if parts[0] == "nanochat" and len(parts) > 1 and parts[1] in WINGS else ""


def test_nothing_imports_upwards():
    """The core imports no wing, a wing no other wing; the package imports neither scripts nor benchmarks."""
    wrong = []
    for module in MODULES:
        for name in imported(module):
            above = name.split(".")[0] in ("scripts", "bench", "configurator") and module.startswith("nanochat")
            across = wing_of(name) not in ("", wing_of(module)) and module.startswith("nanochat")
            shared = (wing_of(module), name) in SHARED
            if above or across and not shared or name.startswith("bench") and module.startswith("scripts"):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_there_are_no_import_circles():
    assert [module for module in MODULES if module in reachable(module)] == []


def test_the_floors_of_the_core_know_nothing_of_ranks():
    """The model, its loss and the tokenizer work without process groups, optimizers and sharding."""
    for module in ("tokenizer", "gpt", "attention", "loss"):
        found = reachable(f"nanochat.{module}")
        assert not any(name.startswith("torch.distributed") for name in found), module
        above = {f"nanochat.{name}" for name in ("distributed", "zero", "muon", "adamw", "optimizers")}
        assert not found & above, module
        assert len({name for name in found if name.startswith("nanochat")}) <= 6, f"{module} needs {sorted(found)}"


def test_every_package_is_installed():
    """pyproject.toml lists the folders by hand: a new one must not be forgotten."""
    listed = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    packages = {".".join(path.relative_to(REPO).parent.parts) for path in REPO.glob("nanochat/**/*.py")} | {"scripts"}
    assert all(f'"{package}"' in listed for package in packages)
