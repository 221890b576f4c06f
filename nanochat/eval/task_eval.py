"""Evaluates a model on tasks: the likeliest letter of a multiple choice, or a written answer. All ranks take part."""
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from nanochat.data.conversation import render_prompt
from nanochat.data.padding import padded_batch
from nanochat.data.task import Task
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.detokenizer import answer_text
from nanochat.inference.engine import Answer, Engine
from nanochat.inference.sampling import SamplingParams
from nanochat.model.gpt import GPT
from nanochat.runtime.collectives import gather_objects, rank_and_size
from nanochat.runtime.compiling import eagerly
from nanochat.runtime.progress import progress
from nanochat.runtime.stopping import until_stopped

GREEDY = SamplingParams(temperature=0.0)
CHAT_CORE = {"arc:ARC-Easy", "arc:ARC-Challenge", "mmlu", "gsm8k", "humaneval", "spellingbee[:256]"}  # ChatCORE's tasks


def evaluate_task(
    task: Task, model: GPT, tokenizer: Tokenizer, batch_size: int, max_problems: int = -1,
    sampling: SamplingParams = GREEDY, num_samples: int = 1,
) -> list[list[bool]]:
    """
    Whether each sample of each of the first max_problems problems (-1: all) is correct, on every rank the same list.
    model: whole on this rank. batch_size: problems, or sequences, at a time. COLLECTIVE.
    """
    rank, world_size = rank_and_size()
    count = len(task) if max_problems < 0 else min(max_problems, len(task))
    indices = range(rank, count, world_size)
    conversations = [task[index] for index in indices]
    if task.eval_type == "categorical":
        answers = [[letter] for letter in likeliest_letters(model, tokenizer, conversations, batch_size)]
    else:
        samples = generate_answers(model, tokenizer, conversations, indices, sampling, num_samples, batch_size)
        answers = [[answer_text(tokenizer, answer.tokens) for answer in of_problem] for of_problem in samples]
    correct = []
    for conversation, of_problem in until_stopped(zip(conversations, answers)):
        correct.append([task.evaluate(conversation, answer) for answer in of_problem])
    of_ranks = gather_objects(correct)
    return [of_ranks[index % world_size][index // world_size] for index in range(count)]  # in the task's order


def generate_answers(
    model: GPT, tokenizer: Tokenizer, conversations: Sequence[dict], indices: Sequence[int], sampling: SamplingParams,
    num_samples: int, batch_size: int,
) -> list[list[Answer]]:
    """num_samples answers to each conversation. indices: of the conversations in their task; they seed the samples."""
    prompts = [render_prompt(tokenizer, conversation) for conversation in conversations]
    seeded = [seed_with(sampling, index) for index in indices]
    answers = Engine(model, tokenizer, batch_size).generate(prompts, seeded, num_samples, truncate=True)
    return [answers[start : start + num_samples] for start in range(0, len(answers), num_samples)]


def seed_with(sampling: SamplingParams, number: int) -> SamplingParams:
    """With a seed for this problem or step: its samples depend neither on the rank nor on the other problems."""
    return replace(sampling, seed=hash((sampling.seed or 0, number)))  # of integers: the same in every process


@torch.inference_mode()
def likeliest_letters(model: GPT, tokenizer: Tokenizer, conversations: Sequence[dict], batch_size: int) -> list[str]:
    """The letter of each multiple choice to which the model gives the most probability as first token of its answer."""
    device, limit = model.lm_head.weight.device, model.config.sequence_len
    prompts = []
    for conversation in conversations:
        ids = render_prompt(tokenizer, conversation)
        if len(ids) > limit:
            ids = ids[:1] + ids[1 - limit :]  # the question comes last
        prompts.append(ids)
    chosen = [""] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # similar lengths: little padding
    for start in until_stopped(progress(range(0, len(by_length), batch_size), "choosing", "batches")):
        indices = by_length[start : start + batch_size]
        rows = [(prompts[index], [0.0] * len(prompts[index])) for index in indices]
        tokens, _, _ = padded_batch(rows, len(rows[-1][0]), device)  # (B, T)
        last = torch.tensor([len(ids) - 1 for ids, _ in rows], device=device)
        with eagerly():  # shapes change from batch to batch
            hidden = model.hidden(tokens)[torch.arange(len(rows)), last]  # (B, C): no logits of other positions
        logits = (hidden @ model.lm_head.weight.T).float().cpu()  # before the softcap, which keeps their order
        for row, index in zip(logits, indices):
            letters = conversations[index]["letters"]
            first = [tokenizer.encode(letter)[0] for letter in letters]
            chosen[index] = letters[int(row[first].argmax())]
    return chosen


def accuracy(correct: list[list[bool]]) -> float:
    """Mean over problems and samples."""
    return sum(map(sum, correct)) / sum(map(len, correct))


def pass_at(correct: list[list[bool]], k: int) -> float:
    """
    The probability that at least one of k samples solves a problem, mean over problems; unbiased, from n ≥ k samples of
    each: 1 − C(n − c, k) / C(n, k) where c are correct. Chen et al. 2021, arXiv:2107.03374.
    """
    return fmean(1 - math.comb(len(samples) - sum(samples), k) / math.comb(len(samples), k) for samples in correct)


def centred(accuracy: float, baseline: float) -> float:
    """0 for guessing, 1 for perfect."""
    return (accuracy - baseline) / (1 - baseline)


def name_of_mean(specs: str, max_problems: int, measured: int) -> str:
    """What the mean over the measured tasks may be called: ChatCORE is over all problems of all of its tasks."""
    if {spec.strip() for spec in specs.split(",")} == CHAT_CORE and max_problems < 0:
        return "ChatCORE (SpellingBee on generated words)"
    return "mean centred accuracy over " + ("1 task" if measured == 1 else f"{measured} tasks")
