"""AdamW against torch's own, Muon against an SVD and against its rule written out for one matrix at a time."""
import pytest
import torch
from torch import nn
from torch.nn import Parameter

from nanochat.adamw import DistAdamW
from nanochat.muon import DistMuon, orthogonalize, shape_scale
from nanochat.zero import Sharding


def on_one_rank(params: dict[str, Parameter], dtype: torch.dtype = torch.float32) -> Sharding:
    """The parameters as one unit, all of which this rank keeps."""
    unit = nn.ParameterDict(params)
    return Sharding(unit, [unit], torch.device("cpu"), dtype, stage=0)


def apply(sharding: Sharding, *optimizers) -> None:
    stats = sharding.reduce_and_clip(torch.zeros(()))
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()


def test_adamw_equals_torchs_over_many_steps():
    """Different rates, a learning rate that changes, lr_mul and wd_mul, and gradients near eps, where its place shows."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator), torch.randn(1, generator=generator)]
    ours, theirs = ([Parameter(t.clone()) for t in start] for _ in range(2))
    ours[1].lr_mul, ours[1].wd_mul = 0.5, 3.0
    sharding = on_one_rank({str(i): p for i, p in enumerate(ours)})
    groups = [{"shards": [s], "lr": 0.1 * (i + 1)} for i, s in enumerate(sharding.shards)]
    optimizer = DistAdamW(groups, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1)
    lrs, decays = (0.1, 0.2 * 0.5, 0.3), (0.1, 0.1 * 3.0, 0.1)
    oracle = torch.optim.AdamW(
        [{"params": [p], "lr": lr, "weight_decay": wd} for p, lr, wd in zip(theirs, lrs, decays)], betas=(0.8, 0.95), eps=1e-4
    )
    for step in range(20):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn(a.shape, generator=generator) * 10.0 ** (-step % 5 - 2)
            b.grad = a.grad.clone()
        for group, other, lr in zip(optimizer.param_groups, oracle.param_groups, lrs):
            group["lr"], other["lr"] = group["initial_lr"] / (step + 1), lr / (step + 1)
        apply(sharding, optimizer)
        oracle.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


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


def test_muon_equals_its_rule_one_matrix_at_a_time():
    """Shapes mixed in one optimizer, each matrix alone in the oracle; Nesterov momentum, scale, cautious decay, multipliers."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (16, 8), (8, 8), (8, 24), (16, 8)]
    params = {f"m{i}": Parameter(torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)}
    params["m2"].lr_mul, params["m4"].wd_mul = 0.25, 5.0
    plain = {name: p.data.clone() for name, p in params.items()}
    velocity = {name: torch.zeros_like(p) for name, p in plain.items()}
    sharding = on_one_rank(params)
    muon = DistMuon(sharding, list(params), lr=0.05, weight_decay=0.3)
    for step in range(6):
        momentum = muon.param_groups[0]["momentum"] = 0.85 + 0.01 * step
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=generator)
        for name, p in params.items():
            velocity[name] = momentum * velocity[name] + (1 - momentum) * p.grad
            update = orthogonalize((1 - momentum) * p.grad + momentum * velocity[name])
            lr = 0.05 * shape_scale(*p.shape) * getattr(p, "lr_mul", 1.0)
            decay = 0.05 * getattr(p, "lr_mul", 1.0) * 0.3 * getattr(p, "wd_mul", 1.0)
            shrink = torch.where(update.sign() == plain[name].sign(), decay, 0.0)
            plain[name] = plain[name] - lr * update - shrink * plain[name]
        apply(sharding, muon)
    for name, p in params.items():
        torch.testing.assert_close(p.data, plain[name], atol=2e-6, rtol=1e-5)
    assert shape_scale(16, 8) == 2**0.5 and shape_scale(8, 24) == 1


def test_bfloat16_parameters_follow_float32_masters():
    """Steps far below bfloat16's resolution must add up; the parameter is its master, rounded, after every step."""
    ours, matrix = Parameter(torch.ones(4, 4)), Parameter(torch.ones(4, 4))
    sharding = on_one_rank({"p": ours, "m": matrix}, torch.bfloat16)
    slices = {s.name: s for s in sharding.shards}
    optimizers = DistAdamW([{"shards": [slices["p"]], "lr": 1e-4}]), DistMuon(sharding, ["m"], lr=1e-4)
    for _ in range(100):
        ours.grad, matrix.grad = torch.ones(4, 4), torch.eye(4)
        apply(sharding, *optimizers)
        assert torch.equal(ours.flatten(), slices["p"].master.bfloat16())
        assert torch.equal(matrix.flatten(), slices["m"].master.bfloat16())
    torch.testing.assert_close(slices["p"].master, torch.full((16,), 0.99), atol=6e-6, rtol=0)  # 100 roundings of 6e-8
    assert ours.dtype == torch.bfloat16 and ours[0, 0] < 1, "a hundred steps of 1e-4 are visible in bfloat16 (spacing 0.004)"
    assert matrix[0, 0] < 1 and matrix[0, 1] == 1


def test_float32_parameters_are_their_masters():
    """No second copy: in float32 the optimizer updates the parameter's own memory, and gradients are let go."""
    matrix, vector = Parameter(torch.ones(4, 4)), Parameter(torch.ones(4))
    sharding = on_one_rank({"m": matrix, "v": vector})
    matrix.grad, vector.grad = torch.eye(4), torch.ones(4)
    for s, p in zip(sharding.shards, (matrix, vector)):
        assert s.master.data_ptr() == p.data_ptr()
    apply(sharding, DistMuon(sharding, ["m"], lr=0.1), DistAdamW([{"shards": sharding.shards[1:], "lr": 0.1}]))
    assert matrix[0, 0] < 1 and vector[0] < 1 and matrix.grad is None and sharding.shards[0].grad is None
