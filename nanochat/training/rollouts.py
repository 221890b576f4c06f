"""Rollouts for reinforcement learning: sampled answers, their rewards and advantages."""
from dataclasses import dataclass, replace
from statistics import fmean

from nanochat.data.task import Task
from nanochat.data.tokenizer import Tokenizer
from nanochat.eval.task_eval import generate_answers
from nanochat.inference.detokenizer import answer_text
from nanochat.inference.sampling import SamplingParams
from nanochat.model.gpt import GPT


@dataclass
class Rollout:
    """A prompt and one answer to it."""

    ids: list[int]
    sampled: list[bool]         # for each token: drawn by the model, not in the prompt or from the tool
    logprobs: list[float]       # for each token, by the engine; 0 in the prompt
    reward: float
    cut: bool                   # it reached the largest number of tokens first
    advantage: float            # the reward minus the mean of this problem's samples

    def weights(self) -> list[float]:
        """The weight of each token in the policy's loss."""
        return [self.advantage if sampled else 0.0 for sampled in self.sampled]


def sample_rollouts(
    task: Task, indices: list[int], model: GPT, tokenizer: Tokenizer, num_samples: int, sampling: SamplingParams,
    batch_size: int,
) -> list[Rollout]:
    """num_samples rollouts of each of these problems, grouped by problem, with advantages."""
    # No copying: a draw must have the model's own probability.
    sampling = replace(sampling, logprobs=0)
    answers = generate_answers(task, indices, model, tokenizer, sampling, num_samples, batch_size, copying=False)
    rollouts = []
    for index, samples in zip(indices, answers):
        conversation = task[index]
        rewards = [float(task.evaluate(conversation, answer_text(tokenizer, answer.tokens))) for answer in samples]
        mean = fmean(rewards)
        for answer, reward in zip(samples, rewards):
            cut = answer.finish_reason == "length"
            sampled = [False] * len(answer.prompt) + [not forced for forced in answer.forced]
            logprobs = [0.0] * len(answer.prompt) + [token.logprob or 0.0 for token in answer.logprobs]
            rollouts.append(Rollout(answer.prompt + answer.tokens, sampled, logprobs, reward, cut, reward - mean))
    return rollouts


def rollout_stats(rollouts: list[Rollout]) -> dict[str, float]:
    """Mean reward, mean number of sampled tokens, the share with an advantage, and the share that was cut."""
    return {
        "rl/reward": fmean(rollout.reward for rollout in rollouts),
        "rl/tokens": fmean(sum(rollout.sampled) for rollout in rollouts),
        "rl/trained_on": fmean(rollout.advantage != 0 for rollout in rollouts),
        "rl/cut": fmean(rollout.cut for rollout in rollouts),
    }
