"""
How far what the engine computes while it writes is from the model's own forward pass, and what int8 costs.

    python -m bench.precision --model_tag=python

The beginnings of validation documents are read token by token, as in a rollout, and all at once, as the trainer reads
it. Each line: bits per byte of the engine; the difference of log-probabilities of the same tokens, in nats, to the
forward pass in the line's dtype, and |ratio − 1|, by which an importance weight would be off.
"""
import copy
import math
from typing import Literal

from configurator import configure

import torch
from torch import Tensor

from nanochat.checkpoint import find_model, load_checkpoint
from nanochat.distributed import compute_init
from nanochat.errors import UserError
from nanochat.gpt import GPT
from nanochat.kv_cache import CachedModel, Prefix
from nanochat.loss import cap
from nanochat.loss_eval import first_documents

source: Literal["base", "mid", "sft", "rl"] = "base"  # stage of the model
model_tag: str | None = None  # folder of its checkpoints; None: the only one there is
data: str | None = None     # data set; None: the one it was trained on
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
documents = 64              # [1..] of validation, with at least so many tokens:
length = 256                # [2..] tokens of each
batch_size = 16             # [1..] documents that are read together
configure(globals())

*_, device = compute_init(device_type)
trained, tokenizer, meta = load_checkpoint(find_model(source, model_tag), device)
trained.eval()
length = min(length, trained.config.sequence_len)
found = first_documents(data or meta["data"], tokenizer, 10**7)
rows = [tokens[: length + 1] for tokens in found if len(tokens) > length][:documents]
if not rows:
    raise UserError(f"no validation document has {length} tokens; try a smaller --length")
ids = torch.tensor(rows, device=device)  # (documents, length + 1)
size = torch.from_numpy(tokenizer.token_bytes()).to(device)[ids[:, 1:]].sum().item()


def log_p(logits: Tensor, targets: Tensor) -> Tensor:
    """logits (…, V) after the softcap, targets (…) → (…), float64."""
    return logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


@torch.inference_mode()
def all_at_once(model: GPT) -> Tensor:
    """(documents, length), as the trainer reads them."""
    return torch.cat([log_p(model(part[:, :-1]), part[:, 1:]) for part in ids.split(batch_size)])


def one_by_one(model: GPT, quantize: Literal["", "int8"], together: int) -> Tensor:
    """The same, as the engine reads what it writes."""
    cached, parts = CachedModel(model, together, quantize), []
    for part in ids.split(together):
        for bos in part[:, 0].tolist():
            cached.insert(prefix := cached.extend(Prefix(), [bos]))
        logits = [prefix.logits.expand(len(part), -1)]
        logits += [cached.decode(tokens) for tokens in part[:, 1:-1].T.tolist()]
        parts.append(torch.stack([log_p(cap(step, model.config.softcap), targets)
                                  for step, targets in zip(logits, part[:, 1:].T)], dim=1))
        cached.clear()
    return torch.cat(parts)


print(f"{len(rows)} documents of {length} tokens, {size:,} bytes; step {meta['step']} of {source}")
for dtype in ("float32", "bfloat16"):
    model = copy.deepcopy(trained).to(getattr(torch, dtype))
    forward = all_at_once(model)
    print(f"{dtype:9} forward pass     {-forward.sum().item() / math.log(2) / size:.5f} bits per byte")
    for quantize in ("", "int8") if device.type == "cpu" else ("",):
        for together in sorted({1, batch_size}):
            engine = one_by_one(copy.deepcopy(model), quantize, together)
            off, bpb = engine - forward, -engine.sum().item() / math.log(2) / size
            print(f"{dtype:9} {quantize:4} {together:3} at a time {bpb:.5f} bits per byte; difference mean "
                  f"{off.abs().mean():.1e}, largest {off.abs().max():.1e}; |ratio - 1| {off.expm1().abs().mean():.1e}")
