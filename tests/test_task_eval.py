"""Solving tasks and practising on them: letters, answers, ranks, rewards and advantages, and what changed."""
import itertools
from statistics import fmean

import pytest
import torch
from ranks import run_on_ranks

from nanochat.data.conversation import render_prompt
from nanochat.data.task import Task, reference
from nanochat.data.tokenizer import Tokenizer
from nanochat.eval import task_eval
from nanochat.eval.task_eval import chatcore, evaluate_task, likeliest_letters, misquotes, pass_at
from nanochat.inference.sampling import SamplingParams
from nanochat.inference.tools import REFUSALS
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.tasks.common import single_turn
from nanochat.training.rollouts import sample_rollouts

TOKENIZER = Tokenizer([])
GREEDY = SamplingParams(temperature=0.0)


def random_model() -> GPT:
    model = GPT(GPTConfig(96, TOKENIZER.get_vocab_size(), 2, 32, 4, 2))
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    return model


class Choices(Task):
    """Multiple choice with differing numbers of choices and lengths, one of them too long for a row."""
    name, eval_type = "Choices", "categorical"

    def __len__(self) -> int:
        return 13

    def conversation(self, index: int) -> dict:
        letters = list("ABCDE")[: 2 + index % 4]
        question = f"{index} " + "?" * (120 if index == 5 else index * 3)
        return single_turn(question, letters[index % len(letters)]) | {"letters": letters}


class Writing(Task):
    """An answer is right if it has an even number of letters: a model that writes anything is sometimes right."""
    name, eval_type = "Writing", "generative"

    def __len__(self) -> int:
        return 7

    def conversation(self, index: int) -> dict:
        return single_turn(f"write {index}", "ab")

    def evaluate(self, conversation: dict, answer: str) -> bool:
        return len(answer) % 2 == 0


def test_the_letter_is_the_likeliest_first_token_of_the_answer():
    """Against the plain model, one problem at a time; batches mix lengths, and what is too long keeps its end."""
    model, conversations = random_model(), list(Choices())
    expected = []
    for conversation in conversations:
        first, *rest = render_prompt(TOKENIZER, conversation)
        logits = model(torch.tensor([[first, *rest[-95:]]]))[0, -1]
        expected.append(max(conversation["letters"], key=lambda letter: logits[ord(letter)].item()))
    assert len(set(expected)) > 1, "the case decides something"
    for batch_size in (1, 4, 13):
        assert likeliest_letters(model, TOKENIZER, conversations, batch_size) == expected
    right = [[letter == reference(one)] for letter, one in zip(expected, conversations)]
    assert evaluate_task(Choices(), model, TOKENIZER, 4, -1, GREEDY) == (right, [])
    assert evaluate_task(Choices(), model, TOKENIZER, 4, 3, GREEDY) == (right[:3], [])


def evaluate_both(rank: int, world_size: int) -> list:
    model = random_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_eval, "misquotes", lambda parts: [True, False])
        return [evaluate_task(Choices(), model, TOKENIZER, 4, -1, GREEDY),
                evaluate_task(Writing(), model, TOKENIZER, 4, -1, SamplingParams(8, 1.0, seed=5), 3)]


def test_ranks_share_the_problems_and_agree():
    """13 and 7 problems on 1, 2 and 3 ranks: the same answers in the same order on all ranks, sampled ones too."""
    expected = evaluate_both(0, 1)
    correct, misquoted = expected[1]
    assert any(map(any, correct)) and not all(map(all, correct)) and misquoted == [True, False] * 21
    for world_size in (2, 3):
        assert run_on_ranks(world_size, evaluate_both) == [expected] * world_size


@pytest.mark.parametrize("said, wrong", [
    ("search(' rain') | It rains. Then sun. | It rains.", [False]),
    ("search(' rain') | It rains. Then sun. | It rains. Then snow.", [True]),
    ("search(' rain') | It rains. Then sun. | Then sun.", [True]),
    ("lookup(' rain') | nothing | I do not know. I found nothing about rain.", [False]),
    ("lookup(' rain') | nothing | I do not know. I found nothing about rains.", [True]),
    (f"lookup(' rain') | nothing | {REFUSALS['de']}", [False]), ("lookup(' rain') | nothing | It rains.", [True]),
    ("search('rain') | nothing |  | lookup('rain') | It rains. | It rain.", [False, True]),
    ("lookup(' rain') | nothing | I do not know. I found noth", [False]),
    ("search('rain') | Für euch. | F\ufffd", [False]),
    ("lookup('wine') | nothing | I found nothing aboutwine.", [True]),
    ("12 * 3 | 36 | 37", []), ("search(' rain')", []),
])
def test_what_is_a_misquote(said, wrong):
    types = ["python", "python_output", "text"] * 2
    parts = [{"type": type, "text": text} for type, text in zip(types, said.split(" | ")) if text]
    assert list(misquotes(parts)) == wrong


def test_advantages_are_within_a_problem_and_only_sampled_tokens_count():
    model = random_model()
    rollouts = sample_rollouts(Writing(), [4, 2, 0], model, TOKENIZER, 4, SamplingParams(10, 1.0, seed=1), batch_size=5)
    assert len(rollouts) == 12 and 0 < sum(r.reward for r in rollouts) < 12
    for number, index in enumerate((4, 2, 0)):
        group, prompt = rollouts[4 * number :][:4], render_prompt(TOKENIZER, Writing()[index])
        assert len({tuple(r.ids) for r in group}) == 4, "samples differ"
        for r in group:
            assert r.ids[: len(prompt)] == prompt
            assert r.sampled == [False] * len(prompt) + [True] * (len(r.ids) - len(prompt))
            assert r.advantage == r.reward - fmean(other.reward for other in group)
            assert r.weights() == [0.0] * len(prompt) + [r.advantage] * (len(r.ids) - len(prompt))
    again = sample_rollouts(Writing(), [2], model, TOKENIZER, 4, SamplingParams(10, 1.0, seed=1), batch_size=2)
    expected = [r.ids for r in rollouts[4:8]]
    assert [r.ids for r in again] == expected, "a problem's samples depend on seed and problem only"


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples():
    right = [[True, False, False, True, False], [False] * 5, [True] * 5]
    for k in (1, 2, 5):
        by_hand = fmean(fmean(any(chosen) for chosen in itertools.combinations(samples, k)) for samples in right)
        assert pass_at(right, k) == pytest.approx(by_hand)


def test_chatcore_is_the_one_that_nanochat_prints():
    """A report of nanochat's speedrun (its 5019acc, depth 24, eight B200s) rounds it to 0.3633."""
    printed = {"ARC-Easy": 0.6263, "ARC-Challenge": 0.4881, "MMLU": 0.3724, "GSM8K": 0.0735, "HumanEval": 0.1280,
               "SpellingBee (real words)": 0.9961}
    assert chatcore(printed | {"Lookup": 0.9}) == pytest.approx(0.3633, abs=1e-4)
    assert all(chatcore({name: printed[name] for name in printed.keys() - {missing}}) is None for missing in printed)
