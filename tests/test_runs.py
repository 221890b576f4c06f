"""runs/ and the tour: what a page mentions exists; the launchers launch; the best size of a budget is found."""
import ast
import functools
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path

import page_formulas
import pictures
import pytest
from conftest import REPO, make_sums, run_module, warm_python
from PIL import Image

from configurator import read_settings

PAGES = sorted([*REPO.glob("*.md"), *REPO.glob("docs/*.md"), REPO / "docs/step.html", REPO / "tests/README.md"])
SCRIPTS = sorted([*REPO.glob("runs/*"), *REPO.glob("*.sh"), *REPO.glob("tests/*.sh")])


# ---- What a page claims

# A module that left the tree, and the commit that has it.
MADE_AT = r"(?:at|提交) ([0-9a-f]{7})(?: and before)?(?: by\s+`| 上由 `)python -m ([\w.]+)[^`\n]*`?"
OURS = ("*.py", "nanochat/**/*.py", "scripts/*.py", "bench/*.py", "tests/*.py")


def text_of(page: Path) -> str:
    """A page of Markdown; of HTML the comment at its head."""
    text = page.read_text(encoding="utf-8")
    return text if page.suffix == ".md" else text.partition("-->")[0]

@functools.cache
def settings_of(module: str) -> dict | None:
    """The settings of a script; None for a module that does not use the configurator."""
    path = REPO / f"{module.replace('.', '/')}.py"
    try:
        return read_settings(str(path))[0]
    except ValueError:
        return None


@functools.cache
def all_source() -> str:
    files = [*(path for folder in OURS for path in REPO.glob(folder)), *SCRIPTS, REPO / "pyproject.toml"]
    files.remove(Path(__file__))  # it has names in it that must not be found
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def problems(text: str, folder: Path) -> list[str]:
    """What a page of Markdown in that folder mentions and the repo does not have."""
    found = []
    text = re.sub(MADE_AT, "", text)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in link and not (folder / link).exists():
            found.append(f"link {link}")
    found += problems_of_commands(text)
    # names in backticks: files, settings, functions
    for path in re.findall(r"`((?:nanochat|scripts|bench|tests|docs|runs)/[\w./-]+)`", text):
        if not (REPO / path).exists():
            found.append(f"file {path}")
    for flag in re.findall(r"`--(\w[\w-]*)(?:=[^`]*)?`", text):
        setting = rf"^{flag.replace('-', '_')}\b.* = "  # at the top of a script
        if f"--{flag}" not in all_source() and not re.search(setting, all_source(), re.MULTILINE):
            found.append(f"setting --{flag}")
    for name in re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)(?:\(\))?`", text):
        if not re.search(rf"\b{name}\b", all_source()):
            found.append(f"name {name}")
    return found


def problems_of_commands(text: str) -> list[str]:
    """Of python, torchrun and bash."""
    found = []
    joined = re.sub(r"\\\n\s*", " ", text)
    for command in re.findall(r"(?:python3?|torchrun\b[^`\n|]*?) -m ([^`\n|;&]+)", joined):
        found += problems_of_command(shlex.split(re.split(" #| -->", command)[0]))
    for script, settings in re.findall(r"(?:bash|sbatch(?: --\S+)*) ([\w/.-]+\.(?:sh|sbatch))([^`\n|;&#]*)", joined):
        if not (REPO / script).exists():
            found.append(f"script {script}")
        elif " scripts." in settings:
            found += problems_of_command(settings.split())
        else:
            found += [f"{script} {flag}" for flag in re.findall("--[a-z]+", settings)
                      if flag not in (REPO / script).read_text()]
    return found


def problems_of_command(words: list[str]) -> list[str]:
    """The words after `-m`: a module of ours with settings it has, or pytest with tests there are. "…" is left out."""
    module, rest = words[0], words[1:]
    if module == "pytest":
        files = [REPO / word.split("::")[0] for word in rest if word.startswith("tests/")]
        missing = [f"test {file}" for file in files if not file.exists()]
        wanted = rest[rest.index("-k") + 1] if "-k" in rest else ""
        if wanted and not missing and not any(wanted in f"{file}{file.read_text()}" for file in files):
            missing.append(f"tests -k {wanted}")
        return missing
    if not module.startswith(("scripts.", "nanochat.", "bench.", "tests.")) or module.endswith((".", ".NAME", "…")):
        return []
    if not (REPO / f"{module.replace('.', '/')}.py").exists():
        return [f"module {module}"]
    if module == "tests.page_formulas":
        return [f"formula {word}" for word in rest if word not in ("--write", *page_formulas.blocks())]
    settings = settings_of(module)
    flags = [word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")]
    return [f"{module} --{flag}" for flag in flags if settings is not None and flag not in (*settings, "help")
            and "…" not in flag]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_what_a_page_mentions_exists(page):
    assert problems(text_of(page), page.parent) == []


def test_what_a_docstring_runs_exists():
    for pattern in OURS:
        for path in REPO.glob(pattern):
            docs = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
            assert problems_of_commands("\n".join(docs)) == [], path


def test_a_command_that_is_gone_is_found():
    gone = {"python -m bench.hosts": "module bench.hosts", "bash speedrun.sh --train": "speedrun.sh --train",
            "python -m tests.page_formulas mfu": "formula mfu",
            "python -m scripts.plan --dept=4": "scripts.plan --dept",
            "sbatch --nodes=2 runs/slurm.sbatch scripts.base_train --x=1": "scripts.base_train --x"}
    assert [problems_of_commands(command) for command in gone] == [[problem] for problem in gone.values()]


@pytest.mark.parametrize("script", [name for name in sorted(path.stem for path in REPO.glob("scripts/*.py"))
                                    if settings_of(f"scripts.{name}")])
def test_every_script_has_help(script):
    result = run_module(f"scripts.{script}", "--help")
    assert result.returncode == 0 and all(f"--{name}" in result.stdout for name in settings_of(f"scripts.{script}"))


def test_text_that_a_formula_makes_is_what_it_makes():
    for block, formula in page_formulas.blocks().values():
        assert block.find()[1] == formula(), f"docs/{block.path.name}: {block.mark}"


WRITING = sorted(path.stem for path in REPO.glob("bench/*.py") if "\nwrite = False" in path.read_text(encoding="utf-8"))
ENDS_WHEN_FOUND = """
import runpy, sys
from bench.harness import PageBlock
find = PageBlock.find
def end(block):
    find(block)
    sys.exit(7)
PageBlock.find = end
sys.argv = ["-m", "--write"]
runpy.run_module("bench.{}", run_name="__main__")
"""


@pytest.mark.parametrize("module", WRITING)
def test_a_measurement_finds_its_place_in_the_page_before_the_work(module):
    """Otherwise a missing mark would cost the measurement."""
    command = [warm_python(), "-c", ENDS_WHEN_FOUND.format(module)]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 7, result.stderr


# Each Chinese page, and the English one.
TRANSLATIONS = {page: page.with_name(page.name.replace(".zh-CN", "")) for page in PAGES if ".zh-CN" in page.name}


def facts(page: Path) -> dict[str, Counter]:
    """What a page has in any language: lines of code without comments, and links."""
    text = re.sub("<!--.*?-->", "", page.read_text(encoding="utf-8"))
    code = "".join(re.findall(r"```(?:\w*\n)(.*?)```", text, re.DOTALL))
    code = re.sub(r"(?m)(?:^|[ \t]+)#.*|(?<=/)[ ]{2,}.*", "", code)  # "folder/    what it is" as well
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = {link for link in re.findall(r"\]\(([^)]*)\)", text)  # a page in both languages is linked in one's own
             if page.parent / link not in {*TRANSLATIONS, *TRANSLATIONS.values()}}
    return {"code": Counter(code.splitlines()), "links": Counter(links)}


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_a_chinese_page_has_the_code_and_the_links_of_the_english_one(page):
    assert facts(page) == facts(TRANSLATIONS[page])


@pytest.mark.parametrize("path", sorted(REPO.glob("docs/images/*")), ids=lambda path: path.stem)
def test_pictures_show_what_is_in_the_tree(path):
    """Each says what it was made from. All are small, as git keeps every one."""
    made = Image.open(path).text["made from"]
    assert made == pictures.made_from(path.stem), f"{path.name} is older than what it shows: python tests/pictures.py"
    assert path.stat().st_size < 150_000


def test_the_docs_can_be_read_in_an_evening_or_two():
    """The English pages; nobody reads a translation besides. A page that grows pays by another that shrinks."""
    pages = {page: page.read_text(encoding="utf-8") for page in REPO.glob("docs/*.md") if page not in TRANSLATIONS}
    assert sum(len(text.split()) for text in pages.values()) <= 20_000
    assert pages[REPO / "docs/tried.md"].count("\n") <= 120


def test_every_page_is_in_the_index():
    index = (REPO / "docs" / "README.md").read_text(encoding="utf-8")
    names = {page.name for page in REPO.glob("docs/*.md")} - {"README.md"}
    assert [name for name in names if f"({name})" not in index] == []


# ---- Launchers

@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shell_scripts_parse(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""


SRUN = """#!/bin/bash
# Two nodes that are processes here; as srun does, it passes SIGTERM on to what it has started, and waits for all of it.
while [[ $1 == --* ]]; do shift; done
for SLURM_NODEID in 0 1; do SLURM_NODEID=$SLURM_NODEID "$@" & pids+=($!); done
trap 'kill -TERM "${pids[@]}"' TERM
status=0
for pid in "${pids[@]}"; do
    while kill -0 $pid 2>/dev/null; do wait $pid || status=$?; done
done
exit $status
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then printf '127.0.0.1\\n127.0.0.1\\n'; else echo "$*" >> "$SCONTROL_LOG"; fi
"""


def test_two_nodes_train_and_save_before_the_time_limit(tmp_path, base_folder):
    """
    slurm.sbatch, multi_node.sh and two launchers for real; SLURM's own commands are played. Signalled, the job saves
    and is requeued. It is started as under nohup: torchrun would act on a SIGHUP that was ignored.
    """
    make_sums(base_folder)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(REPO), "SCONTROL_LOG": str(tmp_path / "scontrol"),
        "PATH": f"{tmp_path / 'bin'}:{Path(warm_python()).parent}:{os.environ['PATH']}",
        "NANOCHAT_NO_VENV": "1", "NPROC": "1", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if "lo" in dict(socket.if_nameindex()).values() else "lo0",
    }
    command = ["bash", "runs/slurm.sbatch", "scripts.base_train", "--data=sums", "--depth=1", "--max_seq_len=32",
               "--device_batch_size=2", "--total_batch_size=128", "--num_iterations=100000", "--eval_every=-1",
               "--sample_every=-1", "--dtype=float32", "--compile=False", "--device_type=cpu", "--model_tag=nodes"]
    log = tmp_path / "log"
    job = subprocess.Popen(command, cwd=REPO, env=environment, stdout=open(log, "w"), stderr=subprocess.STDOUT,
                           start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    try:
        deadline = time.monotonic() + 400
        for step in (2, 20):
            while f"step {step:05d}/" not in log.read_text():
                assert time.monotonic() < deadline and job.poll() is None, log.read_text()
                time.sleep(0.05)
            os.killpg(job.pid, signal.SIGHUP)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=300) == 0, log.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    printed = log.read_text()
    step = int(re.search(r"stopped after step (\d+); .+ continues", printed)[1])
    for words in ("2 rank(s) on cpu", "x 2 rank(s) x 1 micro-step(s)", "nothing to resume"):
        assert words in printed, printed
    assert [path.name for path in (base_folder / "base_checkpoints" / "nodes").glob("step_*")] == [f"step_{step:06d}"]
    assert (tmp_path / "scontrol").read_text() == f"requeue {os.getpid()}\n"


# ---- Scaling laws

def test_a_series_says_the_best_size_of_each_budget_and_how_it_grows(base_folder):
    """Runs on parabolas whose lowest points are known; a budget with one run; a run that is not finished."""
    runs = [(budget, depth, best, 10) for budget, best in ((1e12, 458_752), (4e12, 917_504)) for depth in (1, 2, 4)]
    for budget, depth, best, steps in (*runs, (9e12, 1, 81_920, 10), (1e12, 8, 1, 20)):
        tag = base_folder / "base_checkpoints" / f"bowl-{budget}-d{depth}"
        (tag / "step_000010").mkdir(parents=True)
        model = dict(sequence_len=64, vocab_size=512, n_layer=depth, n_embd=64 * depth, n_head=1, n_kv_head=1)
        meta = {"num_iterations": steps, "total_batch_size": 1000, "model_config": model,
                "config": {"target_flops": budget}}
        (tag / "step_000010" / "meta.json").write_text(json.dumps(meta))
        (tag / "step_000010" / "manifest.json").write_text("{}")
        bpb = 1 + 0.05 * math.log2((12 * depth * (64 * depth) ** 2 + 512 * 64 * depth) / best) ** 2
        records = [json.dumps({"step": step, "val/bpb": value}) for step, value in ((0, 4.0), (10, bpb))]
        (tag / "metrics.jsonl").write_text("\n".join(records) + "\n")
    result = run_module("bench.scaling", "--series=bowl")
    assert result.returncode == 0, result.stderr
    for size in ("458,752", "917,504"):
        assert f"at {size} parameters, with 1.0000 bits per byte" in result.stdout
    assert "FLOPs^0.50," in result.stdout and result.stdout.count("lowest") == 2
    assert "bowl-1000000000000.0-d8" in result.stdout, "it is not finished"
    # depth 2 by hand: 6 · (12 · 2 · 128² + 512 · 128) + 12 · 2 · 128 · 64 per token
    flops = 10_000 * (6 * (12 * 2 * 128**2 + 512 * 128) + 12 * 2 * 128 * 64)
    assert f"| {flops:.2e} | 2 | 458,752 | 10,000 | 0.0218 | **1.0000** |" in result.stdout
