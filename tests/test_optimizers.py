"""AdamW against torch's own, Muon's matrices against an SVD; test_zero.py has Muon's rule written out."""
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import config_from_depth
from nanochat.optim.adamw import DistAdamW
from nanochat.optim.muon import orthogonalize
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.sharding import Sharding
from nanochat.optim.zero import shard_model


def on_one_rank(params: dict[str, Parameter]) -> Sharding:
    """The parameters as one unit, all of which this rank keeps."""
    unit = nn.ParameterDict(params)
    return shard_model(unit, [unit], torch.device("cpu"), torch.float32, zero_stage=0)


def apply(sharding: Sharding, *optimizers) -> None:
    with sharding.accumulate(last=True):
        pass  # the gradients were set by hand
    stats = sharding.reduce_and_clip(torch.zeros(()))
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()


def test_adamw_equals_torchs_over_many_steps():
    """Groups with rates of their own, rates that change, and gradients near eps, where its place shows."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), (1,))]
    ours, theirs = ([Parameter(t.clone()) for t in start] for _ in range(2))
    rates = [{"lr": 0.1}, {"lr": 0.1, "betas": (0.96, 0.95)}, {"lr": 0.3, "weight_decay": 0.2}]
    sharding = on_one_rank({str(i): p for i, p in enumerate(ours)})
    optimizer = DistAdamW([{"shards": [s], "eps": 1e-4, **group} for s, group in zip(sharding.shards, rates)])
    groups = [{"params": [p], **group} for p, group in zip(theirs, rates)]
    oracle = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-4, weight_decay=0)
    for step in range(20):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn(a.shape, generator=generator) * 10.0 ** (-step % 5 - 2)
            b.grad = a.grad.clone()
        for group, other, rate in zip(optimizer.param_groups, oracle.param_groups, rates):
            group["lr"], other["lr"] = group["initial_lr"] / (step + 1), rate["lr"] / (step + 1)
        apply(sharding, optimizer)
        oracle.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("large", [False, True])
def test_every_group_has_its_scaled_rate(large):
    arch = "modern,stream_scales=True,subtract_middle=True,narrow_gates=True" if large else "modern"
    with torch.device("meta"):
        model = GPT(config_from_depth(2, 64, 32, arch=arch))
    weights = partial(model.draw, seed=0)
    sharding = shard_model(model, model.units(), torch.device("cpu"), torch.float32, zero_stage=0, weights=weights)
    adamw, muon = setup_optimizers(model, sharding, 0.1, 0.2, 0.3, 0.4, lr_scale=0.25)
    width, matrices = (128 / 768) ** -0.5, muon.param_groups[0]["initial_lr"]
    rates = {shard.name.split(".", 1)[1]: group["initial_lr"] / 0.25 for group in adamw.param_groups
             for shard in group["shards"]}
    expected = {"weight": 0.1 * width, "wte.weight": 0.2 * width, "h.1.values.weight": 0.1 * width,
                "h.1.attn.value_gate.weight": 0.02, "wte.smear.weight": 0.02, "wte.smear_scale": 0.02}
    decays = {0}
    if large:
        expected |= {f"h.{i}.{name}": rate for i in range(2)
                     for name, rate in (("residual_scale", 0.005), ("first_scale", 0.5))}
        expected |= dict.fromkeys(["wte.smear.weight", "wte.smear_scale", "h.1.middle_scale"], 0.2)
        decays = {0, 0.001, 0.01, 0.05}
        betas = {(0.8, 0.95), (0.8, 0.96), (0.8, 0.995), (0.96, 0.95)}
        assert {group["betas"] for group in adamw.param_groups} == betas
    assert rates == pytest.approx(expected) and matrices == 0.25 * 0.3
    assert {group["weight_decay"] for group in adamw.param_groups} == decays
    assert muon.param_groups[0]["initial_weight_decay"] == 0.4


@pytest.mark.parametrize("shape", [(3, 40, 40), (2, 64, 16), (2, 16, 64), (1, 33, 17)])
def test_orthogonalize_keeps_directions_and_evens_out_singular_values(shape):
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    spread = torch.linspace(1, 0.02, S.size(-1), dtype=torch.float64)  # a condition number of 50
    G = U * spread @ Vh
    result = orthogonalize(G)
    inner = U.mT @ result @ Vh.mT  # diagonal exactly when the singular vectors are kept
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert (inner - torch.diag_embed(values)).abs().max() < 1e-12
    assert values.min() > 0.7 and values.max() < 1.2
    torch.testing.assert_close(orthogonalize(G.float()).double(), result, atol=2e-5, rtol=0)
    assert (orthogonalize(G.bfloat16()).double() - result).norm() < 0.08 * result.norm()
    assert torch.all(orthogonalize(torch.zeros(shape)) == 0)
