"""Tensor, sequence and context parallelism, and the stage 3 of bench/, beside one rank and fully_shard."""
import pytest
import torch
from ranks import run_on_ranks

from bench import context, stage3, tensor
from bench.context import positions
from bench.harness import draw_weights
from bench.stage3 import Stage3, train
from nanochat.model.gpt import GPT
from nanochat.optim.zero import shard_model

IDEAS = {"tensor": tensor, "context": context, "stage3": stage3}
RIGHT = {"tensor": 2, "context": 2}  # the first variants


def measure_all(rank: int, ranks: int, idea: str) -> list[list]:
    return [IDEAS[idea].measure(variant) for variant in IDEAS[idea].VARIANTS]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("idea", IDEAS)
def test_ideas_equal_one_rank_send_what_the_formulas_say_and_mistakes_show(idea, ranks):
    results = run_on_ranks(ranks, measure_all, idea)[0]
    for i, (*off, sent, formula, whole, here) in enumerate(results):
        if idea != "stage3" and i >= RIGHT[idea]:
            assert max(off) > 0.1, i
            continue
        assert max(off, default=0) < 5e-6, i
        assert sent == formula, i
        assert here < whole / ranks * (1 if idea == "context" else 2), i
    # 1/N of a block's activations, except two inputs that are gathered, a gate's 32 channels, cos, sin and tokens.
    if idea == "tensor":
        common = 4 * (2 * tensor.C + 32) * tensor.T + sum(angles.nbytes for angles in tensor.ANGLES) + 8 * tensor.T
        *_, whole, here = results[1]
        assert here - common == pytest.approx((whole - common) / ranks, rel=0.005)
        assert here < results[0][-1]
    if idea == "stage3":
        assert [row[-1] for row in results] == [4 * stage3.UNIT, 4 * 2 * stage3.UNIT]

@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_chunks_a_rank_are_equal_work(ranks):
    for variant, most in (("two chunks a rank", 1), ("one chunk a rank", 2 - 1 / ranks)):
        seen = [positions(rank, ranks, variant) + 1 for rank in range(ranks)]  # keys that each query sees
        assert torch.cat(seen).sort().values.tolist() == list(range(1, context.T + 1))
        sums = [own.sum().item() for own in seen]
        assert max(sums) / (sum(sums) / ranks) == pytest.approx(most, rel=0.01)


def stages(rank: int, ranks: int) -> dict:
    """{(optimizer, prefetch): (largest difference from fully_shard's weights, from the first ones)}"""
    found = {}
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for prefetch in (False, True):
            mine, other, first = (GPT(stage3.CONFIG) for _ in range(3))
            for model in (mine, other, first):
                draw_weights(model)
            own = Stage3(mine, prefetch)
            sent = train(mine, [unit.own for unit in own.units], kind)
            assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in own.units)
            for unit in own.units:
                unit.gather()
                unit.work.wait()
            sharding = shard_model(other, other.units(), torch.device("cpu"), torch.float32, zero_stage=3)
            assert train(other, list(other.parameters()), kind) == sent
            right = dict(sharding.full_tensors())
            off = [[(p - q[name]).abs().max().item() for name, p in mine.named_parameters()]
                   for q in (right, dict(first.named_parameters()))]
            found[kind.__name__, prefetch] = max(off[0]), max(off[1])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_stage3_to_be_read_is_fully_shard_bit_for_bit(ranks):
    for found in run_on_ranks(ranks, stages):
        for off, moved in found.values():
            assert off == 0 and moved > 1e-4, found
