"""The stages after pretraining: how rows fall into batches and onto ranks does not change them or their weighting."""
import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from nanochat.data.batch_shape import BatchShape
from nanochat.data.conversation import render, render_parts
from nanochat.data.conversation_loader import RenderedConversations, balance, conversation_loader, epoch_order
from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.optim.zero import shard_model
from nanochat.runtime.compiling import set_compile

EXAMPLES = 10  # of the step; with micro-batches of 4 on 3 ranks, one micro-batch is empty
TOKENIZER = Tokenizer([])


def conversation(i: int) -> dict:
    question, answer = "ab" * (i % 4), "xyz" * (1 + 5 * i % 13)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def random_model() -> GPT:
    pieces = dict(short_windows=True, smear=True, document_token=TOKENIZER.get_bos_token_id())
    model = GPT(GPTConfig(64, TOKENIZER.get_vocab_size(), 2, 32, 4, 2, **pieces))
    generator = torch.Generator().manual_seed(5)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2, generator=generator)
    return model


def one_step(
    rank: int, world_size: int, device_batch_size: int, stage: int, together: bool
) -> tuple[float, torch.Tensor]:
    """The loss and the whole gradient of a step, computed as scripts/chat_sft.py does."""
    model = random_model()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    sharding = shard_model(model, model.units(), torch.device("cpu"), torch.float32, stage)
    conversations = RenderedConversations([conversation(i) for i in range(EXAMPLES)], TOKENIZER, 65)
    rows = [[i] for i in epoch_order(EXAMPLES, 0, 0)]
    shape = BatchShape(device_batch_size, 64, rank, world_size)
    if together:
        rows = balance(conversations.lengths, epoch_order(EXAMPLES, 0, 0), shape.rows_per_micro_step, 65)
    loader = conversation_loader(conversations, [rows], shape, pad=True)
    grad_accum_steps = len(shape.micro_steps(rows))
    step_loss, step_targets = torch.zeros(()), torch.zeros(())
    for micro_step in range(grad_accum_steps):
        inputs, targets, cu_seqlens = next(loader)
        with sharding.accumulate(last=micro_step == grad_accum_steps - 1):
            loss = model(inputs, targets, reduction="sum", cu_seqlens=cu_seqlens)
            loss.backward()
        step_loss += loss.detach()
        step_targets += (targets >= 0).sum()
    stats = sharding.reduce_and_clip(step_loss, step_targets)
    whole = {name: torch.zeros(size) for name, size in sizes.items()}
    for s in sharding.shards:
        whole[s.name][s.start : s.end] = s.grad
    gradient = torch.cat(list(whole.values()))
    if sharding.shard_count > 1:
        dist.all_reduce(gradient)
    return stats.values[0].item(), gradient


def all_steps(rank: int, world_size: int) -> dict[tuple, tuple[float, torch.Tensor]]:
    """For 1, 2 and 4 rows a micro-batch, on every stage, with a row for each conversation and with several in one."""
    set_compile(False, "cpu")
    settings = itertools.product((1, 2, 4), (0, 2, 3), (False, True))
    return {key: one_step(rank, world_size, *key) for key in settings}


def plain_step() -> tuple[float, torch.Tensor]:
    """The definition: the mean over all target tokens of all conversations, each by itself, in float64."""
    model, total, count = random_model(), 0.0, 0
    for i in range(EXAMPLES):
        ids, mask = render(TOKENIZER, conversation(i))
        logits = model(torch.tensor([ids[:-1]])).double()
        losses = -logits.log_softmax(-1)[0, torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        trained = torch.tensor(mask[1:], dtype=torch.float64)
        total, count = total + losses @ trained, count + trained.sum()
    (total / count).backward()
    return (total / count).item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_and_gradients_do_not_depend_on_micro_batches_and_ranks(world_size):
    """
    1, 2 and 4 rows a micro-batch, on every stage, conversations apart in one row too; an average over micro-batches
    would weight short answers more.
    Float32 sums of another order: 1e-6 of the gradient's norm.
    """
    loss, gradient = plain_step()
    for steps in run_on_ranks(world_size, all_steps):
        for key, (got_loss, got) in steps.items():
            assert got_loss == pytest.approx(loss, rel=1e-6), key
            assert (got - gradient).norm() <= 1e-6 * gradient.norm(), key


# ---- Rendering in shares

LONGEST = 30  # tokens of a rendered conversation


class Recorded(Sequence):
    """Conversations of many lengths, some of them cut and some without an answer that fits; it knows who was read."""

    def __init__(self, count: int):
        self.count, self.read = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        self.read.append(index)
        turns = conversation(index)["messages"] * (1 + index % 3)
        return {"messages": [{"role": "system", "content": "?" * (40 if index % 5 == 1 else 1)}, *turns]}


def render_share(rank: int, world_size: int, count: int) -> tuple[list[int], tuple]:
    """(indices that this rank read, everything that is known afterwards)"""
    source = Recorded(count)
    rendered = RenderedConversations(source, TOKENIZER, LONGEST)
    content = [tuple(part.tolist() for part in rendered.read([i])) for i in range(len(rendered))]
    return source.read, (content, rendered.fingerprint)


def test_each_rank_renders_a_share_and_all_have_all():
    """Also where a rank has no conversation, or none whose answer fits."""
    for count in (1, 3, 50):
        every = [render_parts(TOKENIZER, Recorded(count)[i], LONGEST) for i in range(count)]
        content = [(one.ids, one.mask) for parts, _ in every for one in parts]
        assert count < 50 or sum(len(parts) > 1 for parts, _ in every) > 5 < sum(not parts for parts, _ in every)
        fingerprints = set()
        for world_size in (1, 2, 4):
            ranks = run_on_ranks(world_size, render_share, count)
            for _, (found, fingerprint) in ranks:
                assert found == content
                fingerprints.add(fingerprint)
            assert sorted(index for read, _ in ranks for index in read) == list(range(count))
            assert max(len(read) for read, _ in ranks) <= -(-count // world_size)
        assert len(fingerprints) == 1
