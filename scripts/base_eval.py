"""
Evaluate a base model: bits per byte, on the embedded world also above the corpus's entropy, CORE and samples.

    python -m scripts.base_eval --model_tag=d20
"""
from typing import Literal

from configurator import configure

# ---- Model
model_tag: str | None = None  # folder of the checkpoints; None: the only one there is
step: int | None = None     # [0..] the checkpoint's step; None: the newest valid one
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best available
# ---- Evaluation
data: str | None = None     # data set to measure on; None: the one it was trained on
device_batch_size = 16      # [1..] rows per rank at a time; halve it when memory runs out
eval_tokens = 10485760      # [1..] tokens of each split, up to one pass over the validation split
core_metric_max_per_task = 500  # [-1..] items of each CORE task, whose bundle is downloaded; -1: all; 0: no CORE
configure(globals())

from nanochat.data.embedded import entropy_floor, sample_prompts
from nanochat.data.shard_reader import data_shares, main_data
from nanochat.eval.core_eval import bundle_dir, evaluate_core, load_tasks
from nanochat.eval.eval_bundle import why_no_bundle
from nanochat.eval.loss_eval import evaluate_split, print_samples
from nanochat.runtime.console import print0
from nanochat.runtime.distributed import compute_cleanup, compute_init
from nanochat.runtime.errors import UserError
from nanochat.runtime.tables import cell, markdown_table
from nanochat.training.checkpoint import find_model, load_checkpoint
from nanochat.training.run_report import write_section

device = compute_init(device_type)
checkpoint = find_model("base", model_tag, step)
model, tokenizer, meta = load_checkpoint(checkpoint, device)
max_seq_len = model.config.sequence_len
trained_on = meta.get("data")
data = data or trained_on
if data is None:
    raise UserError(f"{checkpoint} was imported, and does not say what it was trained on; "
                    "set --data to the data set to measure on")
elsewhere = "" if data == trained_on else f", measured on {data}"
name = f"step {meta['step']} of {checkpoint.parent.name}, trained on {trained_on or '?'}{elsewhere}"
print0(f"model: {name}")

# --- bits per byte on both splits of each data set, as in training: rows packed with documents
results: dict[str, float | str] = {}
for data_set in data_shares(data):
    of = "" if data_set == main_data(data) else f" of {data_set}"
    for split, title in (("train", "training"), ("val", "validation")):
        bpb = evaluate_split(model, data_set, split, tokenizer, eval_tokens, device_batch_size, max_seq_len)
        results[f"{title} bits per byte{of}{elsewhere}"] = bpb
        print0(f"{title}{of}: {bpb:.4f} bits per byte")
    # The embedded world's entropy, which no model can beat on average; None for all other data.
    if floor := entropy_floor(data_set):
        excess = f"{bpb - floor:.4f} ({bpb / floor - 1:.1%})"
        results |= {f"floor{of}{elsewhere}": floor, f"excess over the floor{of}{elsewhere}": excess}
        print0(f"floor{of}: {floor:.4f}, excess over the floor: {excess}")
data = main_data(data)

# --- CORE: tasks that any English model can try; guessing scores 0
if core_metric_max_per_task and (reason := why_no_bundle()):
    print0(f"CORE is left out: {reason}")
elif core_metric_max_per_task:
    core = evaluate_core(model, tokenizer, load_tasks(bundle_dir()), core_metric_max_per_task,
                         device_batch_size * max_seq_len)
    results |= {core.name: core.score, f"{core.name}: 95% interval": f"{core.low:.4f} to {core.high:.4f}"}
    for label, score in core.tasks.items():
        results[f"{core.name}: {label}"] = score
        print0(f"  {label}: {score:.4f}")
    print0(core)

# --- samples: greedy continuations of prompts from the data
rows = [[prompt, cell(text)] for prompt, text in print_samples(model, tokenizer, sample_prompts(data), max_tokens=32)]
samples = markdown_table(["prompt", "greedy completion"], rows, words=(0, 1))

write_section("base_eval", "Base model: evaluation", f"Model: {name}.\n\n{samples}", "base", results,
              data=trained_on, model_tag=checkpoint.parent.name)
compute_cleanup()
