"""Products in 8 bits: within what 3 and 2 bits of mantissa allow, and good enough to train with."""
import pytest
import torch

from bench.harness import draw_weights
from nanochat.model import fp8
from nanochat.model.fp8 import cast
from nanochat.model.gpt import GPT, norm
from nanochat.model.gpt_config import config_from_depth
from nanochat.model.loss import softcapped_cross_entropy
from nanochat.model.products import HeadProducts, Products
from nanochat.runtime.errors import UserError

EIGHT = fp8.Fp8Products()
# Largest rounding error of a number: half of its last bit, or half of the smallest number, in units of the scale.
E4M3, E5M2 = (2**-4, 2**-10, 448), (2**-3, 2**-17, 57344)


def with_error(x: torch.Tensor, format: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """|x| and the most that a scaled copy in 8 bits may be off, in float64."""
    relative, absolute, largest = format
    x = x.double().abs()
    return x, torch.maximum(x * relative, x.max() / largest * absolute) * (1 + 1e-6)


@pytest.mark.parametrize("sizes", [[32], [16, 16]])
@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_products_are_within_the_rounding_of_their_operands(dtype, rounding, sizes):
    """
    Forward and both gradients, every number, against float64; of operands with numbers of all sizes. The weight is
    whole or in two parts side by side.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()).to(dtype)
        for shape in ((3, 16, 48), (32, 48), (3, 16, 32)))
    x.requires_grad_(), weight.requires_grad_()
    y = torch.cat(EIGHT.linears(x, weight.split(sizes)), -1)
    y.backward(grad)
    rows, g = x.detach().flatten(0, 1), grad.flatten(0, 1)
    w = weight.detach()
    for got, (a, a_format), (b, b_format) in (
        (y.detach().flatten(0, 1), (rows, E4M3), (w.T, E4M3)),
        (x.grad.flatten(0, 1), (g, E5M2), (w, E4M3)),
        (weight.grad, (g.T, E5M2), (rows, E4M3)),
    ):
        exact = a.double() @ b.double()
        (a, a_error), (b, b_error) = with_error(a, a_format), with_error(b, b_format)
        bound = a_error @ b + a @ b_error + a_error @ b_error
        error = (got.double() - exact).abs()
        assert got.dtype == dtype and (error <= bound + rounding * (a @ b)).all()
        assert error.mean() > 0.01 * bound.mean(), "it is 8 bits that were multiplied"


def mlp_gradients(compute, x, weight_in, weight_out, grad) -> list[torch.Tensor]:
    inputs = [t.clone().requires_grad_() for t in (x, weight_in, weight_out)]
    y = compute(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize("unit", [1e-8, 1, 1e4])
def test_an_mlp_in_8_bits_is_nearly_the_exact_one(unit):
    """
    Its result and gradients, of gradients of any size, and with rows of very different ones. One channel is 20 times
    the others, without output: then relu² needs all of E4M3's range.
    """
    generator = torch.Generator().manual_seed(0)
    x = norm(torch.randn(256, 64, generator=generator))
    weight_in = torch.randn(256, 64, generator=generator) / 8
    weight_in[3] *= 20
    weight_out = torch.randn(64, 256, generator=generator) / 16
    weight_out[:, 3] = 0
    grad = torch.randn(256, 64, generator=generator) * torch.linspace(-7, 0, 256).exp()[:, None] * unit
    arguments = x, weight_in, weight_out, grad
    exact = mlp_gradients(Products().mlp, *(t.double() for t in arguments))
    ours = mlp_gradients(EIGHT.mlp, *arguments)
    for a, b, limit in zip(ours, exact, (0.06, 0.1, 0.1, 0.08)):
        assert (a - b).norm() < limit * b.norm()


def test_the_gradient_of_relu_squared_stays_within_its_bound(monkeypatch):
    """Also if gradients point along a column of the weight, and rounding makes every number as large as it can."""
    scaled = []

    def watched(parts, hidden, scale, dtype, **how):
        if parts and hidden is not None:
            scaled.append((2 * hidden.relu() * parts[0] / scale).abs().max().item() / torch.finfo(dtype).max)
        return cast(parts, hidden, scale, dtype, **how)

    monkeypatch.setattr(fp8, "cast", watched)
    for width in (16, 256):
        weight_in, weight_out = torch.zeros(4 * width, width), torch.zeros(width, 4 * width)
        weight_in[5] = 1
        # Just above the middle between two numbers of the format; another column sets the scale to a power of two.
        weight_out[:, 5] = (1 + 2**-4 + 1e-3) / 448 * 256
        weight_out[0, 6] = 1.75 / 448 * 256
        inputs = torch.ones(16, width), weight_in, weight_out, torch.ones(16, width)
        exact = mlp_gradients(Products().mlp, *inputs)
        for a, b in zip(mlp_gradients(EIGHT.mlp, *inputs), exact):
            assert (a - b).norm() < 0.15 * b.norm()
    assert len(scaled) == 2 and all(0.9 < part < 1 for part in scaled)


@pytest.mark.parametrize("spread", [0, 5, 12])
def test_a_head_in_8_bits_gives_nearly_the_loss_and_gradients_of_float32(spread):
    """Also where the sums of exponentials of two rows are e^20 apart, as far as the softcap lets them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator)
    x[:, 0] = torch.linspace(-spread, spread, 64)
    head = torch.randn(128, 32, generator=generator) * 0.1
    head[:, 0] = 1
    targets = torch.randint(0, 128, (64,), generator=generator)
    exact, ours = (), ()
    for products in (HeadProducts, fp8.Fp8HeadProducts):
        inputs = x.clone().requires_grad_(), head.clone().requires_grad_()
        loss = softcapped_cross_entropy(*inputs, targets, 128, 15.0, None, products)
        exact, ours = ours, (loss.detach(), *torch.autograd.grad(loss, inputs))
    assert not ours[0].equal(exact[0])
    for a, b, limit in zip(ours, exact, (0.01, 0.15, 0.15)):  # two bits of mantissa
        assert (a - b).norm() < limit * b.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value):
    """So that the step is skipped."""
    assert EIGHT.linear(torch.zeros(16, 16), torch.ones(16, 16)).eq(0).all()
    for place in range(4):  # x, the weights, the gradient
        inputs = [torch.ones(shape) for shape in ((16, 16), (64, 16), (16, 64), (16, 16))]
        inputs[place][3, 4] = value
        y, *gradients = mlp_gradients(EIGHT.mlp, *inputs)
        assert place == 3 or not y.isfinite().any()
        assert not gradients[0].isfinite().any() and not gradients[1].isfinite().any()


def test_a_model_multiplies_in_8_bits():
    """Its loss is another one, and near that of float32; evaluations multiply in the model's own dtype."""
    model = GPT(config_from_depth(2, 64, 32))
    draw_weights(model)
    for block in model.transformer.h:  # zeros would hide the products
        block.mlp.c_proj.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    model.lm_head.weight.data *= 100
    tokens = torch.arange(512).remainder(61).view(16, 32)
    plain = model(tokens, tokens).item()
    evaluated = model(tokens, tokens, reduction="none")
    fp8.use_fp8(model, torch.device("cpu"), tokens.numel())
    eight_bits = model(tokens, tokens).item()
    assert plain != eight_bits and eight_bits == pytest.approx(plain, rel=0.01)
    with torch.no_grad():
        assert model(tokens, tokens, reduction="none").equal(evaluated)


@pytest.mark.parametrize("capability, width, tokens, pays", [
    ((9, 0), 1408, 65536, True), ((9, 0), 1280, 65536, False), ((9, 0), 1408, 65544, False),
    ((8, 0), 1408, 65536, False)])
def test_auto_takes_8_bits_where_they_pay(monkeypatch, capability, width, tokens, pays):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fp8.fp8_pays(torch.device("cuda", 0), width, tokens) == pays
    assert not fp8.fp8_pays(torch.device("cpu"), width, tokens)
    if capability < (9, 0):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
        with pytest.raises(UserError, match="A100"):
            fp8.use_fp8(GPT(config_from_depth(1, 64, 32)), torch.device("cuda", 0), 1024)
