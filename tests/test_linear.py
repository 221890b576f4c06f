"""Products with constant weights against those of the definition in float64."""
import pytest
import torch
from torch import Tensor

from nanochat.errors import UserError
from nanochat.linear import INT8_ROWS, linear, quantized

ROWS = [1, 2, 16, INT8_ROWS, INT8_ROWS + 1]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def largest_error(got: Tensor, x: Tensor, weight: Tensor) -> float:
    """Relative to the sum of the products' sizes, which is what rounding is relative to."""
    x, weight = x.double(), weight.double()
    return ((got.double() - x @ weight.T).abs() / (x.abs() @ weight.abs().T)).max().item()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_of_rows_has_the_product_of_the_definition(rows, dtype):
    weight, x = drawn(96, 64).to(dtype), drawn(rows, 64).to(dtype)
    got = linear(weight)(x)
    assert got.dtype == dtype and got.shape == (rows, 96)
    assert largest_error(got, x, weight) < {torch.float32: 64 * 2**-24, torch.bfloat16: 2**-8}[dtype]


def test_int8_weights_are_off_by_half_a_step_of_their_own_row():
    """A row's step follows from its own largest element: a large row costs the others nothing, and zeros stay zero."""
    weight = drawn(40, 64)
    weight[3] *= 1000
    weight[5] = 0
    weight[7, 0] = 50.0
    values, scales = quantized(weight)
    assert values.dtype == torch.int8 and values.shape == weight.shape and scales.shape == (40,)
    steps = scales.double()[:, None]
    assert ((values.double() * steps - weight.double()).abs() <= steps / 2 * (1 + 1e-6)).all()
    nonzero = [row for row in range(40) if row != 5]
    assert (steps[nonzero, 0] <= weight[nonzero].double().abs().amax(1) / 126).all()
    assert not values[5].any() and values.abs().max() <= 127


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_products_are_those_of_the_rounded_weight(rows, dtype):
    weight, x = drawn(96, 64).to(dtype), drawn(rows, 64).to(dtype)
    values, scales = quantized(weight)
    got = linear(weight, "int8")(x)
    assert got.dtype == dtype and got.shape == (rows, 96)
    # x, the weight of many rows and the result are rounded to bfloat16: 2^-9 each, and at most half of that besides
    assert largest_error(got, x, values.double() * scales.double()[:, None]) < 2**-7


def test_int8_elsewhere_is_refused():
    with pytest.raises(UserError, match="quantize=int8 is for a CPU, not for meta"):
        linear(torch.empty(64, 64, device="meta"), "int8")
