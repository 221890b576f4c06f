"""The engine against the plain model, which reads everything again for each token, and samplers written out by hand."""
import dataclasses
import math
import random
import subprocess
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ALL_PIECES, REPO, warm_python
from test_tools import Shelf

import nanochat.inference.engine
import nanochat.inference.sampling
from nanochat.data.conversation import render, render_prompt
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.detokenizer import IncrementalDetokenizer, to_parts
from nanochat.inference.engine import Answer, Engine
from nanochat.inference.kv_cache import CachedModel, Row
from nanochat.inference.logprobs import token_logprobs
from nanochat.inference.sampling import Sampler, SamplingParams, draw
from nanochat.inference.tools import Tools
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig, architecture
from nanochat.model.loss import cap
from nanochat.runtime.errors import UserError
from nanochat.training.saving import save_weights

TOKENIZER = Tokenizer([b"th", b"the", b" the"])
V = TOKENIZER.get_vocab_size()  # 268: the weights are padded to 320
SPECIAL = TOKENIZER.encode_special


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0, tools=False)


GREEDY = greedy(30)


def draw_weights(model: GPT, sharpness: float = 0.5) -> GPT:
    """
    Every matrix random, so that no block is the identity, and logits so far apart that a greedy token is certain. No
    piece of a modern model is off or small.
    """
    generator, roles = torch.Generator().manual_seed(1), model.roles()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.data.uniform_(0.5, 1, generator=generator)
            continue
        std = {"head": sharpness, "embedding": 1, "value_embedding": 1}.get(roles[name], 1.5 * p.size(1) ** -0.5)
        p.data.normal_(0, std, generator=generator)
    return model


def random_model(
    n_kv_head: int = 4, dtype: torch.dtype = torch.float32, sharpness: float = 0.5, arch: str = "classic",
) -> GPT:
    """Three layers; with windows the first two see 24 tokens."""
    shape = dict(sequence_len=96, vocab_size=V, n_layer=3, n_embd=64, n_head=4, n_kv_head=n_kv_head)
    return draw_weights(GPT(GPTConfig(**shape, **architecture(arch))), sharpness).to(dtype)


def endless(model: GPT, *args, **settings) -> Engine:
    """An engine whose answers no token ends."""
    engine = Engine(model, TOKENIZER, *args, **settings)
    engine.stop.clear()
    return engine


both = pytest.mark.parametrize("arch", ["classic", ALL_PIECES])


def random_prompts(*lengths: int) -> list[list[int]]:
    """One token in twelve is the one that begins a document in models that keep documents apart."""
    rng = random.Random(0)
    return [[max(rng.randrange(-V // 12, V), 3) for _ in range(length)] for length in lengths]


def uncached(model: GPT, prompt: list[int], count: int) -> list[int]:
    return list(model.generate(prompt, count))


def plain_logits(model: GPT, tokens: list[int]) -> torch.Tensor:
    """(T, V) of a full pass, in which documents are apart if the model keeps them so."""
    row = torch.tensor([tokens])
    return model(row, cu_seqlens=model.cu_seqlens_of(row))[0]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def finish(engine: Engine, most_read: int = 512) -> list[Answer]:
    """The answers that are still there, in the order of their next tokens; and then all of their tokens."""
    advanced: dict[Answer, None] = {}
    while engine.busy:
        advanced |= dict.fromkeys(engine.step(most_read))
    return list(advanced)


def noted_reading(engine: Engine) -> list[list[int]]:
    """A list that gets for each pass how many tokens each row reads."""
    noted, read = [], engine.model.read

    def noting(tokens):
        noted.append([*map(len, tokens)])
        return read(tokens)

    engine.model.read = noting
    return noted


# ---- The same tokens as the plain model


@pytest.mark.parametrize("arch, n_kv_head, most_read", [
    ("classic", 4, 512), (ALL_PIECES, 2, 8), (ALL_PIECES, 1, 512),
])
def test_greedy_is_the_uncached_model_token_for_token(arch, n_kv_head, most_read):
    """
    Eleven prompts of mixed lengths take turns in four rows; one comes late, two go early: one that is running, one that
    still waits. Rows move into the places of those that end, some before they have read their whole prompt.
    """
    model = random_model(n_kv_head, arch=arch)
    prompts = random_prompts(1, 17, 3, 40, 5, 2, 66, 9, 31, 12, 20)
    counts = [30, 7, 22, 30, 1, 15, 30, 30, 4, 28, 30]
    expected = [uncached(model, prompt, count) for prompt, count in zip(prompts, counts)]
    assert len({token for tokens in expected for token in tokens}) > 30, "a model that repeats itself tests little"

    engine = endless(model, max_batch=4)
    answers = [engine.add(prompt, greedy(count))[0] for prompt, count in zip(prompts[:-1], counts)]
    for step in range(1000):
        if step == 5:
            engine.remove(answers[3])
            engine.remove(answers[8])
        if step == 9:
            answers += engine.add(prompts[-1], greedy(counts[-1]))
        for answer in engine.step(most_read):
            assert (answer.finish_reason == "length") == (len(answer.tokens) == counts[answers.index(answer)])
        if not engine.busy:
            break
    assert len(answers[3].tokens) < 6
    expected[3], expected[8] = expected[3][: len(answers[3].tokens)], []
    assert tokens_of(answers) == expected


@both
def test_bfloat16_is_as_exact_as_the_plain_model(arch):
    """
    Teacher-forced, from prompts read in one piece and two, and from a copied row: the error against the same weights in
    float32 is the plain bfloat16 model's, whose sums have other orders.
    """
    model, exact = random_model(2, torch.bfloat16, arch=arch), random_model(2, arch=arch)
    exact.load_state_dict(model.state_dict())
    rows, starts = [random_prompts(90)[0][:length] for length in (90, 71, 60)], [30, 11, 1]
    cached = CachedModel(model, 3, 90)
    cached.rows = [Row()]
    cached.read([rows[0][:16]])
    cached.rows += [Row(), Row()]
    cached.read([rows[0][16:30], rows[1][:11], rows[2][:1]])
    assert cached.kv.dtype == torch.bfloat16
    hidden, places = [], []
    for i in range(50):
        hidden.append(cached.read([[row[start + i]] for row, start in zip(rows, starts)]))
        places += [(row, start + i) for row, start in enumerate(starts)]
    cached.copy(0, 1, rows[0][:79])
    cached.remove(2)
    hidden.append(cached.read([rows[0][80:], rows[0][79:]]))
    places += [(0, place) for place in (*range(80, 90), *range(79, 90))]
    expected = [plain_logits(exact, row) for row in rows]
    plain = [plain_logits(model, row) for row in rows]
    logits = cap(cached.logits(torch.cat(hidden)), 15.0)
    error, plain_error = ((own - torch.stack([expected[row][at] for row, at in places])).norm()
                          for own in (logits, torch.stack([plain[row][at] for row, at in places])))
    assert error < 1.1 * plain_error


# ---- Prompts in pieces, and what was read before


def test_everyone_writes_on_while_prompts_are_read():
    """
    Two long prompts and then a short one: every step has a token for who is running; of prompts it reads 8 tokens, and
    at least one of each. The short one is the first that is answered.
    """
    model, (running, *others) = random_model(), random_prompts(3, 60, 61, 5)
    engine = endless(model)
    [writer] = engine.add(running, greedy(60))
    engine.step(8)
    reads = noted_reading(engine)
    answers = [engine.add(prompt, greedy(20))[0] for prompt in others]
    for _ in range(2):
        assert writer in engine.step(8)
    assert reads == [[1, 3, 1, 5], [1, 8, 1, 1]] and [len(answer.tokens) for answer in answers] == [0, 0, 2]
    finish(engine)
    assert tokens_of((writer, *answers)) == [
        uncached(model, prompt, count) for prompt, count in zip([running, *others], [60, 20, 20, 20])]


# ---- Draws


FORBIDDEN = 28                          # a probable one
ALLOWED = np.arange(60) % 4 != 1        # where an answer copies


def probabilities(logits: torch.Tensor, sampler: Sampler) -> dict[int, float]:
    """The definition, in float64: forbid, sort, cut by top_k and then by top_p, renormalise."""
    logits, sampling = logits.clone(), sampler.sampling
    if sampler.forbidden >= 0:
        logits[sampler.forbidden] = -math.inf
    if sampler.copying:
        logits[~ALLOWED] = -math.inf
    p = (logits / max(sampling.temperature, 1e-3)).softmax(0)
    order = p.argsort(descending=True)[: sampling.top_k or None].tolist()
    before = [p[order[:place]].sum() for place in range(len(order))]
    limit = sampling.top_p * p[order].sum()
    kept = [token for token, sum_before in zip(order, before) if (sum_before < limit or token == order[0]) and p[token]]
    return {token: (p[token] / p[kept].sum()).item() for token in kept}


def limited(sampling: SamplingParams, allowed) -> Sampler:
    """A sampler whose copied text allows these tokens only."""
    sampler = Sampler(sampling)
    mask = np.zeros(60, dtype=bool)
    mask[allowed] = True
    sampler.copying = SimpleNamespace(allowed=mask, allows=mask.__getitem__, add=lambda token: None)
    return sampler


@pytest.mark.parametrize("softcap", [15.0, None])
def test_draws_have_the_probabilities_of_the_definition(softcap):
    """
    Evenly spaced uniforms hit every token as often as its probability says, to one in a thousand draws. All kinds of
    rows in one batch: plain, with a forbidden token, and limited.
    """
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(0)) * 4
    kinds = [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p) for temperature, top_k, top_p in (
        (1, 0, 1), (2.5, 0, 1), (0.3, 5, 1), (1.5, 0, 0.8), (3, 40, 0.9), (1, 10**6, 1), (4, 0, 0), (0, 7, 1),
        (5, 12, 1))]
    samplers = [*map(Sampler, kinds), *(limited(one, ALLOWED) for one in kinds)]
    samplers += [Sampler(one, forbidden=FORBIDDEN) for one in kinds]
    N, counts = 1000, [Counter() for _ in samplers]
    for i in range(N):
        drawn = draw(logits.expand(len(samplers), -1), samplers, [(i + 0.5) / N] * len(samplers), softcap)
        for count, token in zip(counts, drawn):
            count[token] += 1
    capped = softcap * torch.tanh(logits[0].double() / softcap) if softcap else logits[0].double()
    for sampler, count in zip(samplers, counts):
        expected = probabilities(capped, sampler)
        assert set(count) <= set(expected), sampler.sampling
        for token, probability in expected.items():
            assert abs(count[token] - N * probability) <= 1.01, (sampler.sampling, token)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 1e300}])
def test_neither_the_cap_nor_a_uniform_of_0_draws_a_forbidden_token(settings):
    """The cap may make every allowed logit the lowest value there is; also beside a high one."""
    allowed = [7, 8, 50]
    logits = torch.full((2, 60), 1e4)
    logits[0, allowed] = torch.tensor([-1e4, -9e3, -9e3])
    sampling = SamplingParams(**settings)
    samplers = [limited(sampling, allowed), Sampler(sampling)]
    drawn = {draw(logits[:rows], samplers[:rows], [u] * rows, 15.0)[0]
             for u in (0.0, 0.3, 0.6, 1 - 2**-24) for rows in (1, 2)}
    assert drawn == {7} if sampling.temperature == 0 else drawn <= set(allowed) and len(drawn) > 1


def test_top_p_alone_draws_what_sorting_everything_draws(monkeypatch):
    """Sharp and flat rows, in which a few, some or all of 5,000 tokens have to be sorted; no two are equal."""
    logits = torch.randn(24, 5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 24)[:, None]
    samplers = [Sampler(SamplingParams(top_p=rng.choice((0.1, 0.5, 0.9, 0.999)))) for rng in [random.Random(0)] * 24]
    for u in (0.0, 0.3, 0.9, 1 - 2**-24):
        monkeypatch.setattr(nanochat.inference.sampling, "NUCLEUS", 5000)
        expected = draw(logits, samplers, [u] * 24, 15.0)
        monkeypatch.setattr(nanochat.inference.sampling, "NUCLEUS", 8)
        assert [draw(row[None], [one], [u], 15.0)[0] for row, one in zip(logits, samplers)] == expected


def test_samples_do_not_depend_on_the_company():
    """Alone, or in a changing crowd of other requests: the same seed draws the same tokens."""
    model, (prompt, *others) = random_model(sharpness=0.1, arch=ALL_PIECES), random_prompts(8, 5, 30, 2, 14)
    sampling = SamplingParams(40, temperature=1.2, top_k=50, top_p=0.95, seed=3, tools=False)
    alone = endless(model).generate([prompt], sampling)[0].tokens
    engine = endless(model, max_batch=3)
    for i, other in enumerate(others[:2]):
        engine.add(other, SamplingParams(9 + i, temperature=1.0, seed=i))
    engine.step()
    [answer] = engine.add(prompt, sampling)
    for other in others[2:]:
        engine.add(other, SamplingParams(25, temperature=0))
    finish(engine)
    assert answer.tokens == alone
    seeds = [dataclasses.replace(sampling, seed=seed) for seed in (4, None, None)]
    different = tokens_of(endless(model).generate([prompt] * 3, seeds))
    assert alone not in different and different[1] != different[2]


def test_samples_of_one_prompt_share_its_reading_and_nothing_else():
    """More samples than rows: one reads for all. First tokens differ; sample i is draw i of the seed in any order."""
    model, [prompt] = random_model(sharpness=0.05, arch=ALL_PIECES), random_prompts(8)
    sampling = SamplingParams(6, temperature=1.0, seed=0, tools=False)
    engine = endless(model, max_batch=3)
    reads, answers = noted_reading(engine), engine.generate([prompt], sampling, num_samples=8)
    assert reads[:2] == [[8, 1, 1], [1, 1, 1]] and max(map(max, reads[1:])) == 1
    assert len({answer.tokens[0] for answer in answers}) > 4 and len({tuple(answer.tokens) for answer in answers}) == 8
    again = engine.add(prompt, sampling, num_samples=4)
    engine.remove(again[1])
    finish(engine)
    assert tokens_of(again) == [answers[0].tokens, [], answers[2].tokens, answers[3].tokens]


# ---- Log-probabilities


@both
def test_logprobs_are_the_plain_models(arch):
    """Of sampled answers, whatever the sampling did, in company. Those who do not ask for them have none."""
    model, prompts = random_model(sharpness=0.1, arch=arch), random_prompts(20, 1, 7, 8, 95, 30)
    samplings = [SamplingParams(length, 2.0, 20, 0.9, 1, False, count)
                 for length, count in ((9, 3), (12, 1), (7, None), (1, 5), (1, 0), (20, None))]
    engine = endless(model, 3)
    answers = [answer for prompt, one in zip(prompts, samplings) for answer in engine.add(prompt, one, num_samples=2)]
    finish(engine, 7)
    assert [len(answer.tokens) for answer in answers[::2]] == [9, 12, 7, 1, 1, 20]
    for answer in answers:
        count = answer.sampling.logprobs
        assert answer.finish_reason == "length"
        assert [one.token for one in answer.logprobs] == answer.tokens * (count is not None)
        # To 1e-4: float32 sums differ by less.
        expected = plain_logits(model, answer.prompt + answer.tokens).double().log_softmax(-1)
        for row, one in zip(expected[len(answer.prompt) - 1 :], answer.logprobs):
            best = row.topk(count)
            values = [row[one.token].item(), *best.values.tolist()]
            assert [token for token, _ in one.top] == best.indices.tolist()
            assert [one.logprob, *(value for _, value in one.top)] == pytest.approx(values, abs=1e-4)
    alone = endless(model).generate(prompts[1:2], dataclasses.replace(samplings[1], logprobs=None))
    assert alone[0].tokens == answers[2].tokens, "the same draw with log-probabilities and without"


def test_of_equal_logits_the_greedy_one_is_told_as_the_most_probable():
    logits = torch.zeros(2, 50)
    logits[:, [11, 40]] = 3.0
    assert [one.top[0][0] for one in token_logprobs(logits, [40, 11], 1, 15.0)] == [11, 11]


# ---- Ends and bad input


@both
def test_a_prompt_longer_than_the_context_is_an_error_or_truncated(arch):
    """Truncated it leaves room for half of the context; the end of the context ends the answer."""
    model, [prompt] = random_model(arch=arch), random_prompts(300)
    engine = endless(model)
    with pytest.raises(UserError, match="300"):
        engine.generate([[1], prompt], GREEDY)
    assert not engine.busy, "what was added before the bad prompt does not stay"
    for most, read, written in ((30, 66, 30), (10**6, 48, 49)):
        answer = engine.generate([prompt], greedy(most), truncate=True)[0]
        assert answer.prompt == prompt[:1] + prompt[1 - read :] and answer.finish_reason == "length"
        assert answer.tokens == uncached(model, answer.prompt, written)


# ---- The tool


def scripted(monkeypatch, *tokens: int) -> None:
    """Draws of the first row follow the script, then are 5."""
    script = list(tokens)

    def drawn(logits, samplings, *others):
        return [script.pop(0) if script else 5] + [5] * (len(samplings) - 1)

    monkeypatch.setattr(nanochat.inference.engine, "draw", drawn)


@pytest.mark.parametrize("expression, result, arch", [
    ("12 * 3", "36", "classic"),
    ("search('sum')", "It is 3.", ALL_PIECES), ("lookup('?')", "nothing", "classic"), ("1 +", None, "classic"),
])
def test_results_are_forced_in_and_read_like_any_token(monkeypatch, expression, result, arch):
    """Forced tokens take the place of draws; what follows has the logits of the plain model on the whole sequence."""
    call = [SPECIAL("<|python_start|>"), *TOKENIZER.encode(expression), SPECIAL("<|python_end|>")]
    output = [SPECIAL("<|output_start|>"), *TOKENIZER.encode(result or ""), SPECIAL("<|output_end|>")]
    forced = output if result else []
    ignored = [9] * len(forced)  # drawn while the tool is writing
    scripted(monkeypatch, 65, *call, *ignored, 70)
    model, prompts = random_model(arch=arch), random_prompts(10, 3)
    engine = endless(model, max_batch=2, tools=Tools(Shelf()))
    logits, head = [], engine.model.logits
    engine.model.logits = lambda hidden: logits.append(head(hidden)) or logits[-1]
    answer, other = engine.generate(prompts, SamplingParams(1 + len(call) + len(forced) + 19))
    assert answer.tokens == [65, *call, *forced, 70] + [5] * 18
    assert answer.forced == [False] * (1 + len(call)) + [True] * len(forced) + [False] * 19
    assert other.tokens == [5] * len(other.tokens) and not any(other.forced)
    expected = plain_logits(model, prompts[0] + answer.tokens)
    got = cap(torch.stack([rows[0] for rows in logits]), 15.0)    # after the prompt and each token but the last
    torch.testing.assert_close(got, expected[9:-1], atol=2e-4, rtol=0)


def test_the_tool_keeps_quiet_where_it_should(monkeypatch):
    """Switched off; an end without a start, or twice; a result cut off by max_tokens; output made up by the model."""
    start, end = SPECIAL("<|python_start|>"), SPECIAL("<|python_end|>")
    one = TOKENIZER.encode("1+1")
    made_up = [SPECIAL("<|output_start|>"), *one, SPECIAL("<|output_end|>")]
    for script, settings, forced in (
        ([start, *one, end], {"tools": False}, 0), ([*one, end], {}, 0), ([end, start], {}, 0), (made_up, {}, 0),
        ([start, *one, end], {"max_tokens": 7}, 2), ([start, *one, start, *one, end], {}, 3),
        ([start, *one, end, 9, 9, 9, end], {}, 3),
    ):
        scripted(monkeypatch, *script)
        answer = Engine(random_model(), TOKENIZER).generate([[1]], SamplingParams(**{"max_tokens": 20} | settings))[0]
        assert sum(answer.forced) == forced, script
        assert answer.finish_reason == "length" and len(answer.tokens) == settings.get("max_tokens", 20)


# ---- Text


def test_a_character_is_never_split():
    """One token per byte is the worst case: text comes out character by character, whole, as decode says."""
    text = "the naïve 北京 😀👩‍👩‍👧 e\u0301 the end"
    detokenizer, seen = IncrementalDetokenizer(TOKENIZER), ""
    for token in list(text.encode()):
        for delta in detokenizer.add(token):
            assert delta.type == "text" and "\ufffd" not in delta.text
            seen += delta.text
            assert text.startswith(seen)
    assert seen == text and detokenizer.end() == []


def test_parts_are_what_was_rendered():
    """A conversation's answer, rendered to tokens and read back; a special token ends a character that is not whole."""
    parts = [{"type": type, "text": text} for type, text in (
        ("text", "Let me see: "), ("python", "2*3"), ("python_output", "6"),
        ("text", "So, 6. 北"), ("python", "'é'.count('é')"), ("python_output", "1"))]
    conversation = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": parts}]}
    answer = render(TOKENIZER, conversation).ids[len(render_prompt(TOKENIZER, conversation)):]
    assert answer[-1] == SPECIAL("<|assistant_end|>") and to_parts(TOKENIZER, answer) == parts
    broken = to_parts(TOKENIZER, [0xF0, 0x9F, SPECIAL("<|python_start|>"), 0x31])
    assert broken == [{"type": "text", "text": "\ufffd"}, {"type": "python", "text": "1"}]
    assert to_parts(TOKENIZER, []) == []


def test_a_stream_may_be_left():
    model, prompt = random_model(), random_prompts(9)[0]
    engine = endless(model)
    for _ in engine.stream(prompt, GREEDY):
        break
    assert not engine.busy
    assert engine.generate([prompt], GREEDY)[0].tokens == uncached(model, prompt, 30)


# ---- The terminal


def write_checkpoint(folder, model: GPT, tokenizer: Tokenizer = TOKENIZER, **meta) -> None:
    """What load_checkpoint reads, without training."""
    save_weights(folder, 1, model.state_dict(), tokenizer, model.config, meta)


def chat(*args: str, typed: str = "") -> subprocess.CompletedProcess:
    settings = "--device_type=cpu", "--dtype=float32", "--temperature=0", "--max_new_tokens=8"
    command = [warm_python(), "-m", "scripts.chat_cli", *settings, *args]
    return subprocess.run(command, cwd=REPO, input=typed, capture_output=True, text=True, timeout=300)


def greedy_answer(model: GPT, prompt: list[int], tools: bool = True) -> list[dict]:
    """The parts of what `chat` should say."""
    engine = Engine(model, TOKENIZER)
    [answer] = engine.generate([prompt], SamplingParams(8, temperature=0, tools=tools))
    return to_parts(TOKENIZER, answer.tokens)


def test_the_terminal(base_folder):
    """
    One prompt gives the answer and nothing else. In a talk old turns go when the context of 96 tokens is full, but not
    for a message that is refused, since it is longer than the context alone; commands are no messages.
    """
    model = random_model()
    write_checkpoint(base_folder / "sft_checkpoints" / "tiny", model)
    asked = [{"role": "user", "content": "the sum?"}]
    parts = greedy_answer(model, render_prompt(TOKENIZER, {"messages": asked}))
    expected = "".join(part["text"] for part in parts) + "\n"
    assert expected.strip() and all(part["type"] == "text" for part in parts)
    one = chat("-p", "the sum?", "--source=sft")
    assert (one.returncode, one.stdout, one.stderr) == (0, expected, "")

    typed = ["the sum?", "x" * 40, "y" * 20, "/clear", "the sum?", "z" * 200, "more?"]
    talk = chat(typed="\n".join([*typed, "/quit", "never read"]) + "\n")
    assert talk.returncode == 0 and talk.stderr == ""
    turns = talk.stdout.split("> ")[1:]
    assert turns[0] == turns[4] == expected, "/clear forgets"
    assert "forgotten" in turns[2] and "forgotten" not in turns[1]
    assert "only 96" in turns[5] and "forgotten" not in turns[5]
    messages = [*asked, {"role": "assistant", "content": parts}, {"role": "user", "content": "more?"}]
    again = greedy_answer(model, render_prompt(TOKENIZER, {"messages": messages}))
    assert turns[6] == "".join(part["text"] for part in again) + "\n", "the refused message cost no turns"
    assert len(turns) == 8


def test_a_base_model_continues_a_text(base_folder):
    """In the terminal, where no stage came later: after <|bos|> come the words themselves, no turn of a chat."""
    model = random_model()
    write_checkpoint(base_folder / "base_checkpoints" / "tiny", model)
    parts = greedy_answer(model, [SPECIAL("<|bos|>"), *TOKENIZER.encode("the sum is")], tools=False)
    assert all(part["type"] == "text" for part in parts)
    one = chat("-p", "the sum is")
    assert (one.returncode, one.stdout) == (0, "".join(part["text"] for part in parts) + "\n")
