"""
CORE: how well a base model answers without having learnt to answer. Li et al. 2024 (DCLM), arXiv:2406.11794.

Tasks of three kinds are put to the model as text to go on with, after examples that are drawn per item. In multiple
choice the ends compete, in schema the beginnings: the lowest mean loss over the tokens that they do not share (those
of the common end) wins. In language modelling every token of the end has to be the most likely one. Accuracies are
centred, (accuracy − guessing) / (1 − guessing), and CORE is their mean over the tasks.

The bundle is a folder: core.yaml lists the tasks, eval_meta_data.csv what guessing gets, eval_data/ has the items.
"""
import csv
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.compiling import eagerly
from nanochat.distributed import all_reduce_sum, sum_dtype
from nanochat.errors import UserError
from nanochat.files import base_dir
from nanochat.tokenizer import Tokenizer

BLOCK = 32  # items that are tokenized and sorted together, on one rank whatever the number of ranks
KINDS = ("multiple_choice", "schema", "language_modeling")


class CoreTask(NamedTuple):
    label: str
    kind: str           # one of KINDS
    num_fewshot: int    # examples before each item
    delimiter: str      # between beginning and end
    baseline: float     # accuracy of guessing, 0 to 1
    path: Path          # one item per line, as JSON


class CoreScore(NamedTuple):
    label: str
    accuracy: float
    baseline: float
    centered: float
    items: int           # that were asked
    items_there: int     # that the task has


class Row(NamedTuple):
    tokens: list[int]
    start: int          # the first token that counts
    item: int           # place of its item in the block
    variant: int        # of the item's choices or contexts


# ---- The bundle


def bundle_dir() -> Path:
    return base_dir() / "eval_bundle"


def load_tasks(bundle: Path) -> list[CoreTask]:
    """The tasks of a bundle. UserError when a part of it is missing or of another format."""
    try:
        import yaml
    except ImportError:
        raise UserError("CORE's tasks are listed in YAML: pip install pyyaml") from None
    try:
        entries = yaml.safe_load((bundle / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        with open(bundle / "eval_meta_data.csv", encoding="utf-8", newline="") as file:
            percent = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)}
        tasks = [
            CoreTask(entry["label"], entry["icl_task_type"], entry["num_fewshot"][0], entry.get("continuation_delimiter", " "),
                     percent[entry["label"]] / 100, bundle / "eval_data" / entry["dataset_uri"])
            for entry in entries
        ]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, IndexError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{bundle} is not a CORE bundle ({reason}); remove it to download it anew") from error
    for task in tasks:
        if task.kind not in KINDS:
            raise UserError(f"{bundle / 'core.yaml'}: {task.label} is of type {task.kind!r}; expected one of {', '.join(KINDS)}")
        if not task.path.is_file():
            raise UserError(f"{bundle / 'core.yaml'}: {task.label} has no items: {task.path} is missing; remove {bundle} to download it anew")
    return tasks


def load_items(task: CoreTask) -> list[dict]:
    """A task's items, shuffled as everybody does so that the first few are a sample."""
    items = []
    for number, line in enumerate(task.path.read_bytes().splitlines(), start=1):  # of a str they would end at U+2028, too
        try:
            item = json.loads(line)
            variants(task, item)[gold_of(task, item)]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise UserError(f"{task.path}:{number}: no {task.kind} item ({type(error).__name__}: {error})") from error
        items.append(item)
    if not items:
        raise UserError(f"{task.path} is empty: {task.label} cannot be measured")
    random.Random(1337).shuffle(items)
    return items


# ---- From items to rows of tokens


def variants(task: CoreTask, item: dict) -> list[str]:
    """The texts among which the model chooses; in language modelling only the right one."""
    if task.kind == "multiple_choice":
        return [item["query"] + task.delimiter + choice for choice in item["choices"]]
    if task.kind == "schema":
        return [context + task.delimiter + item["continuation"] for context in item["context_options"]]
    return [item["context"].strip() + task.delimiter + item["continuation"]]


def gold_of(task: CoreTask, item: dict) -> int:
    """Which of the variants is right."""
    return item["gold"] if task.kind != "language_modeling" else 0


def prompts_of(task: CoreTask, items: list[dict], index: int) -> list[str]:
    """The item's variants, each after the same examples; in language modelling also, first, where the end is to come."""
    item = items[index]
    others = len(items) - 1
    drawn = random.Random(1234 + index).sample(range(others), min(task.num_fewshot, others))
    examples = (items[i + (i >= index)] for i in drawn)  # all but the item itself
    shots = "".join(variants(task, example)[gold_of(task, example)] + "\n\n" for example in examples)
    texts = [shots + text for text in variants(task, item)]
    if task.kind == "language_modeling":
        # A blank at its end would be a token here, and part of the next word in the whole text.
        texts.insert(0, (shots + item["context"].strip() + task.delimiter).rstrip())
    return texts


def common_length(rows: list[list[int]]) -> int:
    """How many tokens all rows begin with."""
    return next((i for i, tokens in enumerate(zip(*rows)) if len(set(tokens)) > 1), min(map(len, rows)))


def rows_of(task: CoreTask, items: list[dict], first: int, end: int, tokenizer: Tokenizer, longest: int) -> list[Row]:
    """The rows of items first … end−1, cut behind <|bos|> to `longest` tokens. At least one token of each row counts."""
    prompts = [prompts_of(task, items, index) for index in range(first, end)]
    encoded = iter(tokenizer.encode([text for texts in prompts for text in texts], prepend=tokenizer.get_bos_token_id()))
    rows = []
    for item, texts in enumerate(prompts):
        group = [next(encoded) for _ in texts]
        if task.kind == "schema":
            shared = common_length([tokens[::-1] for tokens in group])
            starts = [len(tokens) - shared for tokens in group]
        else:
            starts = [common_length(group)] * len(group)
        if task.kind == "language_modeling":
            group, starts = group[1:], starts[1:]
        for variant, (tokens, start) in enumerate(zip(group, starts)):
            cut = max(len(tokens) - longest, 0)
            # Nothing predicts <|bos|>; where one choice begins another, its end counts.
            start = max(1, min(start, len(tokens) - 1) - cut)
            rows.append(Row(tokens[:1] + tokens[1 + cut :], start, item, variant))
    return rows


# ---- Scores


@torch.no_grad()
def evaluate_core(
    model, tokenizer: Tokenizer, tasks: list[CoreTask], max_per_task: int = -1, tokens_per_forward: int = 16384
) -> tuple[float, list[CoreScore]]:
    """
    CORE, and the scores of its tasks, on every rank; the same numbers for any number of ranks. COLLECTIVE.

    max_per_task: items of each task at most (-1: all). tokens_per_forward: rows times length, padding included; a row
    that is longer goes alone, and none is longer than the model's own.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device, longest = next(model.parameters()).device, model.config.sequence_len + 1
    right, count, there = [0] * len(tasks), [0] * len(tasks), []
    for number, task in enumerate(tasks):
        items = load_items(task)
        there.append(len(items))
        items = items if max_per_task < 0 else items[:max_per_task]
        # Blocks are dealt out whole: what a forward pass holds does not depend on the ranks, nor do its last digits.
        for first in range(0, len(items), BLOCK * world_size):
            start = min(first + BLOCK * rank, len(items))
            end = min(start + BLOCK, len(items))
            rows = rows_of(task, items, start, end, tokenizer, longest)
            with eagerly():  # shapes change from pass to pass
                measured = measure(model, rows, task.kind == "language_modeling", tokens_per_forward, device)
            for item, values in zip(items[start:end], measured):
                right[number] += values[0] == 0 if task.kind == "language_modeling" else values.index(min(values)) == item["gold"]
            count[number] += end - start
    sums = torch.tensor([right, count], dtype=sum_dtype(device), device=device)
    all_reduce_sum(sums)
    scores = []
    for task, r, n, items_there in zip(tasks, *sums.tolist(), there):
        centered = (r / n - task.baseline) / (1 - task.baseline)
        scores.append(CoreScore(task.label, r / n, task.baseline, centered, int(n), items_there))
    return sum(score.centered for score in scores) / len(scores), scores


def core_name(scores: list[CoreScore]) -> str:
    """What the mean of these scores may be called: CORE is over all items of all tasks."""
    if all(score.items == score.items_there for score in scores):
        return "CORE"
    return f"CORE (up to {max(score.items for score in scores):,} items a task)"


def measure(model, rows: list[Row], greedily: bool, tokens_per_forward: int, device: torch.device) -> list[list[float]]:
    """
    For each item the value of each of its rows: the mean loss of the tokens that count, in nats; or, greedily, how many
    of them are not the most likely one. COLLECTIVE: where parameters are sharded, so is every forward pass.
    """
    batches = batches_of(rows, tokens_per_forward)
    passes = torch.tensor(len(batches), device=device)
    if dist.is_initialized():
        dist.all_reduce(passes, dist.ReduceOp.MAX)
    nothing = [Row([0, 0], 1, -1, 0)]  # goes through the model with the last rows of other ranks
    values: dict[tuple[int, int], float] = {}
    for number in range(int(passes)):
        batch = batches[number] if number < len(batches) else nothing
        inputs, targets = (tensor.to(device) for tensor in tensors_of(batch))
        counts = (targets >= 0).sum(1)
        if greedily:
            with head_reads_only(model, targets >= 0):
                wrong = model(inputs).argmax(-1) != targets[targets >= 0]  # (tokens that count,)
            row = torch.arange(len(batch), device=device).repeat_interleave(counts)
            totals = torch.zeros(len(batch), device=device).index_add_(0, row, wrong.float())
        else:
            totals = model(inputs, targets, reduction="none").sum(1) / counts
        values |= zip(((row.item, row.variant) for row in batch), totals.tolist())  # the one wait for the device
    items = [[] for _ in range(max((row.item for row in rows), default=-1) + 1)]
    for row in rows:
        items[row.item].append(values[row.item, row.variant])
    return items


def batches_of(rows: list[Row], tokens_per_forward: int) -> list[list[Row]]:
    """Rows of like length together, so many that count times length stays within the limit."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.tokens)):  # each is the longest so far
        if not batches or (len(batches[-1]) + 1) * len(row.tokens) > tokens_per_forward:
            batches.append([])
        batches[-1].append(row)
    return batches


def tensors_of(batch: list[Row]) -> tuple[Tensor, Tensor]:
    """inputs and targets, (B, T): padded on the right, and −1 for every target that does not count."""
    length = max(len(row.tokens) for row in batch)
    tokens = torch.zeros(len(batch), length, dtype=torch.int64)
    counts = torch.zeros(len(batch), length, dtype=torch.bool)
    for number, row in enumerate(batch):
        tokens[number, : len(row.tokens)] = torch.tensor(row.tokens)
        counts[number, row.start : len(row.tokens)] = True
    return tokens[:, :-1], tokens[:, 1:].where(counts[:, 1:], -1)


@contextmanager
def head_reads_only(model, positions: Tensor) -> Iterator[None]:
    """Meanwhile the model gives the logits of these positions alone, (n, vocab_size): all of them would be gigabytes."""
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: (args[0][positions], *args[1:]))
    try:
        yield
    finally:
        handle.remove()
