"""How well a model solves tasks: the likeliest letter of a multiple choice, or an answer that it writes. All ranks share the work."""
import math
from collections.abc import Sequence
from statistics import fmean

import torch
import torch.distributed as dist

from nanochat.compiling import eagerly
from nanochat.conversation import render_prompt
from nanochat.engine import Answer, Engine
from nanochat.gpt import GPT
from nanochat.detokenizer import to_parts
from nanochat.sampling import SamplingParams
from nanochat.tasks import Task
from nanochat.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0)
# Whose mean is ChatCORE.
CHAT_CORE = {"arc:ARC-Easy", "arc:ARC-Challenge", "mmlu", "gsm8k", "humaneval", "spellingbee[:256]"}


def solve(
    task: Task, model: GPT, tokenizer: Tokenizer, batch_size: int, max_problems: int = -1, sampling: SamplingParams = GREEDY, num_samples: int = 1,
) -> list[list[bool]]:
    """
    Whether each sample of each of the first max_problems problems (-1: all) is right, on every rank the same list. model:
    whole on this rank. batch_size: problems, or sequences, at a time. COLLECTIVE.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    count = len(task) if max_problems < 0 else min(max_problems, len(task))
    conversations = [task[index] for index in range(rank, count, world_size)]
    if task.eval_type == "categorical":
        with eagerly():  # shapes change from batch to batch
            letters = likeliest_letters(model, tokenizer, conversations, batch_size)
        right = [[task.evaluate(conversation, letter)] for conversation, letter in zip(conversations, letters)]
    else:
        engine = Engine(model, tokenizer, batch_size)
        prompts = [render_prompt(tokenizer, conversation) for conversation in conversations]
        answers = engine.generate(prompts, [numbered(sampling, rank + i * world_size) for i in range(len(prompts))], num_samples, truncate=True)
        right = [[task.evaluate(conversation, said(tokenizer, answer)) for answer in answers[i * num_samples :][:num_samples]]
                 for i, conversation in enumerate(conversations)]
    if world_size == 1:
        return right
    of_ranks: list = [None] * world_size
    dist.all_gather_object(of_ranks, right)
    return [of_ranks[index % world_size][index // world_size] for index in range(count)]


def numbered(sampling: SamplingParams, problem: int) -> SamplingParams:
    """With a seed of the problem's own: which rank has it, and what else is asked, does not change its samples."""
    return SamplingParams(**vars(sampling) | {"seed": hash((sampling.seed or 0, problem))})  # of integers: the same in every process


def said(tokenizer: Tokenizer, answer: Answer) -> str:
    """What the answer says to the user: without what it tells the tool and hears from it."""
    return "".join(part["text"] for part in to_parts(tokenizer, answer.tokens) if part["type"] == "text")


@torch.inference_mode()
def likeliest_letters(model: GPT, tokenizer: Tokenizer, conversations: Sequence[dict], batch_size: int) -> list[str]:
    """The letter of each multiple choice to which the model gives the most probability as the first token of its answer."""
    device, limit = model.lm_head.weight.device, model.config.sequence_len
    prompts = [render_prompt(tokenizer, conversation) for conversation in conversations]
    prompts = [prompt if len(prompt) <= limit else prompt[:1] + prompt[1 - limit :] for prompt in prompts]  # the question comes last
    chosen = [""] * len(prompts)
    in_order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # alike lengths together
    for start in range(0, len(in_order), batch_size):
        indices = in_order[start : start + batch_size]
        tokens = torch.zeros(len(indices), len(prompts[indices[-1]]), dtype=torch.int64)
        for row, index in zip(tokens, indices):
            row[: len(prompts[index])] = torch.tensor(prompts[index])
        last = torch.tensor([len(prompts[index]) - 1 for index in indices])
        hidden = model.hidden(tokens.to(device))[torch.arange(len(indices)), last.to(device)]  # (B, C): no logits of other positions
        logits = (hidden @ model.lm_head.weight.T).float().cpu()  # before the softcap, which keeps their order
        for row, index in zip(logits, indices):
            letters = conversations[index]["letters"]
            first = [tokenizer.encode(letter)[0] for letter in letters]
            chosen[index] = letters[int(row[first].argmax())]
    return chosen


def accuracy(right: list[list[bool]]) -> float:
    """Mean over problems and samples."""
    return sum(map(sum, right)) / sum(map(len, right))


def name_of_mean(specs: str, max_problems: int, measured: int) -> str:
    """What the mean over the measured tasks may be called: ChatCORE is over all problems of all of its tasks."""
    if {spec.strip() for spec in specs.split(",")} == CHAT_CORE and max_problems < 0:
        return "ChatCORE (SpellingBee on generated words)"
    return f"mean centred accuracy over {measured} task{'s' * (measured != 1)}"


def pass_at(right: list[list[bool]], k: int) -> float:
    """
    The probability that at least one of k samples solves a problem, mean over problems; unbiased, from n ≥ k samples of
    each: 1 − C(n − c, k) / C(n, k) where c are right. Chen et al. 2021, arXiv:2107.03374.
    """
    return fmean(1 - math.comb(len(samples) - sum(samples), k) / math.comb(len(samples), k) for samples in right)


def centred(accuracy: float, baseline: float) -> float:
    """0 for guessing, 1 for perfect."""
    return (accuracy - baseline) / (1 - baseline)
