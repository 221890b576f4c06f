"""How well a model predicts text: bits per byte, a loss that does not depend on the tokenizer, and scores of rows."""
import itertools
import math
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.data.batch_shape import BatchShape
from nanochat.data.dataloader import document_loader, validation_rows
from nanochat.data.padding import WeightedTokens, padded_batch
from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.collectives import all_reduce_sum, from_rank0, rank_and_size
from nanochat.runtime.console import print0
from nanochat.runtime.devices import sum_dtype
from nanochat.runtime.progress import progress
from nanochat.runtime.stopping import until_stopped


@torch.no_grad()
def evaluate_bpb(model, batches: Iterable, steps: int, token_bytes: np.ndarray) -> float:
    """
    Bits per byte over `steps` batches (inputs, targets, cu_seqlens, …) on every rank: summed over ranks, then divided.
    COLLECTIVE.

    token_bytes: (vocab_size,) raw bytes of each token; targets of zero bytes (special tokens) count neither as nats
    nor as bytes.
    """
    device = next(model.parameters()).device
    bytes_of = torch.from_numpy(token_bytes).to(device)
    total = torch.zeros(2, dtype=sum_dtype(device), device=device)  # nats, bytes
    batches = iter(batches)
    for _ in until_stopped(progress(range(steps), "bits per byte", "batches")):
        inputs, targets, cu_seqlens, *_ = next(batches)
        total += counted_nats(model, inputs, targets, cu_seqlens, bytes_of)
    all_reduce_sum(total)
    nats, count = total.tolist()
    return nats / math.log(2) / count


def evaluate_split(
    model, data: str, split: str, tokenizer: Tokenizer, eval_tokens: int, device_batch_size: int, max_seq_len: int,
) -> float:
    """
    Bits per byte of the first eval_tokens tokens of a split, at most one pass over validation. Rows are packed as in
    training, and are the same for any seed, batch and number of ranks. COLLECTIVE.
    """
    shape = BatchShape(device_batch_size, max_seq_len, *rank_and_size(), next(model.parameters()).device)
    rows = from_rank0(validation_rows, data, tokenizer, eval_tokens, max_seq_len)
    loader = document_loader(data, split, tokenizer, shape, num_rows=rows)
    bpb = evaluate_bpb(model, loader, math.ceil(rows / shape.rows_per_micro_step), tokenizer.token_bytes())
    loader.close()
    return bpb


def counted_nats(model, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor | None, bytes_of: Tensor) -> Tensor:
    """(2,): nats and bytes, over targets that stand for at least one byte of text."""
    target_bytes = bytes_of[targets.clamp(min=0)] * (targets >= 0)
    losses = model(inputs, targets, reduction="none", cu_seqlens=cu_seqlens) * (target_bytes > 0)  # (B, T)
    return torch.stack([losses.sum(dtype=sum_dtype(inputs.device)), target_bytes.sum()])


def score_rows(model, rows: list[WeightedTokens], tokens_per_forward: int, greedily: bool) -> list[float]:
    """
    For each row the mean loss of its targets, in nats; or, greedily, how many of its targets are not the most likely
    token. COLLECTIVE: each rank has its own rows, but with sharded parameters every forward pass is a collective.
    """
    device = next(model.parameters()).device
    batches = group_by_length(rows, tokens_per_forward)
    if dist.is_initialized():
        passes = torch.tensor(len(batches), device=device)
        dist.all_reduce(passes, dist.ReduceOp.MAX)
        # A rank with fewer batches joins the other ranks' passes with rows that count for nothing.
        batches += [[]] * (int(passes) - len(batches))
    scores = [0.0] * len(rows)
    for indices in batches:
        inputs, targets = collate(rows, indices, device)
        counts = targets >= 0
        if greedily:
            # The head sees only positions with a target: the logits of all positions could take gigabytes.
            likeliest = model.lm_head(model.hidden(inputs)[counts]).argmax(-1)
            wrong = counts.clone()
            wrong[counts] = likeliest != targets[counts]
            batch_scores = wrong.sum(1)
        else:
            batch_scores = model(inputs, targets, reduction="none").sum(1) / counts.sum(1)
        # .tolist() is the only wait for the device.
        for index, score in zip(indices, batch_scores.tolist()):
            scores[index] = score
    return scores


# ---- Rows of any length in padded batches


def target_row(tokens: list[int], start: int) -> WeightedTokens:
    """A row whose targets are the tokens from `start` on."""
    return tokens, [0.0] * start + [1.0] * (len(tokens) - start)


def group_by_length(rows: list[WeightedTokens], tokens_per_forward: int) -> list[list[int]]:
    """
    The rows' indices in batches of similar lengths: rows times length, padding included, is at most
    tokens_per_forward. A longer row is a batch of its own.
    """
    lengths = [len(tokens) for tokens, _ in rows]
    batches: list[list[int]] = []
    # Sorted, so each row is the longest of its batch so far.
    for index in sorted(range(len(rows)), key=lengths.__getitem__):
        if not batches or (len(batches[-1]) + 1) * lengths[index] > tokens_per_forward:
            batches.append([])
        batches[-1].append(index)
    return batches


def collate(rows: list[WeightedTokens], indices: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """
    inputs and targets of the rows with these indices, (B, T): T + 1 is the longest row's length; positions without a
    target have −1. Without indices there is one row of zeros, so a forward pass has something to compute.
    """
    chosen = [rows[index] for index in indices] or [target_row([0, 0], 1)]
    length = max(len(tokens) for tokens, _ in chosen) - 1
    inputs, targets, _ = padded_batch(chosen, len(chosen), length, device)
    return inputs, targets


def print_samples(model, tokenizer: Tokenizer, prompts: Iterable[str], max_tokens: int) -> list[tuple[str, str]]:
    """
    [(prompt, its greedy continuation)], printed by rank 0: up to max_tokens tokens or the end of the document. Each
    takes max_tokens forward passes: ranks that gather units together must make equally many, even if rounding differs.
    """
    bos = tokenizer.get_bos_token_id()
    samples = []
    for prompt in until_stopped(prompts):
        out = list(model.generate(tokenizer.encode(prompt, prepend="<|bos|>"), max_tokens))
        text = tokenizer.decode(itertools.takewhile(lambda token: token != bos, out))
        samples.append((prompt, text))
        print0(f"  {prompt}{text}")
    return samples
