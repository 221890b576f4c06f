"""AdamW against torch's own, Muon's orthogonalization against an SVD; test_zero.py has Muon's rule written out."""
import pytest
import torch
from torch import nn
from torch.nn import Parameter

from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import config_from_depth
from nanochat.optim.adamw import DistAdamW
from nanochat.optim.muon import orthogonalize
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.zero import Sharding


def on_one_rank(params: dict[str, Parameter]) -> Sharding:
    """The parameters as one unit, all of which this rank keeps."""
    unit = nn.ParameterDict(params)
    return Sharding(unit, [unit], torch.device("cpu"), torch.float32, zero_stage=0)


def apply(sharding: Sharding, *optimizers) -> None:
    stats = sharding.reduce_and_clip(torch.zeros(()))
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()


def test_adamw_equals_torchs_over_many_steps():
    """Groups with rates of their own, rates that change, and gradients near eps, where its place shows."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), (1,))]
    ours, theirs = ([Parameter(t.clone()) for t in start] for _ in range(2))
    rates = [{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.3}]
    sharding = on_one_rank({str(i): p for i, p in enumerate(ours)})
    settings = dict(betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1)
    optimizer = DistAdamW([{"shards": [s], **group} for s, group in zip(sharding.shards, rates)], **settings)
    oracle = torch.optim.AdamW([{"params": [p], **group} for p, group in zip(theirs, rates)], **settings)
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


def test_every_group_has_its_scaled_rate():
    with torch.device("meta"):
        model = GPT(config_from_depth(2, 64, 32, arch="modern"))
    model.to_empty(device="cpu").init_weights(0)
    sharding = Sharding(model, model.units(), torch.device("cpu"), torch.float32, zero_stage=0)
    adamw, muon = setup_optimizers(model, sharding, 0.1, 0.2, 0.3, 0.4, lr_scale=0.25)
    rates = [group["initial_lr"] for group in adamw.param_groups] + [muon.param_groups[0]["initial_lr"]]
    width = (128 / 768) ** -0.5
    assert rates == pytest.approx([0.25 * rate for rate in (0.1 * width, 0.2 * width, 0.1 * width, 0.02, 0.3)])
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
    relative = (orthogonalize(G.bfloat16()).double() - result).norm() / result.norm()
    assert relative < 0.08, f"bfloat16 iteration is {relative:.3f} away"
    assert torch.all(orthogonalize(torch.zeros(shape)) == 0)
