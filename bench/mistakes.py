"""Plain data parallelism with PyTorch's own optimizers, and mistakes of accumulation: for bench.wrong_accumulation."""
import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.corpus.tinyworld import document
from nanochat.gpt import GPT
from nanochat.gpt_config import GPTConfig

CONFIG = GPTConfig(sequence_len=64, vocab_size=256, n_layer=2, n_embd=64, n_head=2, n_kv_head=2)
RANKS, MICRO_STEPS, ROWS, STEPS = 2, 4, 2, 100  # ROWS: of one rank in one micro-step
RATES = {"SGD": 0.4, "AdamW": 0.016, "Muon": 0.04}  # the best of five for the right way
VARIANTS = {
    "right": "divided by micro-steps and by ranks",
    "micro-steps": "not divided by the 4 micro-steps",
    "ranks": "not divided by the 2 ranks",
    "neither": "divided by neither",
    "cleared": "cleared before each micro-step: only the last one counts",
    "kept": "never cleared",
}


def rows(first: int, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (count, T) each: the bytes with which documents of the embedded world begin."""
    length = CONFIG.sequence_len + 1
    texts = [document(0, first + i).encode().ljust(length)[:length] for i in range(count)]
    tokens = torch.tensor([list(text) for text in texts])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(kind: str, model: GPT) -> list[torch.optim.Optimizer]:
    if kind == "SGD":
        return [torch.optim.SGD(model.parameters(), lr=RATES["SGD"], momentum=0.9)]
    matrices = set(model.transformer.h.parameters()) if kind == "Muon" else set()
    adamw = torch.optim.AdamW([p for p in model.parameters() if p not in matrices], lr=RATES["AdamW"], weight_decay=0.0)
    return [adamw, *([torch.optim.Muon(list(matrices), lr=RATES["Muon"], weight_decay=0.0)] if matrices else [])]


def train(rank: int, ranks: int, variant: str, kind: str) -> float:
    """Loss on documents that were not trained on, nats per byte, after STEPS optimizer steps."""
    model = GPT(CONFIG)
    model.init_weights(seed=0)
    optimizers = build(kind, model)
    for step in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            if variant == "cleared":
                model.zero_grad()
            inputs, targets = rows(((step * MICRO_STEPS + micro_step) * ranks + rank) * ROWS, ROWS)
            loss = model(inputs, targets)
            (loss / (1 if variant in ("micro-steps", "neither") else MICRO_STEPS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 1 if variant in ("ranks", "neither") else ranks
        for optimizer in optimizers:
            optimizer.step()
        if variant != "kept":
            model.zero_grad()
    with torch.no_grad():
        return model(*rows(10**6, 128)).item()


def measure(rank: int, ranks: int) -> list[list[str]]:
    """A line of the table for each variant."""
    losses = {variant: [train(rank, ranks, variant, kind) for kind in RATES] for variant in VARIANTS}
    return [[words, *(f"{loss:.3f}" for loss in losses[variant])] for variant, words in VARIANTS.items()]
