"""Products in 8 bits: within what 3 and 2 bits of mantissa allow, and good enough to train with."""
import pytest
import torch

from nanochat.model import fp8
from nanochat.model.fp8_cast import cast
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import config_from_depth
from nanochat.model.layers import SquaredReLU
from nanochat.model.loss import Products, softcapped_cross_entropy
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


def test_an_mlp_in_8_bits_is_its_two_products_and_relu_squared():
    """In float32 to the bit, forward and backward: relu² is computed where it is cast, and not kept."""
    generator = torch.Generator().manual_seed(0)
    x, weight_in, weight_out, grad = (
        torch.randn(shape, generator=generator, requires_grad=True)
        for shape in ((2, 16, 32), (128, 32), (32, 128), (2, 16, 32)))
    inputs = x, weight_in, weight_out
    apart = fp8.fp8_linear(SquaredReLU.apply(fp8.fp8_linear(x, weight_in)), weight_out)
    whole = fp8.fp8_mlp(*inputs)
    assert whole.equal(apart)
    for ours, theirs in zip(torch.autograd.grad(whole, inputs, grad), torch.autograd.grad(apart, inputs, grad)):
        assert ours.equal(theirs)


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
    for products in (Products, fp8.Fp8Products):
        inputs = x.clone().requires_grad_(), head.clone().requires_grad_()
        loss = softcapped_cross_entropy(*inputs, targets, 128, 15.0, None, products)
        exact, ours = ours, (loss.detach(), *torch.autograd.grad(loss, inputs))
    assert not ours[0].equal(exact[0])
    for a, b, limit in zip(ours, exact, (0.01, 0.15, 0.15)):  # two bits of mantissa
        assert (a - b).norm() < limit * b.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", ["x", "hidden", "both", "factor"])
@pytest.mark.parametrize("shape", [(16, 48), (272, 144), (1000, 1408)])
def test_the_kernel_casts_as_torch_does(form, shape):
    x, hidden = torch.randn(2, *shape, device="cuda").exp().sub(1).bfloat16()
    factor = torch.rand(len(x), device="cuda") if form == "factor" else None
    x, hidden = (None if form == "hidden" else x), (None if form in ("x", "factor") else hidden)
    for dtype in (fp8.E4M3, fp8.E5M2):
        scale = torch.tensor(0.37, device="cuda")
        *others, by_row = (t if t is None else t.cpu() for t in (x, hidden, scale, factor))
        on_cpu = cast(*others, dtype, factor=by_row)
        for ours, theirs in zip(cast(x, hidden, scale, dtype, factor=factor), on_cpu):
            assert ours.cpu().view(torch.uint8).equal(theirs.view(torch.uint8))


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
