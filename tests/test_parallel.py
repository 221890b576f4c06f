"""Data, tensor, sequence and context parallelism, and the stage 3 of bench/, beside one rank and fully_shard."""
import torch
from ranks import run_on_ranks

from bench import context, naive, stage3, tensor
from bench.harness import draw_weights
from nanochat.model.gpt import GPT
from nanochat.optim.zero import shard_model

RIGHT = {naive: 1, tensor: 2, context: 2}  # the first variants


def measure_all(rank: int, ranks: int) -> list[list]:
    return [[module.measure(variant) for variant in module.VARIANTS] for module in RIGHT]


def test_right_ways_equal_one_rank_and_mistakes_show():
    for modules in run_on_ranks(2, measure_all):
        for (module, right), results in zip(RIGHT.items(), modules):
            for i, (*off, sent, formula) in enumerate(row[:4] for row in results):
                if i >= right:
                    assert max(off) > 0.02, (module, i)
                else:
                    assert max(off) < 5e-6 and (module is naive or sent == formula), (module, i)


def beside_fully_shard(rank: int, ranks: int) -> None:
    """To the bit, after some steps with AdamW, and as many bytes are sent."""
    mine, other = GPT(stage3.CONFIG), GPT(stage3.CONFIG)
    draw_weights(mine), draw_weights(other)
    own = stage3.Stage3(mine, prefetch=True)
    sent = stage3.train(mine, [unit.own for unit in own.units])
    for unit in own.units:
        unit.gather()
        unit.work.wait()
    sharding = shard_model(other, other.units(), torch.device("cpu"), torch.float32, zero_stage=3)
    assert stage3.train(other, list(other.parameters())) == sent
    right = dict(sharding.full_tensors())
    for name, p in mine.named_parameters():
        assert p.equal(right[name]) and not p.equal(mine.draw(name, 0)), name


def test_the_stage3_to_be_read_is_fully_shard_bit_for_bit():
    run_on_ranks(2, beside_fully_shard)
