"""Answers of the model to practise on, and how much better it got."""
import math
from dataclasses import dataclass
from statistics import fmean, stdev

import torch

from nanochat.conversation import render_prompt
from nanochat.distributed import all_reduce_sum, sum_dtype
from nanochat.engine import Engine
from nanochat.gpt import GPT
from nanochat.sampling import SamplingParams
from nanochat.task_eval import accuracy, numbered, said
from nanochat.tasks import Task
from nanochat.tokenizer import Tokenizer


@dataclass
class Rollout:
    """A prompt and one answer to it."""

    ids: list[int]
    sampled: list[bool]         # of each token: drawn by the model, not read and not forced in by the tool
    reward: float
    advantage: float = 0.0      # the reward, less the mean of the samples of this problem

    def weights(self) -> list[float]:
        """What each token counts for in the policy's loss."""
        return [self.advantage * sampled for sampled in self.sampled]


def roll_out(
    task: Task, indices: list[int], model: GPT, tokenizer: Tokenizer, num_samples: int, sampling: SamplingParams, batch_size: int
) -> list[Rollout]:
    """num_samples answers to each of these problems, those to one problem next to each other, judged and compared."""
    conversations = [task[index] for index in indices]
    prompts = [render_prompt(tokenizer, conversation) for conversation in conversations]
    answers = Engine(model, tokenizer, batch_size).generate(prompts, [numbered(sampling, index) for index in indices], num_samples, truncate=True)
    rollouts = []
    for i, conversation in enumerate(conversations):
        group = [
            Rollout(answer.prompt + answer.tokens, [False] * len(answer.prompt) + [not forced for forced in answer.forced],
                    task.reward(conversation, said(tokenizer, answer)))
            for answer in answers[i * num_samples :][:num_samples]
        ]
        mean = fmean(rollout.reward for rollout in group)
        for rollout in group:
            rollout.advantage = rollout.reward - mean
        rollouts += group
    return rollouts


def summary(rollouts: list[Rollout], device: torch.device) -> tuple[dict[str, float], int]:
    """(mean reward and sampled tokens of an answer, tokens of all prompts and answers), over all ranks. COLLECTIVE."""
    sums = [sum(r.reward for r in rollouts), sum(sum(r.sampled) for r in rollouts), len(rollouts), sum(len(r.ids) for r in rollouts)]
    totals = torch.tensor(sums, dtype=sum_dtype(device), device=device)
    all_reduce_sum(totals)
    reward, sampled, count, tokens = totals.tolist()
    return {"rl/reward": reward / count, "rl/tokens": sampled / count}, int(tokens)


def describe_change(before: list[list[bool]], after: list[list[bool]]) -> str:
    """How pass@1 changed on the same problems, in words, with a 95% interval from the problems' own differences."""
    differences = [fmean(b) - fmean(a) for a, b in zip(before, after, strict=True)]
    margin = 1.96 * stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    change = fmean(differences)
    return (f"pass@1 from {accuracy(before):.1%} to {accuracy(after):.1%}, {100 * change:+.1f} points, 95% interval "
            f"{100 * (change - margin):+.1f} to {100 * (change + margin):+.1f}, paired over {len(differences):,} problems")
