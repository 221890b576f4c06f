"""A pipeline against the same run without one: losses, checkpoints, bad steps; and its cut of the layers."""
import itertools

import pytest
import torch
from conftest import ALL_PIECES, base_run
from ranks import run_on_ranks
from safetensors.torch import load_file
from test_many_ranks import arguments, script

from nanochat.model import gpt_config
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import config_from_depth
from nanochat.optim.pipeline import Pipeline, stage_layers
from nanochat.optim.recipe import accumulation_steps, rows_at_a_time
from nanochat.optim.zero import Buckets
from nanochat.runtime.errors import UserError
from nanochat.training import session
from nanochat.training.records import read_metrics

STEPS = 8
SETTINGS = {"depth": 4, "max_seq_len": 16, "device_batch_size": 1, "total_batch_size": 128, "num_iterations": STEPS,
            "eval_tokens": 256, "eval_every": 4, "device_type": "cpu", "zero_stage": 1, "matrix_lr": 0.01}


@pytest.fixture(scope="module")
def plain(made):
    """A run on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(made))
        train(1, "plain")


@pytest.fixture
def base(made, plain, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(made))


def small_script(rank: int, world_size: int, args: list[str], bad_rank: int) -> str:
    """
    `script` with a model of width 64: at 256 Muon's products are most of the time. On bad_rank the third step has a
    gradient of infinity.
    """
    gpt_config.LAYER_WIDTH, gpt_config.HEAD_DIM = 16, 32
    session.peak_flops = lambda *_: 1e18
    if rank == bad_rank:
        collect, steps = Buckets.collect_gradients, itertools.count()

        def spoilt(self):
            collect(self)
            if next(steps) == 2:
                self.shards[0].grad[0] = float("inf")

        Buckets.collect_gradients = spoilt
    return script(rank, world_size, args)


def train(world_size: int, tag: str, bad_rank: int = -1, **settings) -> str:
    return run_on_ranks(world_size, small_script, arguments(tag, SETTINGS | settings), bad_rank)[0]


def numbers(tag: str) -> list[tuple[float, ...]]:
    """Loss and gradient norm of each step, then the validations."""
    records = read_metrics(base_run(tag) / "metrics.jsonl")
    return [tuple(record[key] for key in ("train/loss", "train/grad_norm")) for record in records
            if "train/loss" in record] + [(record["val/bpb"],) for record in records if "val/bpb" in record]


def tensors(tag: str) -> dict[str, torch.Tensor]:
    """Of a checkpoint: the weights, and by name what optimizers keep, put together from the ranks' files."""
    checkpoint = base_run(tag) / f"step_{STEPS:06d}"
    found = load_file(checkpoint / "model.safetensors")
    for path in sorted(checkpoint.glob("optimizer_rank_*.safetensors")):
        for name, part in load_file(path).items():
            if name in found and name != "adamw.steps":  # which is whole in each file
                part = torch.cat([found[name], part])
            found[name] = part
    return found


def assert_same_tensors(a: str, b: str) -> None:
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


def far(a: list[tuple], b: list[tuple]) -> float:
    assert len(a) == len(b) == STEPS + 3
    return max(abs(x - y) / max(abs(x), 1) for one, other in zip(a, b) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_two_pipelines_side_by_side_draw_the_curve_of_one_rank(base, zero_stage):
    """Two data-parallel ranks in each of two stages: sums over ranks are taken in another order."""
    plain = numbers("plain")
    tag = f"side-by-side-{zero_stage}"
    train(4, tag, pipeline_stages=2, zero_stage=zero_stage)
    assert plain[STEPS - 1][0] < plain[0][0] - 0.3, "a curve that falls"
    assert far(plain, numbers(tag)) < 1e-5
    assert tensors("plain").keys() == tensors(tag).keys()


def test_every_piece_works_in_a_pipeline(base):
    """Value embeddings, which each stage looks up for itself, and the smear; MFU has the FLOPs of all stages."""
    pieces = dict(arch=ALL_PIECES)
    train(1, "pieces", **pieces)
    train(4, "pieces4", pipeline_stages=4, activation_checkpointing=True, **pieces)
    assert far(numbers("pieces"), numbers("pieces4")) < 1e-5
    for tag, ranks in ("pieces", 1), ("pieces4", 4):
        step = read_metrics(base_run(tag) / "metrics.jsonl")[-2]
        flops = step["train/mfu"] * ranks * 1e18 / step["train/tok_per_sec"]
        # 4 layers, 64 wide, and a head of 384 tokens, padding included; three windows of 4 tokens, one of 16
        assert flops == pytest.approx(6 * (4 * 12 * 64**2 + 64 * 384) + 12 * 64 * (3 * 4 + 16)), tag


def test_a_run_goes_on_with_another_number_of_stages(base):
    """
    Two stages, then four that compute activations twice, then one, from the checkpoint of two. One row at a time is one
    order of sums, so each is the run without a pipeline to the bit.
    """
    again = dict(resume_from_step=3, overwrite=True)
    for settings in (dict(pipeline_stages=2, save_every=3),
                     dict(pipeline_stages=4, activation_checkpointing=True) | again,
                     dict(pipeline_stages=1) | again):
        train(settings["pipeline_stages"], "two", **settings)
        assert numbers("two") == numbers("plain")
        assert_same_tensors("two", "plain")


def test_a_step_that_is_bad_on_one_stage_is_skipped_on_all(base):
    """Nine micro-batches: the sum of so many losses depends on its order, and is one rank's to the bit."""
    for tag, ranks, settings in (("bad", 1, {}), ("bad2", 2, dict(pipeline_stages=2))):
        printed = train(ranks, tag, bad_rank=ranks - 1, total_batch_size=144, **settings)
        assert "step 00002: skipped on every rank" in printed
    assert numbers("bad") == numbers("bad2")
    assert_same_tensors("bad", "bad2")


def test_layers_are_cut_so_that_the_largest_stage_is_least():
    """Against every way to cut them, with the FLOPs that the model itself states."""
    for depth, stages, vocab in ((4, 2, 256), (4, 4, 256), (7, 3, 20_000), (8, 2, 65_536), (6, 5, 65_536)):
        config = config_from_depth(depth, vocab, 64)
        with torch.device("meta"):
            model = GPT(config)
        windows = 12 * config.n_embd * sum(map(config.window, range(depth)))
        block = (6 * model.count_parameters("matrix") + windows) / depth
        head = 6 * model.count_parameters("head")
        cuts = [(0, *inner, depth) for inner in itertools.combinations(range(1, depth), stages - 1)]
        least = min(max(block * (b - a) + head * (b == depth) for a, b in itertools.pairwise(cut)) for cut in cuts)
        chosen = stage_layers(config, stages)
        assert [layer for layers in chosen for layer in layers] == list(range(depth)) and all(chosen)
        assert max(block * len(layers) + head * (layers.stop == depth) for layers in chosen) == pytest.approx(least)


def test_a_batch_that_fits_a_pipeline_is_trained_with_the_most_rows_at_a_time():
    """Against all sizes: each pipeline's rows are whole micro-batches, and at least as many as stages."""
    for stages, pipelines, rows in itertools.product((2, 3, 4), (1, 2, 3, 4), range(1, 129)):
        fitting = [size for size in range(1, 9) if rows % (size * pipelines) == 0 and rows >= size * pipelines * stages]
        chosen = rows_at_a_time(rows, pipelines, 8, stages)
        if fitting:
            assert chosen == fitting[-1]
        for size in (chosen, 8):
            if size in fitting:
                assert accumulation_steps(rows * 16, size, 16, pipelines, stages) == rows // pipelines // size
            else:
                with pytest.raises(UserError, match=f"total_batch_size={rows * 16} "):
                    accumulation_steps(rows * 16, size, 16, pipelines, stages)


@pytest.mark.parametrize("stages, zero_stage, ranks", [(2, 2, 2), (3, 1, 4), (5, 1, 5)])
def test_impossible_pipelines_are_refused(stages, zero_stage, ranks):
    with pytest.raises(UserError, match=f"pipeline_stages={stages}"):
        Pipeline(config_from_depth(4, 256, 16), stages, zero_stage, 0, ranks)
