"""
Evaluate a chat model on tasks: multiple choice by the likeliest letter, everything else by what it writes.

    torchrun --nproc_per_node=8 -m scripts.chat_eval --source=rl --tasks="arc:ARC-Easy, mmlu, gsm8k, humaneval"
"""
from typing import Literal

from configurator import configure

# ---- Model
source: Literal["base", "mid", "sft", "rl"] = "sft"  # stage of the model
model_tag: str | None = None  # folder of its checkpoints; None: the only one there is
step: int | None = None     # the checkpoint's step; None: the newest valid one
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best available
# ---- Evaluation
tasks = "tinyworld, arithmetic, spellingbee"  # tasks whose held-out problems are solved; [:n]: the first n
max_problems = -1           # [-1, 1..] problems of each task; -1: all
batch_size = 32             # [1..] problems, or sequences, at a time on each rank; halve it when memory runs out
max_new_tokens = 512        # [1..] tokens of an answer
copying = True              # copy calls and quotations exactly (nanochat/inference/copying.py)
configure(globals())

# ---- Tasks: a mistyped one, or a file that is missing, is answered here, before torch is imported
from nanochat.runtime.errors import UserError
from nanochat.tasks import make_tasks

measured = make_tasks(tasks, "test")
if not measured:
    raise UserError(f"tasks={tasks} has nothing that can be measured, only what can be trained on")

from nanochat.eval.task_eval import chatcore, evaluate_task, pass_at
from nanochat.inference.sampling import SamplingParams
from nanochat.runtime.console import print0
from nanochat.runtime.distributed import compute_cleanup, compute_init
from nanochat.runtime.tables import markdown_table
from nanochat.training.checkpoint import find_model, load_checkpoint
from nanochat.training.run_report import write_section

device = compute_init(device_type)
checkpoint = find_model(source, model_tag, step)
model, tokenizer, meta = load_checkpoint(checkpoint, device)
print0(f"model: {checkpoint}")

results: dict[str, float | str] = {}
misquotes: list[bool] = []
accuracies: dict[str, float] = {}
scores = []
rows = []
sampling = SamplingParams(max_new_tokens, temperature=0)  # always the likeliest token
for task in measured:
    correct, misquoted = evaluate_task(task, model, tokenizer, batch_size, max_problems, sampling, copying=copying)
    accuracies[task.name] = right = pass_at(correct, 1)
    misquotes += misquoted
    # With copying, quotations are exact. Only an answer to "nothing" that does not begin like a refusal can be wrong.
    quotes = f"{sum(misquoted):,} of {len(misquoted):,}" if misquoted else ""
    results[task.name] = f"{right:.1%}"
    scores.append((right - task.baseline) / (1 - task.baseline))  # centred: 0 for guessing, 1 for perfect
    line = f"{task.name:42} {right:6.1%} of {len(correct):,} problems"
    print0(line + f", misquotes {quotes}" if quotes else line)
    rows.append([task.name, f"{len(correct):,}", f"{right:.1%}", f"{task.baseline:.1%}", quotes])

mean = f"mean centred accuracy over {len(measured)} tasks"
results[mean] = sum(scores) / len(scores)
print0(f"{mean:42} {results[mean]:6.3f}")
score = chatcore(accuracies)
if score is not None:
    results["ChatCORE"] = score
    print0(f"{'ChatCORE':42} {score:6.3f}")
if misquotes:
    results["misquotes"] = f"{sum(misquotes):,} of {len(misquotes):,}"
body = f"Model: step {meta['step']} of {checkpoint.parent.name}.\n\n"
body += markdown_table(["task", "problems", "right", "guessing", "misquotes"], rows)
write_section(f"chat_eval_{source}", f"Chat evaluation: {source}", body, source, results,
              data=meta.get("data"), model_tag=checkpoint.parent.name)
compute_cleanup()
