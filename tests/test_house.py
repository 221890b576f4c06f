"""The layout: what may import what. Read from the source, so that an import inside a function counts as well."""
import ast
import functools
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from conftest import REPO

# Rooms import from lower floors only. The wings stand on top of them, and not on one another.
FLOORS = {"runtime": 0, "model": 1, "data": 1, "optim": 2, "library": 2, "inference": 3, "eval": 4, "training": 5}
WINGS = ("corpus", "tasks", "serve", "hf", "plan")
# What tasks ask about: the embedded world.
SHARED = {("tasks", "nanochat.corpus.tinyworld")}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for folder in ("nanochat", "scripts", "bench") for path in (REPO / folder).rglob("*.py")}
MODULES["configurator"] = REPO / "configurator.py"


@functools.cache
def imported(module: str) -> frozenset[str]:
    """What a module imports, ours by the file that is meant (`from nanochat import gpt` is nanochat.model.gpt)."""
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


def room_of(module: str) -> str:
    """The room or wing that a module is in; for one outside of nanochat the first part of its name."""
    parts = module.split(".")
    return parts[1] if parts[0] == "nanochat" and len(parts) > 1 else parts[0]


def test_nothing_imports_upwards():
    """The package imports neither scripts nor benchmarks, and scripts no benchmarks."""
    wrong = []
    for module in MODULES:
        room = room_of(module)
        for name in imported(module):
            other = room_of(name)
            if other == room or (room, name) in SHARED or name not in MODULES:
                continue
            if room in FLOORS:
                allowed = FLOORS.get(other, 99) < FLOORS[room]
            elif room in WINGS:
                allowed = other in FLOORS
            else:
                allowed = other != "bench" or room == "bench"
            if not allowed:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_every_module_is_in_a_room():
    rooms = {path.name for path in (REPO / "nanochat").iterdir() if path.name != "__pycache__"}
    assert rooms == {"__init__.py", *FLOORS, *WINGS}


def test_there_are_no_import_circles():
    assert [module for module in MODULES if module in reachable(module)] == []


def test_the_floors_of_the_core_know_nothing_of_ranks():
    """The model, its loss and the tokenizer work without process groups, optimizers and sharding."""
    for module in ("data.tokenizer", "model.gpt", "model.attention", "model.loss"):
        found = reachable(f"nanochat.{module}")
        assert not any(name.startswith("torch.distributed") for name in found), module
        assert not any(room_of(name) == "optim" for name in found), module
        assert "nanochat.runtime.distributed" not in found, module
        assert len({name for name in found if name.startswith("nanochat")}) <= 9, f"{module} needs {sorted(found)}"


@pytest.mark.parametrize("script, carried", [
    ("base_train", {"runtime", "model", "data", "optim", "eval", "training"}),
    ("base_eval", {"runtime", "model", "data", "eval", "training"}),
    ("mid_train", {"runtime", "model", "data", "optim", "library", "inference", "eval", "training", "tasks"}),
    ("chat_cli", {"runtime", "model", "data", "library", "inference", "training"}),
])
def test_a_command_carries_only_rooms_that_it_uses(script, carried):
    """A reader of the command need not know the others."""
    found = {room_of(name) for name in reachable(f"scripts.{script}") if name.startswith("nanochat.")}
    assert found == carried


def test_every_package_is_installed():
    """pyproject.toml lists the folders, and files that are not Python, by hand: a new one must not be forgotten."""
    listed = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    packages = {".".join(path.relative_to(REPO).parent.parts) for path in REPO.glob("nanochat/**/*.py")} | {"scripts"}
    files = {path.name for path in REPO.glob("nanochat/*/*.*")
             if path.suffix not in (".py", ".pyc") and not path.match("tasks/*.toml")}  # which it lists by a pattern
    assert all(f'"{name}"' in listed for name in packages | files)


ELSEWHERE = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
import ranks, test_house, warm_python
ranks.context.set_forkserver_preload(["torch", "nanochat"])
print(*ranks.run_on_ranks(1, test_house.where))
for python in (warm_python.warm_python(), sys.executable):
    subprocess.run([python, "-c", "import nanochat; print(nanochat.__file__)"], check=True)
"""


def where(rank: int, world_size: int) -> str:
    return sys.modules["nanochat"].__file__


def test_the_code_that_is_tested_lies_beside_the_tests(tmp_path):
    """Another checkout is installed, and the tests are run from elsewhere: in ranks, warm scripts and new processes."""
    other = tmp_path / "other" / "nanochat"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, str(REPO / "tests")], cwd=tmp_path, text=True,
                          env=os.environ | {"PYTHONPATH": str(other.parent)}, capture_output=True)
    assert done.stdout.splitlines() == [str(REPO / "nanochat" / "__init__.py")] * 3, done.stderr


def test_no_statement_is_unreachable():
    """Behind a return, raise, continue or break of the same block nothing runs: an assertion there checks nothing."""
    found = []
    for path in (REPO / "configurator.py", *MODULES.values(), *REPO.glob("tests/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for block in ("body", "orelse", "finalbody"):
                statements = getattr(node, block, None)
                for statement in statements[:-1] if isinstance(statements, list) else ():
                    if isinstance(statement, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
                        found.append(f"{path.relative_to(REPO)}:{statement.end_lineno + 1}")
    assert found == []


# Names, operators, numbers and strings of each folder's code, without docstrings. A feature that does not fit pays by
# removing something; a step that makes a folder smaller lowers its number.
BUDGETS = {
    "scripts": 9_700, "nanochat/runtime": 5_200, "nanochat/model": 11_620, "nanochat/optim": 9_690,
    "nanochat/data": 8_500, "nanochat/training": 9_310, "nanochat/library": 8_390, "nanochat/inference": 11_230,
    "nanochat/eval": 3_730, "nanochat/corpus": 4_650, "nanochat/tasks": 12_770, "nanochat/serve": 7_320,
    "nanochat/hf": 3_130, "nanochat/plan": 3_940, "bench": 14_000, "tests": 117_000,
}
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
# Python 3.12 and later divide an f-string into tokens, which count as one string here.
DIVIDED = [name for name in ("FSTRING", "TSTRING") if hasattr(tokenize, f"{name}_START")]
BEGINS, ENDS = ({getattr(tokenize, f"{name}_{end}") for name in DIVIDED} for end in ("START", "END"))


def count_tokens(path: Path) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        has_body = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if has_body and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    count = depth = 0
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            depth -= token.type in ENDS
            if depth == 0 and token.type in COUNTED | ENDS and token.start[0] not in docstrings:
                count += 1
            depth += token.type in BEGINS
    return count


def test_an_f_string_is_one_token_for_every_python(tmp_path):
    (tmp_path / "a.py").write_text("""x = f"{a + 1:>{n}} and {f'{b}'}" f"c" + d\n""")
    assert count_tokens(tmp_path / "a.py") == 6


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_keeps_its_budget(folder):
    assert sum(map(count_tokens, (REPO / folder).glob("*.py"))) <= BUDGETS[folder]
