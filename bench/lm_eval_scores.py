"""
CORE and chat tasks judged from outside: lm-eval asks a chat server, and its scores are compared with the repo's own, on
the same items and item by item.

    python -m venv judge && judge/bin/pip install "lm-eval[api]"
    NANOCHAT_EVAL_DATA=/folder python -m bench.lm_eval_scores --python=judge/bin/python --model_tag=d4

/folder has the bundle, eval_bundle. The items of CORE become local task files: the same examples before each, cut to
the model's context and divided where the repo divides them. Tokens, log-probabilities and accuracies are lm-eval's, by
/tokenize and /v1/completions. Its own `acc` adds up log-probabilities where CORE takes their mean, so both rules are
applied to both sides' numbers.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from configurator import configure

import torch

from bench.harness import show
from nanochat.checkpoint import find_model, load_checkpoint
from nanochat.core_eval import CoreTask, evaluate_core, load_items, load_tasks, measure, rows_of
from nanochat.distributed import compute_init
from nanochat.report import markdown_table
from nanochat.task_eval import GREEDY, accuracy, answer_text, evaluate_task, generate_answers
from nanochat.tasks import make_tasks
from nanochat.tokenizer import Tokenizer

model_tag: str | None = None  # of the models; None: the only one there is
python = "python"           # of the environment that has lm-eval
core = "copa, winograd, winogrande, openbook_qa, bigbench_operators, bigbench_repeat_copy_logic"  # empty: none
chat = ""                   # tasks for a chat model, such as "tinyworld:facts, arithmetic"; empty: none
source = "sft"              # stage of the chat model
batch_size = 16             # [1..] prompts in a request
configure(globals())

TOKENS_PER_FORWARD = 16384
bundle = Path(os.environ.get("NANOCHAT_EVAL_DATA", ".")) / "eval_bundle"


def serve(stage: str) -> tuple[subprocess.Popen, str, str]:
    """A server of its own: the process, its address, the model's name."""
    command = [sys.executable, "-m", "scripts.chat_web", f"--source={stage}", "--port=0", "--dtype=float32",
               "--max_chars=4000000", "--max_body_bytes=16000000"]
    command += [f"--model_tag={model_tag}"] if model_tag else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if found := re.match(r"(http://\S+) serves (\S+);", line):
            return process, found[1], found[2]
    raise SystemExit(f"the server of the {stage} model ended with code {process.wait()}")


def judge(stage: str, tasks: dict[str, dict], documents: dict[str, list[dict]], *options: str) -> dict[str, list[dict]]:
    """What lm-eval logs of each item of each task (name → settings of a task file, and its documents)."""
    process, url, model = serve(stage)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task, settings in tasks.items():
            items = folder / f"{task}.jsonl"
            items.write_text("".join(json.dumps(document) + "\n" for document in documents[task]))
            settings = settings | {"task": task, "dataset_path": "json", "test_split": "test",
                                   "dataset_kwargs": {"data_files": {"test": str(items)}}}
            (folder / f"{task}.yaml").write_text(json.dumps(settings))  # JSON is YAML
        kind = "" if stage == "base" else "chat-"
        address = f"{url}/v1/{kind.replace('-', '/')}completions"
        command = [
            python, "-m", "lm_eval", "--model", f"local-{kind}completions", "--tasks", ",".join(tasks), *options,
            "--include_path", name, "--log_samples", "--output_path", f"{name}/out",
            "--model_args", f"model={model},base_url={address},max_length={context}"]
        try:
            subprocess.run(command, check=True, env=os.environ | {
                "HF_HOME": name, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"})
        finally:
            process.terminate()
            process.wait()
        logged = {}
        for task in tasks:
            [file] = folder.glob(f"out/**/samples_{task}_*.jsonl")
            samples = [json.loads(line) for line in file.read_text().splitlines()]
            logged[task] = sorted(samples, key=lambda sample: sample["doc_id"])
        return logged


# ---- CORE


def document_of(tokenizer: Tokenizer, kind: str, rows: list, gold: int) -> dict:
    """An item for lm-eval, from its rows: the text up to the tokens that count, and they. One of both are choices."""
    texts = []
    for tokens, counts in rows:
        start = counts.index(1.0)
        texts.append((tokenizer.decode(tokens[1:start]), tokenizer.decode(tokens[start:])))
    before, after = zip(*texts)
    choices, text = (before, after[0]) if kind == "schema" else (after, before[0])
    return {"gold": gold, "choices": choices, "text": text, "answer": after[0]}


def compare_core(task: CoreTask, model, tokenizer: Tokenizer, rows: list[list], logged: list[dict]) -> list[str]:
    """A line of the table."""
    golds = [item.gold for item in load_items(task)]
    greedily = task.kind == "language_modeling"
    values = iter(measure(model, [row for group in rows for row in group], greedily, TOKENS_PER_FORWARD))
    own = [[next(values) for _ in group] for group in rows]
    _, [score] = evaluate_core(model, tokenizer, [task], tokens_per_forward=TOKENS_PER_FORWARD)
    right, by_sum, own_by_sum, different, ties, furthest = 0, 0, 0, 0, 0, 0.0
    for group, losses, gold, sample in zip(rows, own, golds, logged, strict=True):
        theirs = [(float(one[0][0]), str(one[0][1]) == "True") for one in sample["resps"]]
        if greedily:
            mine, their = losses[0] == 0, theirs[0][1]
            by_sum += sample["acc"]
        else:
            counts = [sum(weights) for _, weights in group]
            means = [-value / count for (value, _), count in zip(theirs, counts)]
            mine, their = losses.index(min(losses)) == gold, means.index(min(means)) == gold
            sums = [loss * count for loss, count in zip(losses, counts)]
            by_sum, own_by_sum = by_sum + sample["acc"], own_by_sum + (sums.index(min(sums)) == gold)
            furthest = max(furthest, *(abs(mean - loss) for mean, loss in zip(means, losses)))
            ties += sorted(losses)[1] - sorted(losses)[0] < 1e-5
        right, different = right + their, different + (mine != their)
    items = len(golds)
    sums = ["" if greedily else f"{own_by_sum / items:.10f}", f"{by_sum / items:.10f}"]
    return [task.label, f"{items:,}", f"{score.accuracy:.10f}", f"{right / items:.10f}", *sums, str(different),
            str(ties), f"{furthest:.1e}" if furthest else ""]


def core_table() -> str:
    names = [name.strip() for name in core.split(",")]
    tasks = {task.label: task for task in load_tasks(bundle) if task.label in names}
    rows, documents, settings = {}, {}, {}
    for label, task in tasks.items():
        items = load_items(task)
        rows[label] = rows_of(task, items, 0, len(items), tokenizer, context)
        pairs = zip(rows[label], items)
        documents[label] = [document_of(tokenizer, task.kind, group, item.gold) for group, item in pairs]
        # Names of fields, not templates, which would change texts. Where the text is a number, choices come before it.
        fields = {"doc_to_text": "text", "doc_to_choice": "choices", "doc_to_target": "gold"}
        if task.kind == "schema":
            fields |= {"doc_to_text": "gold", "doc_to_target": "text"}
        if task.kind == "language_modeling":
            fields = {"doc_to_text": "text", "doc_to_target": "answer"}
        settings[label] = fields | {
            "output_type": "loglikelihood" if task.kind == "language_modeling" else "multiple_choice",
            "target_delimiter": "", "metric_list": [{"metric": "acc"}]}
    logged = judge("base", settings, documents, "--batch_size", str(batch_size))
    lines = [compare_core(task, model, tokenizer, rows[label], logged[label]) for label, task in tasks.items()]
    return markdown_table(
        ["task", "items", "core_eval", "CORE's rule, lm-eval's log-probabilities", "sums: ours", "sums: lm-eval's acc",
         "items that differ", "ties < 1e-5", "largest difference of a mean"], lines)


# ---- Chat


def chat_table() -> str:
    lines = []
    for number, task in enumerate(make_tasks(chat, "test")):
        everything = [task[index] for index in range(len(task))]
        single = [index for index, one in enumerate(everything) if len(one["messages"]) == 2]  # one text each
        conversations = [everything[index] for index in single]
        name = f"chat_{number}"
        documents = [{"text": one["messages"][0]["content"], "answer": ""} for one in conversations]
        settings = {"output_type": "generate_until", "doc_to_text": "text", "doc_to_target": "answer",
                    "generation_kwargs": {"until": [], "max_gen_toks": 256, "temperature": 0},
                    "metric_list": [{"metric": "exact_match"}]}
        [logged] = judge(source, {name: settings}, {name: documents}, "--apply_chat_template").values()
        theirs = [sample["resps"][0][0] for sample in logged]
        right = [task.evaluate(one, text) for one, text in zip(conversations, theirs, strict=True)]
        answers = generate_answers(model, tokenizer, conversations, single, GREEDY, 1, 16)
        same = sum(answer_text(tokenizer, answer) == text for (answer,), text in zip(answers, theirs))
        correct = evaluate_task(task, model, tokenizer, 16)
        own = accuracy([correct[index] for index in single])
        scores = [f"{own:.10f}", f"{sum(right) / len(right):.10f}"]
        lines.append([task.name, f"{len(single):,} of {len(task):,}", *scores, f"{same:,}"])
    return markdown_table(["task", "items of one question", "chat_eval", "lm-eval's answers", "the same answer"], lines)


if not bundle.is_dir() and core:
    print(f"{bundle} is not there: NANOCHAT_EVAL_DATA names the folder that has eval_bundle; CORE is left out")
    core = ""
if not shutil.which(python) or subprocess.run([python, "-c", "import lm_eval"], capture_output=True).returncode:
    print(f"{python} has no lm-eval: pip install 'lm-eval[api]' into an environment, and --python=... names its Python")
    core = chat = ""
*_, device = compute_init("cpu")
for stage, table in [("base", core_table)] * bool(core) + [(source, chat_table)] * bool(chat):
    model, tokenizer, _ = load_checkpoint(find_model(stage, model_tag, None), device)
    model, context = model.eval().float(), model.config.sequence_len
    with torch.inference_mode():
        show(table(), "", "bench.lm_eval_scores", write=False)
