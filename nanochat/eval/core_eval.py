"""
CORE: how well a base model answers without having been taught to answer. Li et al. 2024 (DCLM), arXiv:2406.11794.

Every task is text for the model to continue, after examples that are drawn per item. There are three kinds. In
multiple choice the endings compete, in schema the beginnings: the lowest mean loss over the tokens that they do not
share (in schema: over the common ending) wins. In language modelling every token of the ending must be the most likely
one. Accuracies are centred, (accuracy − guessing) / (1 − guessing), and CORE is their mean over the tasks. Its interval
says how far other items of the same tasks could move it; runs with other seeds also differ in training.

The bundle is a folder: core.yaml lists the tasks, eval_meta_data.csv the accuracy of guessing, eval_data/ the items.
"""
import csv
import json
import os
import random
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

from nanochat.data.padding import WeightedTokens
from nanochat.data.tokenizer import Tokenizer
from nanochat.eval.loss_eval import score_rows, target_row
from nanochat.runtime.collectives import gather_objects, rank_and_size
from nanochat.runtime.compiling import eagerly
from nanochat.runtime.files import base_dir
from nanochat.runtime.progress import progress
from nanochat.runtime.stopping import until_stopped

BLOCK = 32  # items tokenized and sorted together, always on one rank
RESAMPLES = 10_000


class CoreTask(NamedTuple):
    label: str
    kind: str           # multiple_choice, schema or language_modeling
    num_fewshot: int    # examples before each item
    delimiter: str      # between beginning and ending
    baseline: float     # accuracy of guessing, 0 to 1
    path: Path          # one item per line, as JSON


class CoreItem(NamedTuple):
    variants: list[str]  # the texts among which the model chooses; in language modelling without and with the ending
    gold: int            # index of the right variant


class Core(NamedTuple):
    name: str            # the score's correct name
    score: float         # mean of the tasks
    low: float           # bounds of its 95% interval
    high: float
    tasks: dict[str, float]  # centred accuracy of each task by its label

    def __str__(self) -> str:
        return f"{self.name} {self.score:.4f} (95% interval {self.low:.4f} to {self.high:.4f})"


# ---- The bundle


def bundle_dir() -> Path:
    return base_dir() / "eval_bundle"


def load_tasks(bundle: Path) -> list[CoreTask]:
    """The tasks of a bundle."""
    import yaml  # training without CORE works without this package

    entries = yaml.safe_load((bundle / "core.yaml").read_bytes())["icl_tasks"]
    with open(bundle / "eval_meta_data.csv", encoding="utf-8", newline="") as file:
        percent = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)}
    return [CoreTask(entry["label"], entry["icl_task_type"], entry["num_fewshot"][0],
                     entry.get("continuation_delimiter", " "), percent[entry["label"]] / 100,
                     bundle / f"eval_data/{entry['dataset_uri']}") for entry in entries]


def load_items(task: CoreTask) -> list[CoreItem]:
    """A task's items, shuffled as every evaluator does, so the first few are a sample."""
    items = []
    for line in task.path.read_bytes().splitlines():  # a str would also split at U+2028
        fields = json.loads(line)
        if task.kind == "language_modeling":
            begins, ends = [fields["context"].strip()], ["", fields["continuation"]]
            fields["gold"] = 1
        elif task.kind == "schema":
            begins, ends = fields["context_options"], [fields["continuation"]]
        else:
            begins, ends = [fields["query"]], fields["choices"]
        variants = [f"{begin}{task.delimiter}{end}" for begin, end in product(begins, ends)]
        items.append(CoreItem(variants, fields["gold"]))
    random.Random(1337).shuffle(items)
    return items


# ---- From items to rows of tokens


def rows_of(
    task: CoreTask, items: list[CoreItem], index: int, tokenizer: Tokenizer, longest: int
) -> list[WeightedTokens]:
    """
    The rows of an item's variants, each after the same examples, cut after <|bos|> to `longest` tokens. At least one
    token counts.
    """
    others = items[:index] + items[index + 1 :]
    drawn = random.Random(1234 + index).sample(others, min(task.num_fewshot, len(others)))
    shots = "".join(f"{example.variants[example.gold]}\n\n" for example in drawn)
    texts = [shots + text for text in items[index].variants]
    if task.kind == "language_modeling":
        # A final blank would be its own token; in the whole text it begins the next word's token.
        texts[0] = texts[0].rstrip()
    encoded = tokenizer.encode(texts, prepend="<|bos|>")
    from_end = task.kind == "schema"
    # commonprefix takes any sequences, although it is in os.path.
    shared = len(os.path.commonprefix([tokens[::-1] for tokens in encoded] if from_end else encoded))
    if task.kind == "language_modeling":
        # The text without the ending only shows where the ending starts.
        encoded = encoded[1:]
    rows = []
    for tokens in encoded:
        start = len(tokens) - shared if from_end else shared
        cut = max(len(tokens) - longest, 0)
        # Nothing predicts <|bos|>. If one choice is the beginning of another, its last token counts.
        start = max(1, min(start, len(tokens) - 1) - cut)
        rows.append(target_row(tokens[:1] + tokens[1 + cut :], start))
    return rows


# ---- Scores


@torch.no_grad()
def evaluate_core(
    model, tokenizer: Tokenizer, tasks: list[CoreTask], max_per_task: int, tokens_per_forward: int
) -> Core:
    """
    CORE on every rank; the same numbers for any number of ranks. COLLECTIVE.

    max_per_task: most items of each task (-1: all). tokens_per_forward: rows times length, padding included; a longer
    row goes alone, and no row is longer than the model's rows.
    """
    rank, world_size = rank_and_size()
    longest = model.config.sequence_len + 1
    sizes = []                   # items of each task
    correct = [0] * len(tasks)   # each task's right answers, on this rank
    for number, task in enumerate(tasks):
        items = load_items(task)
        if max_per_task >= 0:
            items = items[:max_per_task]
        sizes.append(len(items))
        greedily = task.kind == "language_modeling"
        # One rank gets a whole block: no forward pass, nor its rounding, depends on the number of ranks.
        blocks = range(0, len(items), BLOCK * world_size)
        for first in until_stopped(progress(blocks, f"CORE {number + 1}/{len(tasks)} {task.label}", "blocks")):
            start = first + BLOCK * rank
            block = range(len(items))[start : start + BLOCK]
            variants = [rows_of(task, items, index, tokenizer, longest) for index in block]
            # Shapes change with every pass, so nothing is compiled.
            with eagerly():
                scores = iter(score_rows(model, list(chain.from_iterable(variants)), tokens_per_forward, greedily))
            for index, rows in zip(block, variants):
                item_scores = [next(scores) for _ in rows]
                best = item_scores.index(min(item_scores))
                correct[number] += item_scores[0] == 0 if greedily else best == items[index].gold
    counts = np.sum(gather_objects(correct), axis=0)
    baselines = np.array([task.baseline for task in tasks])
    centered = (counts / sizes - baselines) / (1 - baselines)
    # Only a score over all items of all tasks is CORE.
    name = "CORE" if max_per_task < 0 else f"CORE (up to {max_per_task:,} items a task)"
    scores = dict(zip((task.label for task in tasks), centered.tolist()))
    return Core(name, fmean(scores.values()), *core_interval(counts, np.array(sizes), baselines), scores)


def core_interval(correct: np.ndarray, sizes: np.ndarray, baselines: np.ndarray) -> tuple[float, float]:
    """
    95% interval of CORE by bootstrap over the items of each task, arrays (tasks,). Items are right or wrong, so
    resampling them with replacement is a draw from a binomial distribution.
    """
    drawn = np.random.default_rng(0).binomial(sizes, correct / sizes, (RESAMPLES, len(sizes))) / sizes
    low, high = np.percentile(((drawn - baselines) / (1 - baselines)).mean(1), [2.5, 97.5]).tolist()
    return low, high
