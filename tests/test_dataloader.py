"""Rows of tokens: every token once, the same rows on any number of ranks, exact continuation."""
import itertools
import json
import math
import os
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nanochat.corpus.learn_tokenizer import learn_tokenizer
from nanochat.corpus.make_dataset import make
from nanochat.data.batch_shape import BatchShape
from nanochat.data.dataloader import RowPlanner, TokenizedShards, batches_on_host, document_loader, validation_rows
from nanochat.data.shard_reader import data_shares, iter_texts, split_shards
from nanochat.runtime.errors import UserError

T = 32


@pytest.fixture
def source(tmp_path):
    """A data set of three shards whose documents are all different and easily told apart, and its tokenizer."""
    rng = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(f"w{rng.integers(50)}" for _ in range(count))

    texts = [f"<{i}> {words(40 if i % 10 == 0 else rng.integers(0, 6))} </{i}>" for i in range(600)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "own.parquet")
    make(str(tmp_path / "own.parquet"), shard_mb=0.012)
    return "own", learn_tokenizer(texts, 400)


def loader(source, rank: int = 0, world_size: int = 1, rows: int = 2, split: str = "train", **settings):
    data, tokenizer = source
    return document_loader(data, split, tokenizer, BatchShape(rows, T, rank, world_size), **settings)


def documents(source, split: str = "train") -> list[tuple[int, ...]]:
    """Independent of the loader."""
    data, tokenizer = source
    return [tuple(tokenizer.encode(text)) for text in iter_texts(data, split)]


def test_an_epoch_uses_every_token_once_and_every_row_begins_with_bos(source, capsys):
    """
    Spans glued together by their place in the token files are exactly the documents, in both epochs. It is said that
    another begins, but not of evaluations.
    """
    data, tokenizer = source
    assert len(split_shards(data, "train")) >= 2
    planner = RowPlanner(TokenizedShards(data, "train", tokenizer), T + 1, seed=3)
    seen = Counter()  # (shard, position of a token) -> how often it was a target
    wholes = documents(source)
    wanted = sum(map(len, wholes))
    while sum(seen.values()) < 3 * wanted:
        row = planner.next_row()
        assert sum(length for length, _, _ in row) == T + 1, "every position of a row is used"
        for length, tokens, start in row:
            seen.update((id(tokens), position) for position in range(start, start + length - 1))
    next(itertools.islice(loader(source, split="val"), 200, None))
    said = re.findall(r"begins again: all of it was read (\d) time", capsys.readouterr().out)
    assert said == ["1", "2", "3"][: planner.position[0]] and len(said) > 1
    # A buffer of documents separates the epochs: no token is more than one epoch ahead of another.
    assert len(seen) == wanted and set(seen.values()) <= {2, 3, 4}
    batch = next(batches_on_host(planner, BatchShape(21, T), 20, 20))
    assert batch.inputs[20].tolist() == [0] * T, "a place without a row"
    lines = [[first, *rest] for first, rest in zip(batch.inputs[:20, 0].tolist(), batch.targets[:20].tolist())]
    pieces = []
    for line in lines:
        starts = [i for i, token in enumerate(line) if token == tokenizer.get_bos_token_id()]
        assert starts[0] == 0
        pieces += [tuple(line[a + 1 : b]) for a, b in itertools.pairwise([*starts, T + 1])]
    spelled = "".join(f"|{','.join(map(str, whole))}|" for whole in wholes)
    assert all(",".join(map(str, piece)) in spelled for piece in pieces), "pieces are documents or parts of one"
    assert sum(piece in wholes for piece in pieces) > len(pieces) / 2, "best fit cuts few"


def steps_of(source, count: int, world_size: int, micro_steps: int, rows: int, **settings) -> list[torch.Tensor]:
    """The rows of each optimizer step, put in the order of global micro-batches m · world_size + rank."""
    settings["rows_per_step"] = rows * world_size * micro_steps
    ranks = [loader(source, rank, world_size, rows, **settings) for rank in range(world_size)]
    return [torch.cat([next(rank).inputs for _ in range(micro_steps) for rank in ranks]) for _ in range(count)]


def test_rows_of_a_step_do_not_depend_on_ranks_or_micro_steps(source):
    alone = torch.cat(steps_of(source, 30, 1, 12, 1))
    for world_size, micro_steps, rows in ((1, 6, 2), (1, 1, 12), (2, 3, 2), (3, 2, 2), (4, 3, 1), (12, 1, 1)):
        assert torch.equal(alone, torch.cat(steps_of(source, 30, world_size, micro_steps, rows)))
    assert not torch.equal(alone[:12], steps_of(source, 1, 1, 12, 1, seed=1)[0])


def test_ranks_that_do_not_divide_a_step_share_its_rows(source):
    """Four micro-batches on three ranks: in the last micro-step two have targets that count for nothing."""
    alone = loader(source, rows=8)
    ranks = [loader(source, rank, 3, rows_per_step=8) for rank in range(3)]
    for _ in range(30):
        inputs, targets = (torch.cat(parts) for parts in zip(*[next(rank)[:2] for _ in range(2) for rank in ranks]))
        expected = next(alone)
        assert torch.equal(inputs[:8], expected.inputs) and torch.equal(targets[:8], expected.targets)
        assert (targets[8:] == -1).all() and len(targets) == 12
        begins = expected.inputs == source[1].get_bos_token_id()
        assert sorted({*expected.cu_seqlens.tolist()}) == [*begins.flatten().nonzero()[:, 0].tolist(), 8 * T]


@pytest.mark.parametrize("stop", [0, 1, 7, 40])
def test_resuming_continues_with_the_very_next_rows(source, stop):
    """At any step, into later epochs, on another number of ranks: the state of a step yields that step again."""
    straight = steps_of(source, stop + 25, 1, 4, 1)
    batches = loader(source, rows=1, rows_per_step=4)
    for _ in range(4 * stop):
        next(batches)
    state = json.loads(json.dumps(next(batches).step_state))  # later rows were read ahead by now
    assert torch.equal(torch.cat(straight[stop:]), torch.cat(steps_of(source, 25, 2, 2, 1, state=state)))


def test_a_shard_is_opened_without_parsing(source, monkeypatch):
    """Python 3.11 fails if two threads parse at once, and the main thread may be compiling."""
    shards = TokenizedShards(source[0], "train", source[1])
    expected = np.load(shards.token_file(0))
    monkeypatch.setattr("ast.literal_eval", None)
    tokens, offsets = shards.open(0)
    assert tokens.dtype == expected.dtype == np.uint16 and np.array_equal(tokens, expected)
    assert [tokens[start] for start in offsets[:-1]] == [source[1].get_bos_token_id()] * (len(offsets) - 1)


@pytest.mark.parametrize("share", [0.9, 0.001])
def test_a_token_file_that_was_cut_short_is_made_again(source, share):
    """As an interrupted copy leaves it, in its tokens or in its header."""
    path = TokenizedShards(source[0], "train", source[1]).token_file(0)
    whole = path.read_bytes()
    os.truncate(path, int(share * len(whole)) // 2 * 2)
    tokens, _ = TokenizedShards(source[0], "train", source[1]).open(0)
    assert path.read_bytes() == whole and tokens.tobytes() == whole[-tokens.nbytes :] and tokens.nbytes > 5000


def test_resume_refuses_other_data_tokenizer_or_settings(source):
    data, tokenizer = source
    state = next(loader(source)).step_state
    other = (data, learn_tokenizer(["something else entirely"], 270))
    for what, of, setting in (
        ("seed", source, {"seed": 5}), ("tokenizer", other, {}), ("data", source, {"state": state | {"data": "0"}}),
    ):
        with pytest.raises(UserError, match=f"cannot continue exactly: {what} is not"):
            next(loader(of, **{"state": state} | setting))


def test_a_validation_is_at_most_one_pass(source):
    """A row of T targets is T + 1 tokens of the split."""
    total = sum(len(ids) + 1 for ids in documents(source, "val"))
    one_pass = validation_rows(*source, 10**9, T)
    assert one_pass == total // (T + 1) < total // T
    assert [validation_rows(*source, tokens, T) for tokens in (1, 3 * T, 4 * T - 1)] == [1, 3, 3]
    assert validation_rows(*source, 10**9, 10**6) == 1


def test_the_first_rows_are_the_same_for_any_batch_and_ranks(source):
    """All targets of the first seven rows count, and none of the rows that fill the last batch."""
    expected = next(loader(source, split="val", rows=7))
    for world_size, rows in ((1, 1), (1, 16), (2, 1), (2, 3), (3, 2)):
        ranks = [loader(source, rank, world_size, rows, "val", num_rows=7) for rank in range(world_size)]
        batches = [next(rank)[:2] for _ in range(math.ceil(7 / (rows * world_size))) for rank in ranks]
        inputs, targets = map(torch.cat, zip(*batches))
        assert torch.equal(inputs[:7], expected.inputs) and torch.equal(targets[:7], expected.targets)
        assert torch.all(targets[7:] == -1) and torch.all(inputs >= 0)


def test_data_sets_share_the_tokens_by_weight(source, tmp_path):
    """
    9 to 1 in tokens, to a row at any moment, on any number of ranks and after a resume; each data set's rows are those
    that it has alone.
    """
    data, tokenizer = source
    pq.write_table(pa.table({"text": [f"note {i} of {i * i}" for i in range(90)]}), tmp_path / "notes.parquet")
    make(str(tmp_path / "notes.parquet"))
    mixed = f"{data} * 9, notes*1", tokenizer
    alone = torch.cat(steps_of(mixed, 50, 1, 8, 1))
    parts = {name: torch.cat(steps_of((name, tokenizer), 50, 1, 8, 1)).tolist() for name in (data, "notes")}
    taken = {data: 0, "notes": 0}
    for number, row in enumerate(alone.tolist(), 1):
        name = next(name for name in taken if parts[name][taken[name]] == row)
        taken[name] += 1
        assert abs(taken["notes"] - number / 10) < 1
    assert taken == {data: 360, "notes": 40}
    assert torch.equal(alone, torch.cat(steps_of(mixed, 50, 4, 1, 2)))
    batches = loader(mixed, rows=8)
    state = json.loads(json.dumps([next(batches).step_state for _ in range(31)][-1]))
    assert torch.equal(alone[30 * 8 :], torch.cat(steps_of(mixed, 20, 2, 2, 2, state=state)))


def test_shares_of_data_sets():
    assert data_shares("a") == {"a": 1} and data_shares(" a * 3,b") == {"a": 0.75, "b": 0.25}
    for wrong in ("", "a,", "a*0", "a*-1, b", "a*x", "a, a", "a*inf", "*2"):
        with pytest.raises(UserError, match="expected data sets, each once, with positive weights"):
            data_shares(wrong)


def test_a_corpus_smaller_than_a_row_says_so(source):
    data, tokenizer = source
    with pytest.raises(UserError, match=r"tokens, fewer than one row of max_seq_len \+ 1 = 100001"):
        next(document_loader(data, "train", tokenizer, BatchShape(2, 100_000)))
