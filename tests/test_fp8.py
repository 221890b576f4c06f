"""Products in 8 bits: within what 3 and 2 bits of mantissa allow, and good enough to train with."""
import pytest
import torch

from nanochat.model import fp8
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import config_from_depth
from nanochat.runtime.errors import UserError

# Largest rounding error of a number: half of its last bit, or half of the smallest number, in units of the scale.
E4M3, E5M2 = (2**-4, 2**-10, 448), (2**-3, 2**-17, 57344)


def with_error(x: torch.Tensor, format: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """|x| and the most that a scaled copy in 8 bits may be off, in float64."""
    relative, absolute, largest = format
    x = x.double().abs()
    return x, torch.maximum(x * relative, x.max() / largest * absolute) * (1 + 1e-6)


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_products_are_within_the_rounding_of_their_operands(dtype, rounding):
    """Forward and both gradients, every number, against float64; of operands with numbers of all sizes."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()).to(dtype)
        for shape in ((3, 16, 48), (32, 48), (3, 16, 32)))
    x.requires_grad_(), weight.requires_grad_()
    y = fp8.fp8_linear(x, weight)
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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value):
    """So that the step is skipped."""
    weight, grad = torch.ones(16, 16, requires_grad=True), torch.ones(16, 16)
    grad[3, 4] = value
    fp8.fp8_linear(torch.ones(16, 16), weight).backward(grad)
    assert not weight.grad.isfinite().any()
    assert fp8.fp8_linear(torch.zeros(16, 16), weight).eq(0).all()


def test_a_model_multiplies_in_8_bits():
    """Its loss is another one, and near that of float32."""
    model = GPT(config_from_depth(2, 64, 32))
    model.init_weights(0)
    for block in model.own_blocks():  # zeros would hide the products
        block.mlp.c_proj.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    model.lm_head.weight.data *= 100
    tokens = torch.arange(512).remainder(61).view(16, 32)
    plain = model(tokens, tokens).item()
    evaluated = model(tokens, tokens, reduction="none")
    fp8.use_fp8(model, torch.device("cpu"), tokens.numel())
    eight_bits = model(tokens, tokens).item()
    assert plain != eight_bits and eight_bits == pytest.approx(plain, rel=0.01)
    with torch.no_grad():
        assert model(tokens, tokens, reduction="none").equal(evaluated), "evaluations multiply in the model's own dtype"


def test_where_there_is_no_such_product_one_line_says_so(monkeypatch):
    model = GPT(config_from_depth(1, 64, 32))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(UserError, match="needs an H100 or newer; this is A100"):
        fp8.use_fp8(model, torch.device("cuda", 0), 1024)


@pytest.mark.parametrize("capability, width, tokens, pays", [
    ((9, 0), 1408, 65536, True), ((10, 0), 1536, 32768, True), ((9, 0), 1280, 65536, False),
    ((9, 0), 1408, 65544, False), ((8, 0), 1408, 65536, False), ((12, 0), 1408, 65536, False)])
def test_auto_takes_8_bits_where_they_pay(monkeypatch, capability, width, tokens, pays):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fp8.fp8_pays(torch.device("cuda", 0), width, tokens) == pays
    assert not fp8.fp8_pays(torch.device("cpu"), width, tokens)
