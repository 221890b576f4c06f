"""The model against its definition written out in float64, and against torch's own counters."""
import itertools
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import varlen_on_cpu  # noqa: F401
from conftest import ALL_PIECES
from torch.utils.flop_counter import FlopCounterMode

from bench.harness import draw_weights
from nanochat.data.batch_shape import document_offsets
from nanochat.data.padding import padded_length
from nanochat.model.attention import (
    attention,
    document_starts,
    has_varlen,
    query_blocks,
    varlen_attention,
    varlen_error,
)
from nanochat.model.fp8 import use_fp8
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import MAX_SOFTCAP, GPTConfig, architecture, config_from_depth
from nanochat.model.loss import CHUNK_LOGITS, softcapped_cross_entropy, token_losses
from nanochat.optim.zero import shard_model
from nanochat.runtime.compiling import switch
from nanochat.runtime.errors import UserError

CPU = torch.device("cpu")
ALONE = ["rope_theta=100", "qk_scale=1.5", "short_windows=True", "value_embeddings=True",
         "smear=True", "key_offset=True", "document_token=3", "stream_scales=True", "subtract_middle=True",
         "value_embeddings=True,smear=True,narrow_gates=True"]  # each piece of the forward pass


def in_float64(model: GPT) -> dict[str, torch.Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def small_model(
    n_kv_head: int = 2, vocab_size: int = 70, softcap: float | None = 15.0, arch: str = "classic", n_layer: int = 2,
    n_embd: int = 32,
) -> GPT:
    """
    Four heads, a vocabulary that needs padding; every weight random: zeros would hide mistakes. With five layers the
    short ones, the fourth and the last differ, and so do the middle and the last; 48 channels are more than gates read.
    """
    shape = dict(n_layer=n_layer, n_embd=n_embd, n_head=4, n_kv_head=n_kv_head)
    model = GPT(GPTConfig(32, vocab_size, **shape, softcap=softcap, **architecture(arch)))
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data.normal_(1 if p.dim() == 1 else 0, 0.3, generator=generator)
    return model


def definition(model: GPT, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits by the book, with weights in float64: rotation as a product of complex numbers, heads one by one."""
    config = model.config
    T, D, last = tokens.size(1), config.head_dim, config.n_layer - 1

    def rms(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1.1920929e-07).sqrt()

    def gate(x, name, inputs, limit):
        if not config.narrow_gates:
            inputs, limit = 32, 2
        return limit / (1 + torch.exp(-x[..., :inputs] @ weights[f"transformer.{name}.weight"].T))

    powers = torch.arange(0, D, 2, dtype=torch.float64) / D
    angle = torch.arange(T, dtype=torch.float64)[:, None] / config.rope_theta**powers
    turn = torch.polar(torch.ones_like(angle), -angle)

    def rotated(x):  # (B, T, D)
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
        return torch.cat((z.real, z.imag), -1)

    documents = (tokens == config.document_token).cumsum(1)  # the number of each token's document
    x = rms(weights["transformer.wte.weight"][tokens])
    if config.smear:
        parts = weights["transformer.wte.smear_scale"] * gate(x, "wte.smear", 24, 1)
        parts = parts * (tokens != config.document_token)[..., None]
        x = torch.stack([x[:, t] + (parts[:, t] * x[:, t - 1] if t else 0) for t in range(T)], 1)
    first = middle = x
    for i in range(config.n_layer):
        if config.stream_scales:
            name = f"transformer.h.{i}"
            x = weights[f"{name}.residual_scale"] * x + weights[f"{name}.first_scale"] * first

        def linear(x, name, i=i):
            return x @ weights[f"transformer.h.{i}.{name}.weight"].T

        h, heads = rms(x), []
        distance = torch.arange(T)[:, None] - torch.arange(T)
        seen = distance >= 0
        if config.short_windows and i not in (3, last):
            seen &= distance < 8  # a quarter of 32
        seen = seen & (documents[:, :, None] == documents[:, None])
        for head in range(config.n_head):
            group = head // (config.n_head // config.n_kv_head)
            own = slice(group * D, (group + 1) * D)
            q = rms(rotated(linear(h, "attn.c_q")[..., head * D : (head + 1) * D])) * config.qk_scale
            k = rms(rotated(linear(h, "attn.c_k")[..., own])) * config.qk_scale
            if config.key_offset and (i in (3, last) or not config.short_windows):
                # channels D/4 to D/2 and 3D/4 to D: those of the token before
                own_keys, k = k, k.clone()
                same = (documents[:, 1:] == documents[:, :-1])[..., None]
                for part in (slice(D // 4, D // 2), slice(D // 2 + D // 4, D)):
                    k[:, :1, part] = 0
                    k[:, 1:, part] = own_keys[:, :-1, part] * same
            v = linear(h, "attn.c_v")[..., own]
            if config.value_embeddings and i % 2 == last % 2:
                table = weights[f"transformer.h.{i}.values.weight"]
                v = v + gate(h, f"h.{i}.attn.value_gate", 12, 3)[..., group, None] * table[tokens][..., own]
            heads.append((q @ k.mT / math.sqrt(D)).masked_fill(~seen, -torch.inf).softmax(-1) @ v)
        x = x + linear(torch.cat(heads, -1), "attn.c_proj")
        x = x + linear(linear(rms(x), "mlp.c_fc").clamp(min=0) ** 2, "mlp.c_proj")
        middle = x if i == config.n_layer // 2 < last else middle
    if config.subtract_middle:
        x = x - weights[f"transformer.h.{last}.middle_scale"] * middle
    logits, softcap = rms(x) @ weights["lm_head.weight"].T, config.softcap
    return (softcap * torch.tanh(logits / softcap) if softcap else logits)[..., : config.vocab_size]


@pytest.mark.parametrize("n_kv_head,softcap,arch,n_layer", [
    (1, 15.0, "classic", 2), (2, 15.0, "classic", 2), (4, 15.0, "classic", 2), (2, 3, "classic", 2),
    (2, 0, "classic", 2), (2, None, "classic", 2), (2, 15.0, ALL_PIECES, 5), (1, None, ALL_PIECES, 1),
    *((2, 15.0, f"classic,{piece}", 5) for piece in ALONE),
])
@pytest.mark.parametrize("varlen", [False, True])
def test_logits_loss_and_gradients_are_those_of_the_definition(n_kv_head, softcap, arch, n_layer, varlen, monkeypatch):
    """
    With the kernels of a CPU and with those of a GPU. Weights of this size push many logits into the softcap's bend;
    float32 rounding leaves 1e-4 of 15.
    """
    monkeypatch.setattr("nanochat.model.gpt.has_varlen", lambda *_: varlen)
    model = small_model(n_kv_head, softcap=softcap, arch=arch, n_layer=n_layer, n_embd=48)
    weights = in_float64(model)
    tokens = torch.randint(70, (3, 32), generator=torch.Generator().manual_seed(0))
    tokens[0, [0, 6, 19]] = tokens[1, 30] = 3  # documents begin; there are none in the third row
    expected = definition(model, weights, tokens)
    cu_seqlens = model.cu_seqlens_of(tokens)
    begin = [i for i in range(96) if i % 32 == 0 or tokens.flatten()[i] == model.config.document_token]
    assert cu_seqlens.tolist() == [*begin, 96]
    torch.testing.assert_close(model(tokens, cu_seqlens=cu_seqlens).double(), expected, atol=2e-4, rtol=0)
    targets = tokens.roll(-1, 1)
    targets[1, 5:] = -1
    nats = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none").view(3, 32)
    mean = nats.sum() / (targets >= 0).sum()
    for reduction, exact, atol in (("none", nats, 3e-4), ("sum", nats.sum(), 5e-3), ("mean", mean, 1e-4)):
        loss = model(tokens, targets, reduction=reduction, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(loss.double(), exact, atol=atol, rtol=0)
    loss.backward(), mean.backward()
    for name, p in model.named_parameters():
        exact = weights[name].grad
        assert (p.grad - exact).norm() <= 1e-4 * exact.norm(), name


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, doc_start=None) -> torch.Tensor:
    """The definition, in float32, with every key head repeated: slow; the kernels are compared with it."""
    length, group = q.size(1), q.size(2) // k.size(2)
    q, k, v = (heads.transpose(1, 2).float() for heads in (q, k, v))
    k, v = (heads.repeat_interleave(group, dim=1) for heads in (k, v))      # (B, H, T, D)
    scores = q @ k.mT / q.size(-1) ** 0.5                                   # (B, H, T, T)
    seen = torch.ones(length, length, dtype=torch.bool)
    unseen = ~seen.tril() | seen.tril(-window)
    if doc_start is not None:
        unseen = unseen | (torch.arange(length) < doc_start[:, None, :, None])
    return (scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def documents_of_two_rows(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents of 1, 2, 70 and more tokens; of all but the last token. Offsets, and begins found one by one."""
    first = list(itertools.takewhile(lambda size: size > 0, (1, 2, min(70, length - 3), length - 73)))
    rows = [first, [length - 1, 1]]  # the last document of the first row goes on to its end
    doc_start = torch.zeros(2, length, dtype=torch.int64)
    for row, sizes in zip(doc_start, rows):
        for begin in itertools.accumulate(sizes[:-1]):
            row[begin:] = begin
    return document_offsets(rows, 2, length), doc_start


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kernel", ["blocks", "masked", "varlen"])
@pytest.mark.parametrize("window", [1024, 100, 2, 1])
@pytest.mark.parametrize("heads,kv_heads,length", [(2, 2, 64), (4, 2, 300), (6, 1, 513), (4, 2, 2), (1, 1, 1)])
def test_attention_kernels_equal_the_reference(heads, kv_heads, length, window, kernel, apart, monkeypatch):
    """
    Grouped queries, windows, documents apart, and lengths below, above and not a multiple of the block; values and
    gradients. Varlen: what varlen_attn is asked for, of kernels that follow its documentation.
    """
    if kernel == "masked":  # the way of longer rows, and of old GPUs
        monkeypatch.setattr("nanochat.model.attention.BLOCKWISE_MAX_LENGTH", 0)
    generator = torch.Generator().manual_seed(length)
    q, k, v, upstream = (torch.randn(2, length, h, 16, generator=generator, requires_grad=True)
                         for h in (heads, kv_heads, kv_heads, heads))
    cu_seqlens, doc_start = documents_of_two_rows(length)
    if not apart:
        cu_seqlens, doc_start = torch.tensor([0, length, 2 * length], dtype=torch.int32), None
    else:
        assert torch.equal(document_starts(cu_seqlens, 2, length), doc_start)
    expected = reference_attention(q, k, v, window, doc_start)
    got = attention(q, k, v, window, cu_seqlens if kernel == "varlen" else None, doc_start)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    gradients = (torch.autograd.grad(y, (q, k, v), upstream) for y in (got, expected))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window, firsts", [
    (512, [0, 0, 0, 0, 0, 128, 128, 256]), (64, [0, 0, 64, 128, 192, 256, 320, 384])])
def test_keys_that_no_row_sees_are_left_out_on_a_cpu(window, firsts):
    """Keys before the window, and whole blocks of keys before both rows' documents at the first query of a block."""
    doc_start = document_starts(document_offsets([[150, 250, 112], [300, 212]], 2, 512), 2, 512)
    assert [first for _, _, first in query_blocks(512, window, doc_start)] == firsts


@pytest.mark.parametrize("faults, chosen", [
    ({}, 4), ({4: "wide"}, 2), ({4: "nan"}, 2), ({4: "refuses"}, 2), ({4: "refuses", 2: "wide"}, None)])
@pytest.mark.parametrize("group", [1, 3])
def test_a_gpu_kernel_is_used_only_after_right_numbers(faults, chosen, group, monkeypatch):
    """Faults: a window that is one key too wide; NaN in one gradient. None is tried on a CPU or for float32."""
    active = [2]

    def kernel(q, k, v, window, cu_seqlens):
        match faults.get(active[-1]):
            case "refuses":
                raise RuntimeError("no kernel for this GPU")
            case "nan":
                k = k + 0 * (0 * k).sqrt()
            case "wide":
                window += 1
        return varlen_attention(q, k, v, window, cu_seqlens)

    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", lambda name: active.append(int(name[-1])))
    monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: "FA4")
    monkeypatch.setattr("torch.nn.attention.restore_flash_attention_impl", lambda: active.remove(4))
    monkeypatch.setattr("nanochat.model.attention.varlen_error", lambda _, *kind: varlen_error(CPU, *kind))
    monkeypatch.setattr("nanochat.model.attention.varlen_attention", kernel)
    kind = torch.bfloat16, 16, group
    with torch.inference_mode():  # the first pass may be a sample
        assert has_varlen.__wrapped__(torch.device("cuda", 0), *kind) == (chosen is not None)
    assert active[-1] == (chosen or 2)
    assert not has_varlen(torch.device("cuda", 0), torch.float32, 16, 1) and not has_varlen(CPU, *kind)


def drawn(x_scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (32, 24), head (64, 24) for 50 tokens and larger padding, targets (32,), of which every fifth is missing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 24, generator=generator) * x_scale
    head = torch.randn(64, 24, generator=generator)
    head[50:] *= 20
    targets = torch.randint(50, (32,), generator=generator)
    targets[::5] = -1
    return x, head, targets


@pytest.mark.parametrize("softcap, x_scale, rounding, compiled", [
    (15.0, 3, 1, False), (15.0, 3, 1, True), (None, 40, 100, False)])
def test_loss_and_gradients_equal_autograds(monkeypatch, softcap, x_scale, rounding, compiled):
    """
    In one chunk and in four, padding, masked and weighted targets: autograd in float64 on the plain formula. Without a
    softcap with logits of several hundred, whose exponentials are no float32; rounding leaves 2^-24 of one.
    """
    monkeypatch.setattr(switch, "on", compiled)
    x, head, targets = drawn(x_scale)
    x64, head64 = x.double().requires_grad_(), head.double().requires_grad_()
    logits = x64 @ head64[:50].T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    else:
        assert logits.abs().max() > 400
    expected_each = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    drawn_weights = torch.randn(32, generator=torch.Generator().manual_seed(1))
    for chunk_logits, weights in ((32 * 64, None), (8 * 64, None), (8 * 64, drawn_weights)):
        monkeypatch.setitem(CHUNK_LOGITS, "cpu", chunk_logits)
        counts = torch.ones(32) if weights is None else weights
        expected = expected_each @ counts.double()
        grad_x, grad_head = torch.autograd.grad(expected / 3, (x64, head64), retain_graph=True)
        x_, head_ = x.clone().requires_grad_(), head.clone().requires_grad_()
        loss = softcapped_cross_entropy(x_, head_, targets, 50, softcap, weights)
        (loss / 3).backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(x_.grad.double(), grad_x, atol=2e-6 * rounding, rtol=1e-5 * rounding)
        torch.testing.assert_close(head_.grad.double(), grad_head, atol=5e-6 * rounding, rtol=1e-5 * rounding)
        assert torch.all(head_.grad[50:] == 0), "padded rows get no gradient"
        each = token_losses(x, head, targets, 50, softcap)
        torch.testing.assert_close(each.double(), expected_each, rtol=1e-6, atol=2e-6 * rounding)
        assert torch.all(each[::5] == 0)


@pytest.mark.parametrize("arch", ["classic", ALL_PIECES])
@pytest.mark.parametrize("by_weights", [False, True])
def test_positions_without_a_target_take_no_part_after_the_last_attention(arch, by_weights):
    """
    Products counted by torch: forward, and both of backward. Loss and gradients: autograd's, of the definition. Of one
    position alone or none all are computed, as compiled code is of two or more.
    """
    model = small_model(arch=arch, n_layer=5)
    tokens, targets = torch.randint(70, (2, 2, 32), generator=torch.Generator().manual_seed(0))
    drawn_weights = torch.rand(2, 32, generator=torch.Generator().manual_seed(1)) + 0.5
    exact = in_float64(model)
    each = F.cross_entropy(definition(model, exact, tokens).flatten(0, 1), targets.flatten(), reduction="none")
    counted = {}
    for kept in (64, 13, 1, 0):
        keep = torch.arange(64).mul(37).remainder(64).view(2, 32) < kept
        weights = (drawn_weights * keep).requires_grad_() if by_weights else None
        some = targets if by_weights else targets.where(keep, -1)
        with FlopCounterMode(display=False) as flops:
            loss = model(tokens, some, "sum", weights, model.cu_seqlens_of(tokens))
            loss.backward()
        counted[kept] = flops.get_total_flops()
        expected = each @ (drawn_weights * keep if by_weights else keep).flatten().double()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
        for p, gradient in zip(model.parameters(), torch.autograd.grad(expected, [*exact.values()], retain_graph=True)):
            torch.testing.assert_close(p.grad.double(), gradient, rtol=1e-4, atol=1e-4)
        if by_weights:
            torch.testing.assert_close(weights.grad[keep].double(), each.view(2, 32)[keep], rtol=1e-5, atol=0)
        model.zero_grad()
    width, vocabulary = model.config.n_embd, model.config.padded_vocab_size
    assert counted[64] - counted[13] == 51 * 3 * 2 * width * (9 * width + vocabulary)
    assert counted[1] == counted[0] == counted[64]


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiled_blocks_give_every_parameter_eagers_gradient(device, eight_bits, monkeypatch):
    """
    In float32, of what is compiled on either device, by all of torch but the generator of code. In torch 2.11 queries
    and keys got zeros.
    """
    if device == "cuda":
        monkeypatch.setattr("nanochat.model.attention.BLOCKWISE_MAX_LENGTH", 0)
    model = small_model(arch="modern,stream_scales=True,subtract_middle=True", n_layer=2)
    tokens = torch.randint(70, (2, 32), generator=torch.Generator().manual_seed(0))
    if eight_bits:
        use_fp8(model, torch.device("cpu"), tokens.numel())
    gradients = []
    for _ in range(2):
        model(tokens, tokens, cu_seqlens=model.cu_seqlens_of(tokens)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
        with monkeypatch.context() as patched:
            patched.setattr("torch.compile", partial(torch.compile, backend="aot_eager"))
            for block in model.transformer.h:
                block.compile_body(torch.device(device))
    for name, exact in gradients[0].items():
        assert exact.any() and (gradients[1][name] - exact).norm() < 1e-5 * exact.norm(), name


@torch._dynamo.config.patch(recompile_limit=64)     # monkeypatch would remove the setting at its end
def test_fine_tuning_compiles_few_graphs_on_a_gpu(monkeypatch):
    """
    The GPU's path on CPU tensors: every kind of block (window or not, value table or not, and the last) once for each
    of three lengths, also the first block; nothing anew for other numbers of documents.
    """
    from torch._dynamo.testing import CompileCounter

    pieces = architecture("modern", depth=12)
    config = GPTConfig(2048, 70, n_layer=6, n_embd=32, n_head=4, n_kv_head=4, **pieces, document_token=3)
    model, counter = GPT(config), CompileCounter()
    draw_weights(model)
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr("nanochat.model.gpt.has_varlen", lambda *_: True)
    monkeypatch.setattr("nanochat.runtime.compiling.with_compiler", lambda function, dynamic=False: function)
    for block in model.transformer.h:
        block.compile_body(torch.device("cuda"))
    monkeypatch.setattr(switch, "on", True)
    lengths = {padded_length(longest, 2048, torch.device("cuda")) for longest in range(1, 2050)}
    for length, count in itertools.product(sorted(lengths), (1, 2, 7, 40)):
        cu_seqlens = document_offsets([[length // count] * count], 1, length)
        model(torch.zeros(1, length, dtype=torch.int64), cu_seqlens=cu_seqlens).sum().backward()
    kinds = {(b.attn.window < 2048, b.values is None, b.middle_scale is None) for b in model.transformer.h}
    assert lengths == {256, 1024, 2048} and len(kinds) == 4
    assert counter.frame_count == len(lengths) * len(kinds)


def test_the_largest_softcap_is_finite_and_a_larger_one_is_refused():
    """Every logit is at the limit, over a large vocabulary. Beyond it exp(softcap) would be infinite."""
    x, head = torch.full((2, 1), 1e4), torch.ones(2**17, 1)
    loss = softcapped_cross_entropy(x, head, torch.tensor([0, 1]), 2**17, MAX_SOFTCAP)
    assert loss.item() == pytest.approx(2 * 17 * math.log(2), rel=1e-5)
    with pytest.raises(UserError, match="softcap=65"):
        small_model(softcap=MAX_SOFTCAP + 1)


def test_a_target_in_the_padding_is_never_learnt():
    """Its loss is infinite: the step is skipped."""
    tokens = torch.randint(70, (2, 8), generator=torch.Generator().manual_seed(0))
    targets = tokens.clone()
    targets[1, 3] = 70  # the first of the 58 padded rows
    for softcap in (15.0, None):
        model = small_model(softcap=softcap)
        each = model(tokens, targets, reduction="none")
        assert each[1, 3] == math.inf and each.isfinite().sum() == 15
        assert model(tokens, targets) == math.inf


def test_bfloat16_gradients_are_summed_in_float32():
    """Three times the same gradient: in float32 exact, in bfloat16 two bits would be missing."""
    model = small_model()
    shard_model(model, model.units(), torch.device("cpu"), torch.bfloat16, zero_stage=0)
    tokens = torch.randint(70, (2, 32))
    model(tokens, tokens).backward()
    once = [p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        model(tokens, tokens).backward()
    assert all(torch.equal(p.grad, 3 * g.bfloat16().float()) for p, g in zip(model.parameters(), once))


@pytest.mark.parametrize("arch", ["classic", ALL_PIECES])
def test_every_weight_is_initialized_from_its_own_name(arch):
    """The depth does not change how a tensor of some shape starts."""
    config = GPTConfig(64, 100, 4, 128, 1, 1, **architecture(arch))
    model, shallow = GPT(config), GPT(replace(config, n_layer=2))
    weights = {name: model.draw(name, 7) for name, _ in model.named_parameters()}
    random = [name for name, p in weights.items() if p.any() and not name.endswith("_scale")]
    for name, _ in shallow.named_parameters():
        if name in random:
            assert torch.equal(shallow.draw(name, 7), weights[name])
            assert not torch.equal(shallow.draw(name, 8), weights[name]), "another seed"
    assert not torch.equal(weights["transformer.h.0.attn.c_q.weight"], weights["transformer.h.1.attn.c_q.weight"])
    zeros = "c_proj|smear" if arch == ALL_PIECES else "c_proj"
    assert all(not p.any() for name, p in weights.items() if re.search(zeros, name))
    model.load_state_dict(weights)
    tokens = torch.randint(100, (2, 16))
    assert abs(model(tokens, tokens).item() - math.log(100)) < 0.01, "uniform over 100 tokens, not 128"

    expected = {"wte": 1, "h.1.mlp.c_fc": 128**-0.5, "h.1.attn.c_k": 128**-0.5}
    if arch == ALL_PIECES:
        expected |= {"wte": 0.8, "h.1.mlp.c_fc": 0.4 * 128**-0.5, "h.1.values": 128**-0.5}
        scales = [weights[f"transformer.h.{i}.{name}"].item() for name in ("residual_scale", "first_scale")
                  for i in (0, 3)]
        assert scales == pytest.approx([1.15, 1.05, 0.2, 0.05])
        gate = weights["transformer.h.3.attn.value_gate.weight"]
        assert gate.shape == (1, 12) and 0 <= gate.min() < gate.max() <= 0.02
    for name, std in expected.items():
        assert weights[f"transformer.{name}.weight"].std().item() == pytest.approx(std, rel=0.02), name


def test_an_architecture_is_a_name_and_changes():
    """From 12 layers on modern has what won there; classic is what was published."""
    small, large = (config_from_depth(depth, 100, 64, arch="modern,qk_scale=1") for depth in (11, 12))
    assert not small.narrow_gates and small.streams == 1 and small.rope_theta == 1e4
    assert large.narrow_gates and large.streams == 3 and large.rope_theta == 1e5 and large.qk_scale == 1
    assert architecture("classic") == {}
    assert architecture("modern, smear=False,rope_theta=1e5") == architecture("modern") | {
        "smear": False, "rope_theta": 100_000.0}
    assert config_from_depth(4, 100, 64, arch="modern,head_dim=64").n_head == 4
    for wrong in ("moden", "classic,smear=1", "classic,head_dim=96"):
        with pytest.raises(UserError):
            config_from_depth(4, 100, 64, arch=wrong)


@pytest.mark.parametrize("arch", ["classic", ALL_PIECES])
def test_flops_equal_those_that_torch_counts(arch):
    """
    Matrix products counted while they run; attention runs in full here, as the formula has it but for the 24 of 32 keys
    that three layers do not see. Gates are products too, which the formula leaves out.
    """
    model = small_model(n_kv_head=4, vocab_size=64, arch=arch, n_layer=5)
    tokens = torch.randint(64, (2, 32))
    logits = model(tokens).sum()
    with FlopCounterMode(display=False) as forward:
        model(tokens)
    with FlopCounterMode(display=False) as backward:
        logits.backward()
    # The first block's input needs a gradient too (the embedding), so nothing of the backward pass is left out.
    expected = model.estimate_flops()
    if arch == ALL_PIECES:
        gates = [p.numel() for name, p in model.named_parameters() if "gate" in name or "smear.weight" in name]
        assert len(gates) == 4
        expected += 6 * sum(gates) + 3 * 12 * 32 * 24
    assert (forward.get_total_flops() + backward.get_total_flops()) == expected * tokens.numel()


def test_generate_is_the_argmax():
    """One token after the other, and beyond the trained length of 32."""
    model, ids = small_model(arch=ALL_PIECES), [3, 1, 4]
    for token in model.generate(ids, 40):
        assert token == model(torch.tensor([ids[-32:]]))[0, -1].argmax()
        ids = [*ids, token]
    assert len(ids) == 43
