"""Rows of tokens: every token once, the same rows on any number of ranks, exact continuation."""
import itertools
import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nanochat.corpus.learn_tokenizer import learn_tokenizer
from nanochat.corpus.make_dataset import make
from nanochat.data.dataloader import (
    RowPlanner,
    TokenizedShards,
    tokenizing_distributed_data_loader,
    validation_rows,
)
from nanochat.data.shard_reader import dataset_dir, iter_texts, split_shards
from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.errors import UserError

T = 32


@pytest.fixture
def source(tmp_path):
    """A data set of three shards whose documents are all different and easily told apart, and its tokenizer."""
    rng = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(f"w{rng.integers(50)}" for _ in range(count))

    texts = [f"<{i}> {words(40 if i % 10 == 0 else rng.integers(0, 6))} </{i}>" for i in range(600)]
    folder = tmp_path / "own"
    folder.mkdir()
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet")
    make(str(folder), "own", shard_mb=0.012)
    assert len(split_shards("own", "train")) >= 2
    return "own", learn_tokenizer(texts, 400)


def loader(source, **settings):
    data, tokenizer = source
    settings = {"tokenizer": tokenizer, "split": "train", "device_batch_size": 2, "max_seq_len": T} | settings
    return tokenizing_distributed_data_loader(data, **settings)


def documents(source, split="train"):
    """Independent of the loader."""
    data, tokenizer = source
    return [tuple(tokenizer.encode(text)) for text in iter_texts(data, split)]


def test_an_epoch_uses_every_token_once_and_every_row_begins_with_bos(source):
    """Pieces glued back together by their place in the token files are exactly the documents, in both epochs."""
    data, tokenizer = source
    shards = TokenizedShards(data, "train", tokenizer)
    planner = RowPlanner(shards, T + 1, seed=3)
    seen = Counter()  # (shard, position of a token) -> how often it was a target
    wanted = sum(map(len, documents(source)))
    while min(seen.values(), default=0) < 2 or len(seen) < wanted:
        row = planner.next_row()
        assert sum(end - start + 1 for _, start, end in row) == T + 1, "every position of a row is used"
        for shard, start, end in row:
            seen.update((shard, position) for position in range(start, end))
        if planner.epoch > 3:
            break
    assert len(seen) == wanted
    # A buffer of documents separates the epochs: no token is more than one epoch ahead of another.
    assert set(seen.values()) <= {2, 3, 4} and max(seen.values()) - min(seen.values()) <= 2
    lines = planner.read([planner.next_row() for _ in range(20)])
    bos = tokenizer.get_bos_token_id()
    assert (lines[:, 0] == bos).all()
    pieces = [tuple(piece) for line in lines for piece in split_at(line.tolist(), bos)]
    wholes = set(documents(source))
    spelled = "".join(f"|{','.join(map(str, whole))}|" for whole in wholes)
    assert all(",".join(map(str, piece)) in spelled for piece in pieces), "pieces are documents or parts of one"
    assert sum(piece in wholes for piece in pieces) > len(pieces) / 2, "best fit cuts few"


def split_at(ids, bos):
    at = [i for i, token in enumerate(ids) if token == bos] + [len(ids)]
    return [ids[a + 1 : b] for a, b in itertools.pairwise(at)]


def steps_of(source, count, world_size, grad_accum_steps, **settings):
    """The rows of each optimizer step, put in the order of global micro-batches m · world_size + rank."""
    settings |= {"world_size": world_size, "grad_accum_steps": grad_accum_steps}
    ranks = [loader(source, rank=rank, **settings) for rank in range(world_size)]
    return [torch.cat([next(rank)[0] for _ in range(grad_accum_steps) for rank in ranks]) for _ in range(count)]


def test_rows_of_a_step_do_not_depend_on_ranks_or_micro_steps(source):
    alone = steps_of(source, 30, 1, 12, device_batch_size=1)
    for world_size, accumulation, rows in ((1, 6, 2), (1, 1, 12), (2, 3, 2), (3, 2, 2), (4, 3, 1), (12, 1, 1)):
        other = steps_of(source, 30, world_size, accumulation, device_batch_size=rows)
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True)), (world_size, accumulation)
    assert not torch.equal(alone[0], steps_of(source, 1, 1, 12, device_batch_size=1, seed=1)[0])


def test_ranks_that_do_not_divide_a_step_share_its_rows(source):
    """Four micro-batches on three ranks: in the last micro-step two have targets that count for nothing."""
    alone = loader(source, device_batch_size=8)
    ranks = [loader(source, rank=rank, world_size=3, grad_accum_steps=2, rows_per_step=8) for rank in range(3)]
    for _ in range(30):
        batches = [next(rank)[:2] for _ in range(2) for rank in ranks]
        inputs, targets, _ = next(alone)
        assert torch.equal(torch.cat([batch[0] for batch in batches[:4]]), inputs)
        assert torch.equal(torch.cat([batch[1] for batch in batches[:4]]), targets)
        assert all((batch[1] == -1).all() for batch in batches[4:])


@pytest.mark.parametrize("stop", [0, 1, 7, 40])
def test_resuming_continues_with_the_very_next_rows(source, stop):
    """At any step, into later epochs, on another number of ranks: the state of a step yields that step again."""
    straight = steps_of(source, stop + 25, 1, 4, device_batch_size=1)
    batches = loader(source, grad_accum_steps=4, device_batch_size=1)
    for _ in range(4 * stop):
        next(batches)
    state = next(batches)[2]  # prefetched, not consumed: the checkpoint is written now
    resumed = steps_of(source, 25, 2, 2, device_batch_size=1, state=state)
    assert all(torch.equal(a, b) for a, b in zip(straight[stop:], resumed, strict=True))


def test_resume_refuses_other_data_tokenizer_or_settings(source):
    state = next(loader(source))[2]
    other = learn_tokenizer(["something else entirely"], 270)
    for what, setting in (("seed", {"seed": 5}), ("max_seq_len", {"max_seq_len": 16}), ("split", {"split": "val"}),
                          ("data", {"state": state | {"data": "0" * 64}}), ("tokenizer", {"tokenizer": other})):
        with pytest.raises(UserError, match=f"cannot continue exactly: {what} is not what the checkpoint was trained"):
            next(loader(source, **{"state": state} | setting))


def test_a_validation_is_at_most_one_pass(source):
    """A row of T targets is T + 1 tokens of the split."""
    total = sum(len(ids) + 1 for ids in documents(source, "val"))
    one_pass = validation_rows(*source, 10**9, T)
    assert one_pass * (T + 1) <= total < (one_pass + 1) * (T + 1) and total // T > one_pass
    assert [validation_rows(*source, tokens, T) for tokens in (1, 3 * T, 4 * T - 1)] == [1, 3, 3]
    assert validation_rows(*source, 10**9, 10**6) == 1


def test_the_first_rows_are_the_same_for_any_batch_and_ranks(source):
    """Of seven rows all targets count, and of those that fill the last batch none does."""
    expected = [next(rows)[:2] for rows in [loader(source, split="val", device_batch_size=1)] for _ in range(7)]
    for world_size, batch in ((1, 1), (1, 7), (1, 16), (2, 1), (2, 3), (3, 2)):
        settings = {"split": "val", "device_batch_size": batch, "world_size": world_size, "num_rows": 7}
        ranks = [loader(source, rank=rank, **settings) for rank in range(world_size)]
        batches = [next(rank) for _ in range(math.ceil(7 / (batch * world_size))) for rank in ranks]
        inputs, targets = (torch.cat([batch[part] for batch in batches]) for part in (0, 1))
        assert torch.equal(inputs[:7], torch.cat([row for row, _ in expected]))
        assert torch.equal(targets[:7], torch.cat([row for _, row in expected]))
        assert torch.all(targets[7:] == -1) and torch.all(inputs >= 0)


def test_a_corpus_smaller_than_a_row_says_so(source):
    with pytest.raises(UserError, match=r"tokens, fewer than one row of max_seq_len \+ 1 = 100001"):
        next(loader(source, max_seq_len=100_000))


def test_the_token_cache_is_made_once_and_belongs_to_data_and_tokenizer(source, monkeypatch):
    data, tokenizer = source
    rows = loader(source)
    for _ in range(200):  # more than an epoch: the background thread has been at every shard
        next(rows)
    rows.close()
    files = {path.name: path.stat().st_mtime_ns for path in (dataset_dir(data) / "tokens").glob("*.npy")}
    assert len(files) == len(split_shards(data, "train"))
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized again"))
    next(loader(source))
    assert files == {path.name: path.stat().st_mtime_ns for path in (dataset_dir(data) / "tokens").glob("*.npy")}
