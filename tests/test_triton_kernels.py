"""
The kernels of GPUs, against torch on the CPU: on a GPU, or else interpreted by Triton. Its interpreter rounds to 8 bits
in its own way, so only a GPU gets numbers that need rounding.
"""
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch.utils._pytree import tree_map_only

from nanochat.model import fp8

pytest.importorskip("triton", reason="triton is not installed; it is for Linux only")
GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def run():
    """Call a function in a Python of its own: whether Triton interprets is decided when a process first imports it."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        patch.setenv("TRITON_INTERPRET", "0" if GPU else "1")
        yield lambda *call: pool.submit(on_device, *call).result()


def on_device(function, *args):
    device = "cuda" if GPU else "cpu"
    result = function(*tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), args))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)


@pytest.mark.parametrize("form", ["parts", "hidden", "both", "factor"])
@pytest.mark.parametrize("shape", [(16, 48), (272, 144), (33, 129)])
def test_the_kernel_casts_as_torch_does(run, form, shape):
    """
    Every byte, except that a NaN in E5M2 is any number that is not finite. The interpreter makes finite numbers of NaN
    in E4M3.
    """
    x, hidden = torch.randn(2, *shape).exp().sub(1).bfloat16()
    factor, scale, square_scale = torch.rand(len(x)), torch.tensor(137.0), torch.tensor(121.0)  # nothing overflows
    if not GPU:  # at most two bits of mantissa, and one zero: the larger of +0 and -0 may be either
        x, hidden, factor = x.round().clamp(-2, 3), hidden.round().clamp(-2, 2) + 0, factor.round() + 1
        scale, square_scale = torch.tensor(2.0), torch.tensor(4.0)
    for dtype in (fp8.E4M3, fp8.E5M2):
        if GPU or dtype == fp8.E5M2:
            x[3, 4:7] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        call = {"parts": ([x, hidden[:, :16], x], None, scale, dtype),
                "hidden": ([], hidden, scale, dtype, False),
                "both": ([x], hidden, scale, dtype, True, None, square_scale),
                "factor": ([x], None, scale, dtype, True, factor)}[form]
        for ours, theirs in zip(run(fp8.cast_on_gpu, *call), fp8.cast(*call)):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            same = ours.view(torch.uint8) == theirs.view(torch.uint8)
            assert (same | ~ours.float().isfinite() & theirs.float().isnan()).all()


def lookup_and_gradient(tokens, table, grad):
    from nanochat.model.triton_kernels import EmbeddingLookup

    rows = EmbeddingLookup.apply(tokens, table.requires_grad_())
    return rows.detach(), *torch.autograd.grad(rows, table, grad)


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 0), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("places, rows, most, columns", [
    (300, 97, 70, 24), (65, 100, 3, 515), (200, 2, 200, 24), (1, 3, 1, 1)])
def test_an_embeddings_gradient_is_the_sum_over_each_tokens_places(run, places, rows, most, columns, dtype, rounding):
    """Of a token with `most` places as of one with none; in one order. What is not finite stays in its row."""
    tokens = torch.randint(0, rows, (places,))
    tokens[:most] = rows - 1
    grad, table = torch.randn(places, columns, dtype=dtype), torch.randn(rows, columns, dtype=dtype)
    grad[0, :2] = torch.tensor([torch.nan, torch.inf])[:columns]
    output, ours = run(lookup_and_gradient, tokens, table, grad)
    assert output.equal(table[tokens])
    exact = torch.zeros(rows, columns, dtype=torch.float64).index_add(0, tokens, grad.double())
    torch.testing.assert_close(ours, exact, rtol=rounding, atol=1e-4, equal_nan=True, check_dtype=False)
    assert ours.dtype == dtype
    _, again = run(lookup_and_gradient, tokens, table, grad)
    torch.testing.assert_close(again, ours, rtol=0, atol=0, equal_nan=True)
