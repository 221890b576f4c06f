"""The stages after pretraining: how rows fall into batches and onto ranks does not change the weighting."""
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from nanochat.compiling import set_compile
from nanochat.conversation import render
from nanochat.conversation_loader import RenderedConversations, conversation_loader, order
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import Tokenizer
from nanochat.zero import Sharding

EXAMPLES = 10  # of the step; with micro-batches of 4 on 3 ranks, one micro-batch is empty
TOKENIZER = Tokenizer([])


def conversation(i: int) -> dict:
    question, answer = "ab" * (i % 4), "xyz" * (1 + 5 * i % 13)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def random_model() -> GPT:
    model, generator = GPT(GPTConfig(64, TOKENIZER.get_vocab_size(), 2, 32, 4, 2)), torch.Generator().manual_seed(5)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2, generator=generator)
    return model


def one_step(rank: int, world_size: int, device_batch_size: int, stage: int) -> tuple[float, torch.Tensor]:
    """The loss and the whole gradient of a step, computed as scripts/chat_sft.py does."""
    model = random_model()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    sharding = Sharding(model, model.units(), torch.device("cpu"), torch.float32, stage)
    conversations = RenderedConversations([conversation(i) for i in range(EXAMPLES)], TOKENIZER, 65)
    rows = [[i] for i in order(EXAMPLES, 0, 0)]
    shape = dict(device_batch_size=device_batch_size, max_seq_len=64, rank=rank, world_size=world_size, pad=True)
    loader = conversation_loader(conversations, rows, EXAMPLES, **shape)
    grad_accum_steps = -(-EXAMPLES // (device_batch_size * world_size))
    step_loss, step_targets = torch.zeros(()), torch.zeros(())
    for micro_step in range(grad_accum_steps):
        inputs, targets = next(loader)
        with sharding.accumulate(last=micro_step == grad_accum_steps - 1):
            loss = model(inputs, targets, reduction="sum")
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


def all_steps(rank: int, world_size: int) -> dict[tuple[int, int], tuple[float, torch.Tensor]]:
    """For 1, 2 and 4 rows a micro-batch, on every stage."""
    set_compile(False, "cpu")
    return {(size, stage): one_step(rank, world_size, size, stage) for size in (1, 2, 4) for stage in (0, 2, 3)}


def plain_step() -> tuple[float, torch.Tensor]:
    """The definition: the mean over all target tokens of all conversations, each by itself, in float64."""
    model, total, count = random_model(), 0.0, 0
    for i in range(EXAMPLES):
        ids, mask, _ = render(TOKENIZER, conversation(i))
        logits = model(torch.tensor([ids[:-1]])).double()
        losses = -logits.log_softmax(-1)[0, torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        trained = torch.tensor(mask[1:], dtype=torch.float64)
        total, count = total + losses @ trained, count + trained.sum()
    (total / count).backward()
    return (total / count).item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_and_gradients_do_not_depend_on_micro_batches_and_ranks(world_size):
    """
    1, 2 and 4 rows a micro-batch, on every stage; an average over micro-batches would weight short answers more.
    Float32 sums of another order: 1e-6 of the gradient's norm.
    """
    loss, gradient = plain_step()
    for steps in run_on_ranks(world_size, all_steps):
        for key, (got_loss, got) in steps.items():
            assert got_loss == pytest.approx(loss, rel=1e-6), key
            assert (got - gradient).norm() <= 1e-6 * gradient.norm(), key
