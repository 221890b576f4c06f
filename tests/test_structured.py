"""Answers of a prescribed form: jsonschema as the judge, masks written out by hand, OpenAI's client with its helpers."""
import asyncio
import json
import re
import sys
import time
from typing import Literal

import httpx
import openai
import pytest
import torch
from pydantic import BaseModel, Field
from test_chat_web import Running, ask, chat, make_engine, prompt_of, run_async, serving, writing_model
from test_engine import SPECIAL, TOKENIZER, V, finish, random_model, random_prompts

from nanochat.conversation import render_prompt
from nanochat.detokenizer import to_parts
from nanochat.engine import Engine
from nanochat.errors import UserError
from nanochat.sampling import SamplingParams
from nanochat.serve.structured import MAX_BYTES, compile_grammar, json_of, one_of

STOPS = [SPECIAL("<|assistant_end|>"), SPECIAL("<|bos|>")]


@pytest.fixture(scope="module", autouse=True)
def library():
    pytest.importorskip("llguidance")


def grammar(expression: str):
    return asyncio.run(compile_grammar(expression, TOKENIZER))


def sampling(expression: str, max_tokens: int = 900, **settings) -> SamplingParams:
    return SamplingParams(max_tokens, tools=False, grammar=grammar(expression), **settings)


def strict(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS = {
    "nested": strict(
        who=strict(name={"type": "string", "maxLength": 12}, born=strict(year={"type": "integer"})),
        at={"type": ["string", "null"], "maxLength": 3}),
    "enum": {"enum": ["red", "北京", 7, None, {"a": [1.5]}, "a\"b"]},
    "constants": strict(kind={"const": "dog"}, legs={"const": 4}),
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["x"]}], "items": False, "minItems": 2},
    "unicode": strict(**{"名前": {"type": "string", "minLength": 2, "maxLength": 6}, "é": {"type": "boolean"}}),
    "integers": {"type": "integer", "minimum": -7, "maximum": 123456},
    "numbers": strict(a={"type": "number", "exclusiveMinimum": 0, "maximum": 2.5}, b={"type": "number"}),
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "formats": strict(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "optional": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
                 "additionalProperties": False},
    "extra": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "union": {"anyOf": [{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, {"type": "null"},
                        strict(x={"type": "number"})]},
    "references": {"$defs": {"leaf": {"enum": [1, 2]}}, "type": "array", "items": {"$ref": "#/$defs/leaf"},
                   "maxItems": 4},
    "recursive": {"$defs": {"tree": strict(left={"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]})},
                  "$ref": "#/$defs/tree"},
    "string": {"type": "string"},
    "anything": {},
}


@pytest.fixture(scope="module")
def writer() -> Engine:
    return Engine(writing_model(), TOKENIZER, max_batch=16)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_finished_answer_of_a_random_model_fits_its_schema(writer, name):
    """Temperature 1: it would write noise. One that is cut off ends with "length"; a half answer never with "stop"."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    answers = writer.generate([prompt_of(chat("?"))], sampling(json_of(SCHEMAS[name]), 300, seed=1), 16)
    finished = [answer for answer in answers if answer.finish_reason == "stop"]
    assert len(finished) >= (1 if name in ("string", "anything", "numbers", "nested", "recursive") else 14)
    for answer in finished:
        [part] = to_parts(TOKENIZER, answer.tokens)
        assert part["type"] == "text" and "\ufffd" not in part["text"] and answer.tokens[-1] in STOPS
        assert [*validator.iter_errors(json.loads(part["text"]))] == [], part["text"]
        assert not re.search(r'[:,{\[]\s', part["text"].replace('\\"', "")) or '"' in part["text"]
    for answer in set(answers) - set(finished):
        assert answer.finish_reason == "length" and len(answer.tokens) == 300 and not set(STOPS) & set(answer.tokens)


def test_only_what_begins_a_choice_is_drawn():
    """
    Greedy, against masks written out by hand over the plain model's logits: a token must go on with one of the texts,
    and a stop token is allowed exactly when the text is one of them, although another goes on.
    """
    model, choices = random_model(), ["the", "the other", "then", "北京", "北", "th\n"]
    texts = [choice.encode() for choice in choices]
    prompts = random_prompts(5, 9, 2, 30, 17, 11)
    engine = Engine(model, TOKENIZER, max_batch=4)
    answers = engine.generate(prompts, sampling(one_of(choices), temperature=0))
    for prompt, answer in zip(prompts, answers):
        written, tokens = b"", []
        while not tokens or tokens[-1] not in STOPS:
            allowed = [token for token in range(256 + 3) if written + TOKENIZER.decode_bytes([token]) in
                       {text[:n] for text in texts for n in range(1, len(text) + 1)}]
            allowed = [token for token in allowed if TOKENIZER.decode_bytes([token])] + STOPS * (written in texts)
            logits = model(torch.tensor([prompt + tokens]))[0, -1]
            tokens.append(max(allowed, key=lambda token: logits[token].item()))
            written += b"" if tokens[-1] in STOPS else TOKENIZER.decode_bytes(tokens[-1:])
        assert answer.tokens == tokens and written in texts and answer.finish_reason == "stop"
    assert len({tuple(answer.tokens) for answer in answers}) > 1


def test_others_in_the_batch_are_as_they_were():
    """Rows without a grammar, greedy and sampled, beside rows with one: the same tokens as alone."""
    model, prompts = random_model(), random_prompts(4, 20, 7, 12)
    plain = [SamplingParams(30, temperature=t, seed=3, stop=(), tools=False) for t in (0, 1.0)] * 2
    alone = [answer.tokens for answer in Engine(model, TOKENIZER).generate(prompts, plain)]
    engine, formed = Engine(model, TOKENIZER), sampling(json_of({"type": "object"}), 50)
    engine.add(prompts[0], formed, 3)
    answers = [answer for prompt, its in zip(prompts, plain) for answer in engine.add(prompt, its)]
    engine.add(prompts[1], formed, 3)
    finish(engine)
    assert [answer.tokens for answer in answers] == alone
    seeded = sampling(json_of({"type": "array"}), 40, seed=5)
    first, again = (engine.generate(prompts[:1], seeded, 2) for _ in range(2))
    assert [a.tokens for a in first] == [a.tokens for a in again] and first[0].tokens != first[1].tokens


@pytest.mark.parametrize("schema, words", [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"not": {}}, "not"), ({"type": "huge"}, "huge"),
    ({"$ref": "https://example.org/x"}, "example.org"), ({"type": "string", "pattern": "(?=a)b"}, "look-around|regex"),
    ({"enum": ["x" * MAX_BYTES]}, "at most"), ({"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable"),
    ({"properties": {"a": {"multipleOf": 9999}}}, "multipleOf"),
])
def test_what_a_schema_may_not_say(schema, words):
    with pytest.raises(UserError, match=words):
        grammar(json_of(schema))


def test_no_schema_keeps_others_waiting():
    """Small ones that explode: refused or compiled within seconds, and then no token takes long either."""
    primes = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}
    patterns = "^(([a-z]{1,50}){1,50}){1,50}$", "^.*a.{30}$", "^((a|b|ab)*c?){500}$"
    for schema in (primes, *({"type": "string", "pattern": pattern} for pattern in patterns)):
        started = time.monotonic()
        try:
            engine = Engine(random_model(), TOKENIZER)
            engine.generate(random_prompts(3), sampling(json_of(schema), 60))
        except UserError:
            pass
        assert time.monotonic() - started < 10, schema


def test_without_the_library_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"\. \./setup\.sh structured"):
        grammar(json_of({}))
