"""Evaluates a model on tasks: the likeliest letter of a multiple choice, or a written answer. All ranks take part."""
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from nanochat.data.batch_shape import chunks
from nanochat.data.conversation import render_prompt, text_of
from nanochat.data.task import Task
from nanochat.data.tokenizer import Tokenizer
from nanochat.eval.loss_eval import padded_batches, target_row
from nanochat.inference.detokenizer import to_parts
from nanochat.inference.engine import Answer, Engine
from nanochat.inference.sampling import SamplingParams
from nanochat.inference.tools import NOTHING, QUERIES, REFUSALS, TOOL_CALL, Tools, open_tools, refusal
from nanochat.model.gpt import GPT
from nanochat.runtime.collectives import gather_objects, rank_and_size
from nanochat.runtime.compiling import eagerly
from nanochat.runtime.progress import progress
from nanochat.runtime.stopping import until_stopped

SAMPLES = 8
# The tasks of nanochat's ChatCORE, with its accuracy of guessing. Its SpellingBee counts letters of real words, ours
# also spells them.
CHATCORE = {"ARC-Easy": 0.25, "ARC-Challenge": 0.25, "MMLU": 0.25, "GSM8K": 0.0, "HumanEval": 0.0,
            "SpellingBee (real words)": 0.0}


def evaluate_task(
    task: Task,
    model: GPT,
    tokenizer: Tokenizer,
    batch_size: int,
    max_problems: int,
    sampling: SamplingParams,
    num_samples: int = 1,
    copying: bool = True,
) -> tuple[list[list[bool]], list[bool]]:
    """
    num_samples answers to each of the first max_problems problems (-1: all), judged; the same on every rank.
    model: whole on this rank. batch_size: problems, or sequences, at a time. copying: see `Tools`. COLLECTIVE.

    Returns whether each sample of each problem is right, and for each text that an answer looked up whether it was
    misquoted (`misquotes`).
    """
    rank, world_size = rank_and_size()
    count = len(task) if max_problems < 0 else min(max_problems, len(task))
    indices = range(rank, count, world_size)
    conversations = [task[index] for index in indices]
    misquoted: list[bool] = []
    if task.eval_type == "categorical":
        answers = [[letter] for letter in likeliest_letters(model, tokenizer, conversations, batch_size)]
    else:
        answers = []
        for written in generate_answers(task, indices, model, tokenizer, sampling, num_samples, batch_size, copying):
            parts = [to_parts(tokenizer, answer.tokens) for answer in written]
            answers.append([*map(text_of, parts)])
            misquoted += itertools.chain.from_iterable(map(misquotes, parts))
    correct = []
    # A vote waits for the slowest rank, and a HumanEval program may take seconds: several problems between votes.
    for conversation, samples in until_stopped(zip(conversations, answers), every=8):
        correct.append([task.evaluate(conversation, answer) for answer in samples])
    by_rank = gather_objects(correct)
    # Back into the task's order: rank i % world_size had problem i.
    in_order = [by_rank[index % world_size][index // world_size] for index in range(count)]
    return in_order, sum(gather_objects(misquoted), [])


def misquotes(parts: Sequence[dict[str, str]]) -> Iterator[bool]:
    """
    For each text that an answer looked up: whether the answer then differs from the beginning of the text found; if
    nothing was found, from all refusals (the one naming the text looked up, and those naming nothing).
    """
    for before, part, after in zip(parts, parts[1:], [*parts[2:], {"type": "text", "text": ""}]):
        call = TOOL_CALL.fullmatch(before["text"])
        if part["type"] == "python_output" and call and call[1] in QUERIES:
            said = text_of([after]).strip(" \n\ufffd")  # an answer may be cut off, even within a character
            right = [part["text"]]
            if part["text"] == NOTHING:
                right = [*REFUSALS.values(), refusal(call[3])]
            yield not any(text.startswith(said) for text in right)


def generate_answers(
    task: Task,
    indices: Sequence[int],
    model: GPT,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    num_samples: int,
    batch_size: int,
    copying: bool,
) -> list[list[Answer]]:
    """num_samples answers to each of these problems of a task; a problem's index seeds its samples."""
    prompts = [render_prompt(tokenizer, task[index]) for index in indices]
    seeded = [seed_with(sampling, index) for index in indices]
    tools = Tools(task.notes, copying) if task.notes else open_tools(task.library, copying)
    longest = max(map(len, prompts), default=0) + sampling.max_tokens
    engine = Engine(model, tokenizer, batch_size, longest, tools)
    answers = engine.generate(prompts, seeded, num_samples, truncate=True)
    return chunks(answers, num_samples)


def sample_answers(tasks: Task, model: GPT, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """
    (question, answer) of the first SAMPLES problems, to see a model improve: greedy, at most 48 tokens, calls and
    results in brackets. model: whole on this rank. COLLECTIVE, because all ranks can be told to stop.
    """
    sampling = SamplingParams(max_tokens=48, temperature=0.0)
    first = tasks[:SAMPLES]
    answers = generate_answers(first, range(len(first)), model, tokenizer, sampling, 1, SAMPLES, True)
    forms = {"text": "{}", "python": "[{}", "python_output": " = {}] "}
    samples = []
    for conversation, (answer,) in zip(first, answers):
        question = conversation["messages"][-2]["content"]  # the reference comes last
        written = [forms[part["type"]].format(part["text"]) for part in to_parts(tokenizer, answer.tokens)]
        samples.append((question, "".join(written)))
    return samples


def seed_with(sampling: SamplingParams, number: int) -> SamplingParams:
    """A seed for this problem or step: its samples depend neither on the rank nor on other problems."""
    # A hash of integers, unlike a text's hash, is the same in every process.
    return replace(sampling, seed=hash((sampling.seed or 0, number)))


@torch.inference_mode()
def likeliest_letters(model: GPT, tokenizer: Tokenizer, conversations: Sequence[dict], batch_size: int) -> list[str]:
    """For each multiple choice the letter that is most probable as the first token of the model's answer."""
    limit = model.config.sequence_len
    rows = []
    for conversation in conversations:
        ids = render_prompt(tokenizer, conversation)
        if len(ids) > limit:
            # The question comes last, so the cut is at the beginning, after <|bos|>.
            ids = ids[:1] + ids[1 - limit :]
        # The target, here token 0, is never used: it only marks where the letter is predicted.
        rows.append(target_row([*ids, 0], len(ids)))
    chosen = [""] * len(rows)
    batches = padded_batches(rows, batch_size * limit, model.lm_head.weight.device)
    for indices, inputs, targets in until_stopped(progress(batches, "choosing", "batches")):
        # Shapes change with every batch, so nothing is compiled.
        with eagerly():
            hidden = model.hidden(inputs)[targets >= 0]  # (B, C)
        # Without the softcap, which does not change the order of logits.
        logits = (hidden @ model.lm_head.weight.T).float().cpu()
        for row, index in zip(logits, indices):
            letters = conversations[index]["letters"]
            first = [tokenizer.encode(letter)[0] for letter in letters]
            chosen[index] = letters[int(row[first].argmax())]
    return chosen


def chatcore(accuracies: dict[str, float]) -> float | None:
    """
    The mean of (accuracy − guessing) / (1 − guessing) over the tasks of CHATCORE: 0 for guessing, 1 for perfect. None
    unless all were measured. accuracies: by the task's name. As in nanochat before its rewrite of September 2026, which
    keeps only the multiple choice.
    """
    if not CHATCORE.keys() <= accuracies.keys():
        return None
    return fmean((accuracies[name] - guessing) / (1 - guessing) for name, guessing in CHATCORE.items())


def pass_at(correct: list[list[bool]], k: int) -> float:
    """
    The probability that at least one of k samples solves a problem, mean over problems; unbiased, from n ≥ k samples
    of each, c of them correct: 1 − C(n − c, k) / C(n, k). Chen et al. 2021, arXiv:2107.03374.
    """
    return fmean(1 - math.comb(samples.count(False), k) / math.comb(len(samples), k) for samples in correct)
