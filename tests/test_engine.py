"""The engine against the plain model, which reads everything again for each token, and samplers written out by hand."""
import hashlib
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

import nanochat.engine
import nanochat.kv_cache
from configurator import Setting, read_arguments
from nanochat.conversation import render, render_prompt
from nanochat.engine import Engine
from nanochat.errors import UserError
from nanochat.gpt import GPT, GPTConfig
from nanochat.kv_cache import CachedModel
from nanochat.loss import cap
from nanochat.detokenizer import IncrementalDetokenizer, to_parts
from nanochat.sampling import SamplingParams, draw
from nanochat.tokenizer import Tokenizer
from conftest import REPO

TOKENIZER = Tokenizer([b"th", b"the", b" the"])
V = TOKENIZER.get_vocab_size()  # 268: the weights are padded to 320
SPECIAL = TOKENIZER.encode_special
GREEDY = SamplingParams(max_tokens=30, temperature=0, stop=(), tools=False)


def random_model(n_kv_head: int = 4, dtype: torch.dtype = torch.float32, sharpness: float = 0.5) -> GPT:
    """Every matrix random, so that no block is the identity, and logits so far apart that a greedy token is no coin toss."""
    model = GPT(GPTConfig(sequence_len=96, vocab_size=V, n_layer=3, n_embd=64, n_head=4, n_kv_head=n_kv_head))
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        p.data.normal_(0, sharpness if "lm_head" in name else 1 if "wte" in name else 1.5 * p.size(1) ** -0.5, generator=generator)
    return model.to(dtype)


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(V) for _ in range(length)] for length in lengths]


def uncached(model: GPT, prompt: list[int], count: int) -> list[int]:
    return list(model.generate(prompt, count, temperature=0))


def finish(engine: Engine) -> dict[int, list[int]]:
    """The tokens of every request that is still there."""
    tokens: dict[int, list[int]] = {}
    while engine.busy:
        for event in engine.step():
            tokens.setdefault(event.id, []).append(event.token)
    return tokens


# ---- The same tokens as the plain model


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("unit", [4, 64])
def test_greedy_is_the_uncached_model_token_for_token(monkeypatch, n_kv_head, unit):
    """
    Eleven prompts of mixed lengths take turns in four rows; one comes late, two go early: one that is running, one that
    still waits. Rows move into the places of those that end, and with a unit of 4 the cache grows many times.
    """
    monkeypatch.setattr(nanochat.kv_cache, "CAPACITY_UNIT", unit)
    model = random_model(n_kv_head)
    prompts = random_prompts(1, 17, 3, 40, 5, 2, 66, 9, 31, 12, 20)
    counts = [30, 7, 22, 30, 1, 15, 30, 30, 4, 28, 30]
    expected = [uncached(model, prompt, count) for prompt, count in zip(prompts, counts)]
    assert len({token for tokens in expected for token in tokens}) > 50, "a model that repeats itself tests little"

    engine = Engine(model, TOKENIZER, max_batch=4)
    requests = [SamplingParams(count, temperature=0, stop=(), tools=False) for count in counts]
    ids = [engine.add(prompt, request)[0] for prompt, request in zip(prompts[:-1], requests)]
    got: dict[int, list[int]] = {}
    for step in range(1000):
        if step == 5:
            engine.remove(ids[3])
            engine.remove(ids[8])
        if step == 9:
            ids += engine.add(prompts[-1], requests[-1])
        for event in engine.step():
            got.setdefault(event.id, []).append(event.token)
            assert (event.finish_reason == "length") == (len(got[event.id]) == counts[ids.index(event.id)])
        if not engine.busy:
            break
    assert got[ids[3]] == expected[3][:5] and ids[8] not in got
    for i in set(range(11)) - {3, 8}:
        assert got[ids[i]] == expected[i], f"prompt {i}"


def test_saturated_logits_are_equal_as_in_the_plain_model():
    """Head weights so large that the softcap makes several logits 15 exactly: then the first of them is the greedy token."""
    model, prompt = random_model(sharpness=40.0), random_prompts(10)[0]
    logits = model(torch.tensor([prompt]))[0]
    assert (logits == logits.amax(-1, keepdim=True)).sum(-1).max() > 1
    assert Engine(model, TOKENIZER).generate([prompt], GREEDY)[0].tokens == uncached(model, prompt, 30)


def test_bfloat16_stays_close_to_the_plain_model():
    """
    Teacher-forced: what the engine would choose has, in the plain model, a logit within 2^-6 (relative) of the largest.
    The plain model in the same dtype; the cache is in that dtype too.
    """
    model = random_model(2, torch.bfloat16)
    cached, rows = CachedModel(model, max_rows=3), [random_prompts(90)[0][:length] for length in (90, 71, 60)]
    starts = [30, 11, 0 + 1]
    for row, start in zip(rows, starts):
        cached.insert(cached.prefill(row[:start]))
    assert cached.kv.dtype == torch.bfloat16
    reference = [model(torch.tensor([row]))[0] for row in rows]  # (T, V) each
    different = 0
    for i in range(59):
        chosen = cap(cached.decode([row[start + i] for row, start in zip(rows, starts)]), V, 15.0).argmax(-1).tolist()
        for token, start, logits in zip(chosen, starts, reference):
            here = logits[start + i]
            assert here[token] >= here.max() - 2**-6 * here.max().abs()
            different += not torch.equal(here.argmax(), torch.tensor(token))
    assert different < 12, "near ties may fall either way, but most tokens are the same"


def test_the_cache_grows_rarely_shrinks_and_is_dropped(monkeypatch):
    """90 positions in units of 4: a growth in every step would be 80 of them."""
    growths = []
    plain = nanochat.kv_cache.resized
    monkeypatch.setattr(nanochat.kv_cache, "CAPACITY_UNIT", 4)
    monkeypatch.setattr(nanochat.kv_cache, "resized", lambda kv, rows, capacity: growths.append(capacity) or plain(kv, rows, capacity))
    engine = Engine(random_model(), TOKENIZER)
    engine.add([1], SamplingParams(1000, temperature=0, stop=(), tools=False))
    assert len(finish(engine)[0]) == 96, "the last token is written with the whole context read"
    assert len(growths) < 16 and max(growths) == 96 == growths[-1], growths
    assert engine.model.kv.numel() == 0 and engine.model.lengths == []

    long, short = random_prompts(80, 3)
    engine.add(long, SamplingParams(2, temperature=0, stop=(), tools=False))
    [id] = engine.add(short, GREEDY)
    engine.step()
    assert engine.model.kv.size(4) >= 80
    tokens = [event.token for event in engine.step() if event.id == id]
    assert engine.model.kv.size(4) <= 8, "when the long one has left, nobody computes with its positions any more"
    assert uncached(random_model(), short, 30)[1:] == tokens + finish(engine)[id]


# ---- Draws


@pytest.mark.parametrize("softcap", [15.0, None])
def test_draws_have_the_probabilities_of_the_definition(softcap):
    """
    Evenly spaced uniforms hit every token as often as its probability says, to one in a thousand draws. All kinds of
    rows in one batch; the definition sorts, cuts and renormalises one row at a time, in float64.
    """
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(0)) * 12
    kinds = [
        SamplingParams(temperature=1.0), SamplingParams(temperature=2.5, top_k=0), SamplingParams(temperature=0.7, top_k=5), SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=3.0, top_k=40, top_p=0.9), SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1.0, top_k=10**6),
        SamplingParams(temperature=4.0, top_p=0.0), SamplingParams(temperature=0.0, top_k=7), SamplingParams(temperature=5.0, top_k=12),
    ]
    N, counts = 1000, [Counter() for _ in kinds]
    for i in range(N):
        for count, token in zip(counts, draw(logits.expand(len(kinds), -1), kinds, [(i + 0.5) / N] * len(kinds), softcap)):
            count[token] += 1
    capped = (softcap * torch.tanh(logits[0].double() / softcap) if softcap else logits[0].double()).tolist()
    for sampling, count in zip(kinds, counts):
        order = sorted(range(60), key=lambda token: -capped[token])
        weights = {token: math.exp((capped[token] - capped[order[0]]) / max(sampling.temperature, 1e-3)) for token in order}
        order = order[: sampling.top_k or None]
        total, kept, sum_so_far = sum(weights[token] for token in order), [], 0.0
        for token in order:
            if not kept or sum_so_far < sampling.top_p * total:
                kept.append(token)
            sum_so_far += weights[token]
        total = sum(weights[token] for token in kept)
        expected = {token: N * weights[token] / total for token in kept}
        assert set(count) <= set(expected), sampling
        for token, number in expected.items():
            assert abs(count[token] - number) <= 1.01, (sampling, token)


@pytest.mark.parametrize("softcap", [15.0, None])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.1), SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=1.0, top_p=0.5)])
def test_extreme_uniforms_never_draw_what_is_excluded(sampling, softcap):
    """Excluded by top-k, by top-p, or because exp(−200) is zero: not even a uniform of 0 finds the tokens before the first."""
    logits = torch.full((1, 50), -1e4)
    logits[0, [7, 30, 31]] = torch.tensor([5.0, 5.0, 4.0])
    allowed = {7, 30} if sampling.top_p < 1 else {7, 30, 31}
    drawn = {draw(logits, [sampling], [u], softcap)[0] for u in (0.0, 2**-24, 0.5, 1 - 2**-24)}
    assert drawn <= allowed and len(drawn) > 1


def test_samples_do_not_depend_on_the_company():
    """Alone, or in a changing crowd of other requests: the same seed draws the same tokens."""
    model, (prompt, *others) = random_model(sharpness=0.1), random_prompts(8, 5, 30, 2, 14)
    sampling = SamplingParams(40, temperature=1.2, top_k=50, top_p=0.95, seed=3, stop=(), tools=False)
    alone = Engine(model, TOKENIZER).generate([prompt], sampling)[0].tokens
    engine = Engine(model, TOKENIZER, max_batch=3)
    for i, other in enumerate(others[:2]):
        engine.add(other, SamplingParams(9 + i, temperature=1.0, seed=i, stop=()))
    engine.step()
    [id] = engine.add(prompt, sampling)
    for other in others[2:]:
        engine.add(other, SamplingParams(25, temperature=0, stop=()))
    assert finish(engine)[id] == alone
    assert Engine(model, TOKENIZER).generate([prompt], SamplingParams(**vars(sampling) | {"seed": 4}))[0].tokens != alone
    unseeded = SamplingParams(**vars(sampling) | {"seed": None})
    first, second = (Engine(model, TOKENIZER).generate([prompt], unseeded)[0] for _ in range(2))
    assert first.tokens != second.tokens


def test_samples_of_one_prompt_share_its_reading_and_nothing_else(monkeypatch):
    """More samples than rows: one prefill for all; first tokens differ; sample i is draw i of the seed, in any order."""
    reads = []
    prefill = CachedModel.prefill
    monkeypatch.setattr(CachedModel, "prefill", lambda self, prompt: reads.append(prompt) or prefill(self, prompt))
    model, prompts = random_model(sharpness=0.05), random_prompts(8, 12)
    sampling = SamplingParams(6, temperature=1.0, seed=0, stop=(), tools=False)
    answers = Engine(model, TOKENIZER, max_batch=3).generate(prompts, sampling, num_samples=8)
    assert reads == prompts and len(answers) == 16
    assert all(answer.prompt == prompts[i // 8] for i, answer in enumerate(answers))
    for group in (answers[:8], answers[8:]):
        assert len({answer.tokens[0] for answer in group}) > 4 and len({tuple(answer.tokens) for answer in group}) == 8
    engine = Engine(model, TOKENIZER)
    [id] = engine.add(prompts[1], sampling, first_draw=8 + 5)
    assert finish(engine)[id] == answers[8 + 5].tokens
    ids = engine.add(prompts[1], sampling, num_samples=4, first_draw=8)
    engine.remove(ids[1])
    tokens = finish(engine)
    assert [tokens.get(id) for id in ids] == [answers[8].tokens, None, answers[10].tokens, answers[11].tokens]
    own = Engine(model, TOKENIZER).generate(prompts, [sampling, sampling], num_samples=2)
    assert own[0].tokens == answers[0].tokens and own[2].tokens != answers[8].tokens, "with a list every prompt begins at draw 0"


def test_settings_that_mean_the_same():
    model, prompts = random_model(sharpness=0.1), random_prompts(6, 11)
    engine = Engine(model, TOKENIZER)

    def tokens(**settings):
        return [a.tokens for a in engine.generate(prompts, SamplingParams(**dict(max_tokens=20, seed=0, stop=(), tools=False) | settings))]

    assert tokens(top_k=0) == tokens(top_k=None) == tokens(top_k=V) == tokens(top_k=10**9)
    assert tokens(temperature=0) == tokens(top_k=1) == tokens(top_p=0.0) == tokens(temperature=1e-30) == tokens(temperature=1e-4)
    assert tokens(temperature=0) == [uncached(model, prompt, 20) for prompt in prompts]


# ---- Ends and bad input


def test_stop_tokens_end_a_request_and_are_its_last_token():
    model, prompt = random_model(), random_prompts(10)[0]
    tokens = uncached(model, prompt, 30)
    stop = tokens[12]
    answer = Engine(model, TOKENIZER).generate([prompt], SamplingParams(30, temperature=0, stop=(V - 1, stop), tools=False))[0]
    assert answer.tokens == tokens[: tokens.index(stop) + 1] and answer.finish_reason == "stop"
    for name in ("<|assistant_end|>", "<|bos|>"):
        with_stop = random_model()
        with_stop.lm_head.weight.data[SPECIAL(name)] = 0
        with_stop.lm_head.weight.data[SPECIAL(name)] = 100 * with_stop.hidden(torch.tensor([prompt]))[0, -1].detach()
        answer = Engine(with_stop, TOKENIZER).generate([prompt], SamplingParams(temperature=0))[0]
        assert answer.tokens == [SPECIAL(name)] and answer.finish_reason == "stop"


@pytest.mark.parametrize("length", [95, 96])
def test_the_context_ends_an_answer(length):
    model, prompt = random_model(), random_prompts(length)[0]
    answer = Engine(model, TOKENIZER).generate([prompt], GREEDY)[0]
    assert answer.finish_reason == "length" and len(prompt) + len(answer.tokens) == 97
    assert answer.tokens == uncached(model, prompt, 97 - length)


def test_a_prompt_longer_than_the_context_is_an_error_or_truncated():
    model, [prompt] = random_model(), random_prompts(300)
    engine = Engine(model, TOKENIZER)
    with pytest.raises(UserError, match="300 tokens.*only 96"):
        engine.generate([[1], prompt], GREEDY)
    assert not engine.busy, "what was added before the bad prompt does not stay"
    answer = engine.generate([prompt], GREEDY, truncate=True)[0]
    assert answer.prompt == prompt[:1] + prompt[-65:] and len(answer.tokens) == 30
    assert answer.tokens == uncached(model, answer.prompt, 30)
    answer = engine.generate([prompt], SamplingParams(10**6, temperature=0, stop=()), truncate=True)[0]
    assert len(answer.prompt) == 48 and answer.finish_reason == "length"
    assert engine.generate([prompt[:96]], GREEDY, truncate=True)[0].prompt == prompt[:96], "what fits is left alone"


@pytest.mark.parametrize("prompt,settings,message", [
    ([], {}, "empty"), ([5, V], {}, f"5 to {V};.*0 to {V - 1}"), ([-1], {}, "-1"), ([1], {"max_tokens": 0}, "max_tokens=0"),
    ([1], {"temperature": -0.1}, "temperature=-0.1"), ([1], {"temperature": math.nan}, "nan"), ([1], {"temperature": math.inf}, "inf"),
    ([1], {"top_k": -1}, "top_k=-1"), ([1], {"top_p": 1.1}, "top_p=1.1"), ([1], {"top_p": math.nan}, "nan"),
])
def test_bad_requests_are_refused_when_they_come(prompt, settings, message):
    engine = Engine(random_model(), TOKENIZER)
    with pytest.raises(UserError, match=message):
        engine.add(prompt, SamplingParams(**settings))
    assert not engine.busy and engine.step() == []


def test_removing_what_is_not_there_and_what_waits():
    model, prompts = random_model(), random_prompts(4, 6)
    engine = Engine(model, TOKENIZER, max_batch=2)
    first, second, third = engine.add(prompts[0], GREEDY, num_samples=3)
    [last] = engine.add(prompts[1], GREEDY)
    engine.step()
    for id in (third, 999, first, first):
        engine.remove(id)
    tokens = finish(engine)
    assert set(tokens) == {second, last} and tokens[last] == uncached(model, prompts[1], 30)
    engine.remove(last)
    assert tokens[second] == uncached(model, prompts[0], 30)[1:]


@pytest.mark.parametrize("rows, order", [(1, "aabaaa"), (2, "aaabaa")])
def test_owners_take_turns(rows, order):
    """The owner with fewer rows is next, in turn where they have equally many: b does not wait for all of a's prompts."""
    engine = Engine(random_model(), TOKENIZER, max_batch=rows)
    owners = {engine.add(prompt, SamplingParams(3, stop=()), owner="a")[0]: "a" for prompt in random_prompts(4, 6, 5, 3, 8)}
    engine.step()
    owners[engine.add(random_prompts(7)[0], SamplingParams(3, stop=()), owner="b")[0]] = "b"
    assert "".join(owners[id] for id in [*dict.fromkeys([*range(rows), *finish(engine)])]) == order


def test_a_prompt_that_cannot_be_read_costs_nobody_else_anything(monkeypatch):
    """With it in mid-crowd: its samples are gone, all others get the tokens of the plain model. A single caller sees why."""
    model, prompts = random_model(), random_prompts(4, 6, 9)
    engine = Engine(model, TOKENIZER, max_batch=4)
    prefill = engine.model.prefill

    def fragile(prompt):
        if prompt == prompts[1]:
            raise MemoryError("no room")
        return prefill(prompt)

    monkeypatch.setattr(engine.model, "prefill", fragile)
    [first] = engine.add(prompts[0], GREEDY)
    events = engine.step()
    bad, [last] = engine.add(prompts[1], GREEDY, num_samples=2), engine.add(prompts[2], GREEDY)
    events += engine.step()
    assert [(event.id, str(event.error)) for event in events if event.error] == [(id, "no room") for id in bad]
    got = finish(engine)
    assert set(got) == {first, last}
    for id, prompt in ((first, prompts[0]), (last, prompts[2])):
        assert [event.token for event in events if event.id == id] + got[id] == uncached(model, prompt, 30)
    with pytest.raises(MemoryError, match="no room"):
        engine.generate(prompts, GREEDY)
    assert not engine.busy and engine.model.lengths == []


# ---- The tool


def scripted(monkeypatch, *tokens: int) -> None:
    """Draws of the first row follow the script, then are 5."""
    script = list(tokens)

    def drawn(logits, samplings, uniforms, softcap):
        return [script.pop(0) if script else 5] + [5] * (len(samplings) - 1)

    monkeypatch.setattr(nanochat.engine, "draw", drawn)


@pytest.mark.parametrize("expression,result", [("12 * 3", "36"), ("'the three'.count('e')", "3"), ("1 +", None), ("9 ** 9", None), ("the", None)])
def test_results_are_forced_in_and_read_like_any_token(monkeypatch, expression, result):
    """The forced tokens take the place of draws; what follows has the logits of the plain model on the whole sequence."""
    call = [SPECIAL("<|python_start|>"), *TOKENIZER.encode(expression), SPECIAL("<|python_end|>")]
    forced = [] if result is None else [SPECIAL("<|output_start|>"), *TOKENIZER.encode(result), SPECIAL("<|output_end|>")]
    ignored = [9] * len(forced)  # drawn while the tool is writing
    scripted(monkeypatch, 65, *call, *ignored, 70)
    model, prompts = random_model(), random_prompts(10, 3)
    engine = Engine(model, TOKENIZER, max_batch=2)
    logits, decode = [], engine.model.decode
    engine.model.decode = lambda tokens: logits.append(decode(tokens)) or logits[-1]
    stop = SPECIAL("<|output_end|>"),  # ends what the model writes, not what the tool does
    answer, other = engine.generate(prompts, SamplingParams(1 + len(call) + len(forced) + 5, stop=stop))
    assert answer.tokens == [65, *call, *forced] + ([70] if forced else [70]) + [5] * 4
    assert answer.forced == [False] * (1 + len(call)) + [True] * len(forced) + [False] * 5
    assert other.tokens == [5] * len(other.tokens) and not any(other.forced)
    expected = model(torch.tensor([prompts[0] + answer.tokens]))[0]  # (T, V)
    got = cap(torch.stack([rows[0] for rows in logits]), V, 15.0)    # after each token of the answer but the last
    torch.testing.assert_close(got, expected[10:-1], atol=2e-4, rtol=0)


def test_the_tool_keeps_quiet_where_it_should(monkeypatch):
    """Switched off; an end without a start, or twice; a result cut off by max_tokens; output that the model itself makes up."""
    start, end = SPECIAL("<|python_start|>"), SPECIAL("<|python_end|>")
    one = TOKENIZER.encode("1+1")
    made_up = [SPECIAL("<|output_start|>"), *one, SPECIAL("<|output_end|>")]
    for script, settings, forced in (
        ([start, *one, end], {"tools": False}, 0), ([*one, end], {}, 0), ([end, start], {}, 0), ([start, *one, end], {"max_tokens": 7}, 2),
        ([start, *one, start, *one, end], {}, 3), ([start, *one, end, 9, 9, 9, end], {}, 3), (made_up, {}, 0),
    ):
        scripted(monkeypatch, *script)
        answer = Engine(random_model(), TOKENIZER).generate([[1]], SamplingParams(**{"max_tokens": 20} | settings))[0]
        assert sum(answer.forced) == forced, script
        assert answer.finish_reason == "length" and len(answer.tokens) == settings.get("max_tokens", 20)


# ---- Text


def test_a_character_is_never_split():
    """One token per byte is the worst case: text comes out character by character, whole, and says exactly what decode says."""
    text = "the naïve 北京 😀👩‍👩‍👧 e\u0301 the end"
    pieces, seen = IncrementalDetokenizer(TOKENIZER), ""
    for token in list(text.encode()):
        for piece in pieces.add(token):
            assert piece.type == "text" and "\ufffd" not in piece.text
            seen += piece.text
            assert text.startswith(seen)
    assert seen == text and pieces.end() == []


def test_any_bytes_become_the_text_of_decode():
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.choice([rng.randrange(256), rng.randrange(0x80, 0x100), 0xF0, 0xE2, 257]) for _ in range(rng.randrange(12))]
        pieces = IncrementalDetokenizer(TOKENIZER)
        text = "".join(piece.text for token in tokens for piece in pieces.add(token)) + "".join(piece.text for piece in pieces.end())
        assert text == TOKENIZER.decode(tokens)


def test_parts_are_what_was_rendered():
    """A conversation's answer, rendered to tokens and read back; a special token ends a character that is not whole."""
    parts = [
        {"type": "text", "text": "Let me see: "}, {"type": "python", "text": "2*3"}, {"type": "python_output", "text": "6"},
        {"type": "text", "text": "So, 6. 北"}, {"type": "python", "text": "'é'.count('é')"}, {"type": "python_output", "text": "1"},
    ]
    conversation = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": parts}]}
    answer = render(TOKENIZER, conversation).ids[len(render_prompt(TOKENIZER, conversation)):]
    assert answer[-1] == SPECIAL("<|assistant_end|>") and to_parts(TOKENIZER, answer) == parts
    broken = to_parts(TOKENIZER, [0xF0, 0x9F, SPECIAL("<|python_start|>"), 0x31])
    assert broken == [{"type": "text", "text": "\ufffd"}, {"type": "python", "text": "1"}]
    assert to_parts(TOKENIZER, []) == []


def test_streaming_is_generating_and_may_be_left(monkeypatch):
    model, prompt = random_model(), random_prompts(9)[0]
    engine = Engine(model, TOKENIZER)
    text = "".join(piece.text for piece in engine.stream(prompt, GREEDY))
    assert text == "".join(part["text"] for part in to_parts(TOKENIZER, uncached(model, prompt, 30)))
    for _ in engine.stream(prompt, GREEDY):
        break
    assert not engine.busy
    assert engine.generate([prompt], GREEDY)[0].tokens == uncached(model, prompt, 30)


# ---- The terminal


def test_a_setting_of_one_letter_may_be_written_with_one_dash():
    settings = {name: Setting(name, default, (str,), "", "") for name, default in {"p": "", "q": "x"}.items()}
    assert read_arguments(["-p", "--q=1 = 2", "-q", ""], settings) == {"p": "--q=1 = 2", "q": ""}
    for wrong, message in ((["-p"], "--p needs a value"), (["-p", "a", "--p=b"], "twice"), (["-x", "a"], "stray argument '-x'")):
        with pytest.raises(UserError, match=message):
            read_arguments(wrong, settings)


def write_checkpoint(folder, model: GPT) -> None:
    """What load_model reads, without training."""
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    meta = {"step": 1, "tokenizer": TOKENIZER.fingerprint, "model_config": vars(model.config)}
    (folder / "meta.json").write_text(json.dumps(meta))
    TOKENIZER.save(folder)
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps(sums))


def chat(*args: str, typed: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "scripts.chat_cli", "--device_type=cpu", "--dtype=float32", "--temperature=0", "--max_new_tokens=8", *args]
    return subprocess.run(command, cwd=REPO, input=typed, capture_output=True, text=True, timeout=300)


def greedy_answer(model: GPT, prompt: list[int], tools: bool = True) -> list[dict]:
    """The parts of what `chat` should say."""
    [answer] = Engine(model, TOKENIZER).generate([prompt], SamplingParams(8, temperature=0, tools=tools))
    return to_parts(TOKENIZER, answer.tokens)


def test_the_terminal(base_folder):
    """
    One prompt gives the answer and nothing else. In a talk old turns go when the context of 96 tokens is full, but not
    for a message that is refused, since it is longer than the context alone; commands are no messages.
    """
    model = random_model()
    write_checkpoint(base_folder / "sft_checkpoints" / "tiny" / "step_000001", model)
    asked = [{"role": "user", "content": "the sum?"}]
    parts = greedy_answer(model, render_prompt(TOKENIZER, {"messages": asked}))
    expected = "".join(part["text"] for part in parts) + "\n"
    assert expected.strip() and all(part["type"] == "text" for part in parts)
    one = chat("-p", "the sum?", "--source=sft")
    assert (one.returncode, one.stdout, one.stderr) == (0, expected, "")

    typed = ["the sum?", "x" * 40, "y" * 20, "/new", "the sum?", "z" * 200, "more?", "/clear", "", "/help", "the sum?"]
    talk = chat(typed="\n".join([*typed, "/quit", "never read"]) + "\n")
    assert talk.returncode == 0 and talk.stderr == "" and talk.stdout.startswith("sft model of step 1;")
    turns = talk.stdout.split("> ")[1:]
    assert turns[0] == turns[4] == expected, "/new forgets"
    assert "(1 of the oldest turns forgotten: the context has 96 tokens)" in turns[2] and "forgotten" not in turns[1]
    assert "only 96" in turns[5] and "forgotten" not in turns[5]
    messages = [*asked, {"role": "assistant", "content": parts}, {"role": "user", "content": "more?"}]
    again = greedy_answer(model, render_prompt(TOKENIZER, {"messages": messages}))
    assert all(part["type"] == "text" for part in again)
    assert turns[6] == "".join(part["text"] for part in again) + "\n", "the refused message cost no turns"
    assert turns[10] == expected and len(turns) == 12, "/clear forgets as well"
    assert all(command in turns[9] for command in ("/clear", "/quit", "/help", "Ctrl-C"))


def test_a_base_model_continues_a_text(base_folder):
    """In the terminal, where it is the furthest stage: after <|bos|> come the words themselves, no turn of a chat."""
    model = random_model()
    write_checkpoint(base_folder / "base_checkpoints" / "tiny" / "step_000001", model)
    parts = greedy_answer(model, [SPECIAL("<|bos|>"), *TOKENIZER.encode("the sum is")], tools=False)
    assert all(part["type"] == "text" for part in parts)
    one = chat("-p", "the sum is")
    assert (one.returncode, one.stdout) == (0, "".join(part["text"] for part in parts) + "\n")
    assert re.match("base model of step 1 .*continues a text", one.stderr)
