"""What an answer looks up and quotes is copied to the letter, whatever the model's weights are."""
import re

import pytest
import torch
from test_engine import draw_weights

from nanochat.data.conversation import render_prompt
from nanochat.data.sentences import sentence_ends
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.copying import Copying, Vocabulary, telling_edges, word_edges
from nanochat.inference.detokenizer import answer_text, to_parts
from nanochat.inference.engine import Engine
from nanochat.inference.sampling import SamplingParams
from nanochat.inference.tools import NOTHING, REFUSAL, REFUSALS, TOOL_CALL, Plan, Tools
from nanochat.library.make_library import make_library
from nanochat.library.retrieval import Library, Passage
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig, architecture

MERGES = [b"th", b"the", b" the", b're', b'")', b'?")', b" 2.", b'("', b"\xc3\xb6\xc3", b'"r']
TOKENIZER = Tokenizer(MERGES)
SPECIAL = TOKENIZER.encode_special
RAW = TOKENIZER.raw_tokens
END = SPECIAL("<|assistant_end|>")
PASSAGE = 'Die Größe: 2.5 bar, see "Dr. Who" on the 14. März. Then rest!'
QUESTIONS = ("What is the rear tyre's größe?", "the? ", "Wo ist the re-the-re?", "轮胎的 pressure? Für (x)")


def random_model() -> GPT:
    shape = dict(sequence_len=512, vocab_size=TOKENIZER.get_vocab_size(), n_layer=2, n_embd=64, n_head=4, n_kv_head=4)
    return draw_weights(GPT(GPTConfig(**shape, **architecture("classic"))))


class Shelf:
    """A library that has something about every second text."""
    is_own = False

    def lookup(self, text: str) -> Passage | None:
        return Passage(text, PASSAGE, "shelf.md:1") if len(text) % 2 else None

    search = lookup


def engine_that_calls(model, **settings) -> Engine:
    """An engine whose answers begin with a call: the model's own logits come after `lookup(`, and in its refusals."""
    engine = Engine(model, TOKENIZER, tools=Tools(Shelf()), **settings)
    engine.stop = {END}
    extend = engine._extend

    def steered(answers, logits):
        for row, answer in enumerate(answers):
            logits[row, SPECIAL("<|python_start|>")] = -1e4     # no second call
            wanted = steered_token(answer.tokens)
            if wanted is not None and not answer.queued:
                logits[row] = -1e4
                logits[row, wanted] = 1e4
        extend(answers, logits)

    engine._extend = steered
    return engine


def steered_token(tokens: list[int]) -> int | None:
    """The next token of the answer's beginning, and of the beginning of a refusal."""
    head = [SPECIAL("<|python_start|>"), *TOKENIZER.encode("lookup(")]
    if len(tokens) < len(head):
        return head[len(tokens)]
    if SPECIAL("<|output_end|>") in tokens and tokens[: len(head)] == head:
        at = tokens.index(SPECIAL("<|output_end|>"))
        if TOKENIZER.decode(tokens[:at]).endswith(NOTHING):
            refusal, said = TOKENIZER.encode(REFUSAL.partition("{}")[0]), tokens[at + 1 :]
            if said == refusal[: len(said)] and len(said) < len(refusal):
                return refusal[len(said)]
    return None


def plain_answer(model, question: str, prompt: list[int], count: int) -> list[int]:
    """A full pass for each token, and of each token of the vocabulary whether it begins one of all possible texts."""
    source = question.rstrip().encode()
    starts, ends = word_edges(question.rstrip())
    calls = {b'lookup("' + source[s:e] + b'")' for s in starts for e in ends if s < e}
    tokens: list[int] = []
    texts, after = calls, SPECIAL("<|python_end|>")
    written = b""
    while len(tokens) < count:
        logits = model(torch.tensor([prompt + tokens]))[0, -1].detach().clone()
        wanted = steered_token(tokens)
        if wanted is not None:
            token = wanted
        else:
            for token in range(len(logits)):
                text = written + RAW[token] if token < len(RAW) else None
                if not (written in texts and token == after or text and any(one.startswith(text) for one in texts)):
                    logits[token] = -torch.inf
            token = int(logits.argmax())
        tokens.append(token)
        if token == END:
            break
        if token < len(RAW):
            written += RAW[token]
        else:
            if token == after:
                result = Tools(Shelf()).result(written.decode(), TOKENIZER, 0, 170)
                tokens += [SPECIAL("<|output_start|>"), *TOKENIZER.encode(result), SPECIAL("<|output_end|>")]
                if result == NOTHING and len(question) % 2:     # the shelf has something about the question
                    result = PASSAGE
                    tokens += [SPECIAL("<|python_start|>"), *TOKENIZER.encode(f'search("{question}")'), after]
                    tokens += [SPECIAL("<|output_start|>"), *TOKENIZER.encode(result), SPECIAL("<|output_end|>")]
                after = END
                if result == NOTHING:
                    name = TOOL_CALL.fullmatch(written.decode())[3]
                    texts = {REFUSAL.format(name if name[0] == " " else f' "{name}"').encode()}
                else:
                    texts = {result[:end].encode() for end in sentence_ends(result)}
            written = b""
    return tokens


def test_many_at_once_are_the_plain_loop_token_for_token():
    model = random_model()
    prompts = [render_prompt(TOKENIZER, {"messages": [{"role": "user", "content": text}]}) for text in QUESTIONS]
    engine = engine_that_calls(model, max_batch=3)
    answers = engine.generate(prompts, SamplingParams(max_tokens=300, temperature=0))
    for text, prompt, answer in zip(QUESTIONS, prompts, answers):
        expected = plain_answer(model, text, prompt, 300)
        expected = expected if END in expected else expected[:300]
        assert answer.tokens == expected, TOKENIZER.decode(expected)
    assert {NOTHING in str(to_parts(TOKENIZER, answer.tokens)) for answer in answers} == {True, False}


def test_draws_at_any_temperature_quote_to_the_letter():
    model = random_model()
    prompts = [render_prompt(TOKENIZER, {"messages": [{"role": "user", "content": text}]}) for text in QUESTIONS]
    sampling = SamplingParams(max_tokens=400, temperature=1.5, seed=3)
    for number, answer in enumerate(engine_that_calls(model).generate(prompts, sampling, num_samples=8)):
        question = QUESTIONS[number // 8]
        call, *_, result = [part for part in to_parts(TOKENIZER, answer.tokens) if part["type"] != "text"]
        name = TOOL_CALL.fullmatch(call["text"])[3]
        assert name.strip() and name in question
        assert re.search(rf"(^|\W|(?=\W)){re.escape(name)}", question), "it begins with a whole word"
        said = answer_text(TOKENIZER, answer.tokens)
        if result["text"] == NOTHING:
            assert said == REFUSAL.format(name if name[0] == " " else f' "{name}"')
        elif not said.startswith(PASSAGE):
            assert said == PASSAGE.partition(" Then")[0]


@pytest.mark.parametrize("questions, searched", [
    (["You help a shop.\n\nWho was Napoleon?"], 0),                    # a system message is no question
    (["When does the bicycle shop open?", "When does the museum in Paris open?"], 0),
    (["When does the bicycle shop open?", "How much is a Kyoto ticket?"], 1),
    # A question that refers back, and one without its subject, is asked after the one before. But not a new one.
    (["When does the bicycle shop open?", "And the re\u0301ar tyre?"], 2),
    (["When does the bicycle shop open?", "pressure of a tandem's tyre"], 2),
    (["When does the bicycle shop open?", "How much is a Kyoto ticket?", "And when?", "And the train?"], 3),
    (["How much is a Kyoto ticket?", "Who are you?"], 0),
    (["How much is a Kyoto ticket?", "Does he play chess?"], 0),         # not who plays anywhere
    (["What is 90 * 3?"], 0),
])
def test_what_is_searched_for_to_answer_a_conversation(tmp_path, monkeypatch, questions, searched):
    """searched: how many questions, the last ones; 0: nothing is found."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    (tmp_path / "shop.md").write_text("The bicycle shop opens at nine. The rear tyre needs four bar.\n\n"
                                      "The train to Kyoto leaves on 3 May. A ticket is 90 euros.\n")
    tools = Tools(Library(make_library(str(tmp_path / "shop.md"))))
    plan = tools.plan(questions)
    *before, last = questions[-searched:]
    assert plan.is_found == bool(searched)
    assert not searched or plan.search == (f"{' '.join(before)}\n" if before else "") + last


@pytest.mark.parametrize("text, words", [
    ("fu\u0308r Öl", "fu\u0308r Öl"),       # the accent is a character of its own
    ("हिन्दी में", "हिन्दी में"),
    ("天气 ok", "天 气 ok"),
    ("ที่ดี", "ที่ ดี"),
    ("see re.search.", "see re.search .search search ."),
    ("... .5, 1.25", ". . . . 5 , 1.25 .25 25"),
])
def test_words_of_scripts(text, words):
    starts, ends = word_edges(text)
    data = text.encode()
    pieces = [data[start:min(end for end in ends if end > start)].decode() for start in starts]
    assert [piece for piece in pieces if piece[0] != " "] == words.split()


def test_the_questions_of_a_prompt():
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "it"},
                {"role": "user", "content": "two"}]
    prompt = render_prompt(TOKENIZER, {"messages": messages})
    questions = Vocabulary(TOKENIZER).questions
    assert questions(prompt) == ["one", "two"]
    # A truncated prompt may begin within a question or an answer.
    assert questions(prompt[3:]) == ["ne", "two"] and questions(prompt[8:]) == ["two"]


def after(question: str, *parts: tuple[str, str], **own) -> Copying:
    """What an answer may copy that consists of these parts: a special token and a text each."""
    copying = Copying(Vocabulary(TOKENIZER), [question], {END}, **own)
    for name, text in parts:
        for token in [SPECIAL(name), *TOKENIZER.encode(text)]:
            copying.add(token)
    return copying


def called(call: str, result: str) -> list[tuple[str, str]]:
    """The parts of a call and of its result."""
    return [("<|python_start|>", call), ("<|python_end|>", ""), ("<|output_start|>", result), ("<|output_end|>", "")]


def allowed_texts(copying: Copying) -> set[bytes] | None:
    allowed = copying.allowed
    for token in range(TOKENIZER.get_vocab_size()):
        assert copying.allows(token) == (allowed is None or token in allowed)
    return None if allowed is None else {RAW[token] if token < len(RAW) else b"" for token in allowed}


@pytest.mark.parametrize("call", ["lookup", "search", "spell"])
def test_a_call_has_the_users_words(call):
    beginnings = {b" ", b" the", b"t", b"th", b"the", b"i"}
    assert allowed_texts(after("the there i", ("<|python_start|>", f'{call}("'))) == beginnings
    assert allowed_texts(after("the there i", ("<|python_start|>", f'{call}("there'))) == {b'"', b'")', b" "}
    assert allowed_texts(after("the there i", ("<|python_start|>", f'{call}ing("'))) is None
    assert allowed_texts(after("the there i", ("<|python_start|>", f'{call}("i")'))) == {b""}
    assert allowed_texts(after('say "the")', ("<|python_start|>", f'{call}("the'))) == {b'"', b'")'}
    assert allowed_texts(after("the " * 99, ("<|python_start|>", f'{call}("the the th'))) == {b"e"}
    long = after("begins here " + "word " * 900 + "and ends", ("<|python_start|>", f'{call}("')).copy.source
    assert long.endswith(b"word and ends") and len(long) == 2000


def test_in_ones_own_notes_an_answer_looks_up_all_words_that_tell_what_the_question_is_about():
    question = "How long is the thin tire?"
    own = {"plan": Plan(search=question, is_found=True), "is_own": True}
    copying = after("the", **own)
    assert copying.allowed == [SPECIAL("<|python_start|>")] and not copying.allows(END)
    begun = allowed_texts(after("the", ("<|python_start|>", ""), **own))
    assert begun == {b"s", b"l"}, "a call, no sum"
    call = ("<|python_start|>", 'search("')
    assert telling_edges(question) == ([0, 8, 9, 11, 12, 15, 16], [25, 26])     # not " long"
    assert allowed_texts(after("the", call, **own)) == {b"H", b" ", b" the", b"i", b"t", b"th", b"the"}
    assert allowed_texts(after("the", ("<|python_start|>", 'search("the thin'), **own)) == {b" "}
    assert b"t" in allowed_texts(after("the", ("<|python_start|>", 'spell("'), **own)), "any word can be spelled"
    assert b"" not in allowed_texts(after("the", *called('search("thin tire")', "the 2. there"), **own))


def test_a_passage_is_quoted_up_to_the_end_of_a_sentence():
    copying = after("the", *called('search("the")', "the 2. there. The"))
    assert allowed_texts(copying) == {b"t", b"th", b"the", b""}
    for token in TOKENIZER.encode("the 2. there."):
        copying.add(token)
    assert allowed_texts(copying) == {b" ", b""}


@pytest.mark.parametrize("call, result, begun, rest", [
    ("lookup", NOTHING, "Das weiß ic", REFUSALS["de"][11:]), ("lookup", NOTHING, "Das weiss ich ", ""),
    ("spell", NOTHING, "I do not kno", 'w. I found nothing about "the".'),
    ("spell", "t-h-e", "t-", "h-e"), ("spell", "t-h-e", "The wo", ""),
    ("spell", "с-л-о", "с-", "л-о"), ("spell", "с-л-о", "сл", ""),    # two bytes are one letter
])
def test_a_refusal_and_letters_are_copied_once_an_answer_begins_like_them(call, result, begun, rest):
    copying = after("the", *called(f'{call}("the")', result))
    for token in TOKENIZER.encode(begun):
        assert copying.allowed is None
        copying.add(token)
    left = rest.encode()
    for token in TOKENIZER.encode(rest):
        texts = allowed_texts(copying)
        assert RAW[token] in texts and all(left.startswith(text) for text in texts)
        copying.add(token)
        left = left[len(RAW[token]):]
    assert copying.allowed == ([END] if rest and result == NOTHING else None)     # a refusal ends the answer
    copying.add(TOKENIZER.encode("x")[0])
    assert copying.allowed is None      # after the letters an answer goes on as it likes
