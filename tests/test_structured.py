"""Answers of a prescribed form: judged by jsonschema, masks written out by hand, OpenAI's client with its helpers."""
import contextlib
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
import torch
from pydantic import BaseModel, Field
from test_chat_web import MARKER, Running, chat, prompt_of, writing_model
from test_engine import SPECIAL, TOKENIZER, random_model, random_prompts

from nanochat.data.conversation import render_prompt
from nanochat.inference.detokenizer import to_parts
from nanochat.inference.engine import Engine
from nanochat.inference.sampling import Grammar, SamplingParams
from nanochat.runtime.errors import UserError
from nanochat.serve.functions import Function, read_call
from nanochat.serve.structured import MAX_GRAMMAR_LENGTH, compile_grammar, json_grammar

STOPS = [SPECIAL("<|assistant_end|>"), SPECIAL("<|bos|>")]


@pytest.fixture(scope="module", autouse=True)
def library():
    pytest.importorskip("llguidance")


def tried(schema) -> Grammar:
    return compile_grammar(json_grammar(schema), TOKENIZER)


def sampling(grammar: Grammar, max_tokens: int = 900, **settings) -> SamplingParams:
    return SamplingParams(max_tokens, tools=False, grammar=grammar, **settings)


def strict(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS = {
    "nested": strict(
        who=strict(name={"type": "string", "maxLength": 12}, born=strict(year={"type": "integer"})),
        at={"type": ["string", "null"], "maxLength": 3}),
    "enum": {"enum": ["red", "北京", 7, None, {"a": [1.5]}, "a\"b"]},
    "unicode": strict(**{"名前": {"type": "string", "minLength": 2, "maxLength": 6}}, code={
        "type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}),
    "any number": strict(number={"type": "number"}, list={
        "type": "array", "items": {"type": ["number", "null"]}, "minItems": 2, "maxItems": 3}),
    "recursive": {"$defs": {"tree": strict(left={"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]})},
                  "$ref": "#/$defs/tree"},
}


def listed(**properties) -> dict:
    """As pydantic has it: nothing is said of other properties."""
    return {"type": "object", "properties": properties, "required": [*properties]}


POINT = listed(x={"type": "integer"})
TIME = {"type": "string", "format": "date-time"}
@pytest.mark.parametrize("schema, fits, does_not", [
    ({"$defs": {"P": POINT}} | listed(at={"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]}, list={
        "type": "array", "items": {"allOf": [{"$ref": "#/$defs/P"}]}}), {"at": {"x": 1}, "list": [{"x": 2}]}, {
        "at": {"x": 1, "y": 2}, "list": []}),
    # A property may be called like a keyword.
    (listed(properties=POINT, anyOf=POINT), {"properties": {"x": 1}, "anyOf": {"x": 1}}, {"properties": {"y": 1}}),
    ({"type": ["integer", "null"]}, 1 - 2**53, 2**53),
    (listed(number={"type": ["number", "null"]}), {"number": -987654321012345.123456789}, {"number": 1.0123456789}),
    ({"type": "number", "multipleOf": 0.25}, 7.25, 7.3), ({"type": "number", "enum": [2**60, 0.5]}, 2**60, 2),
    (TIME, "2026-01-02T03:04:05.123456Z", "2026-01-02T03:04:05.1234567+01:00"),
    ({"type": "string", "format": "duration"}, "P1Y2M3DT4H5M999999999S", "PT1111111111S"),
    # Several schemas describe one object and would exclude each other's properties: these stay open.
    ({"$defs": {"P": POINT}, "allOf": [{"$ref": "#/$defs/P"}, listed(y=POINT)]}, {"x": 1, "y": {"x": 1}}, {"x": 1}),
])
def test_no_key_is_invented_and_no_number_endless(schema, fits, does_not):
    """Judged by the grammar, token by token, in the order of the schema."""
    for value, expected in ((fits, True), (does_not, False)):
        grammar = tried(schema)
        tokens = TOKENIZER.encode(json.dumps(value, separators=(",", ":")))
        accepted = all(grammar.allowed[token] and grammar.add(token) is None for token in tokens)
        assert (accepted and bool(grammar.allowed[STOPS[0]])) == expected, value


@pytest.fixture(scope="module")
def writer() -> Engine:
    return Engine(writing_model(), TOKENIZER, max_batch=16)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_finished_answer_of_a_random_model_fits_its_schema(writer, name):
    """Temperature 1: it would write noise. One that is cut off ends with "length"; a half answer never with "stop"."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    answers = writer.generate([prompt_of(chat("?"))], sampling(tried(SCHEMAS[name]), 300, seed=1), 8)
    finished = [answer for answer in answers if answer.finish_reason == "stop"]
    assert len(finished) >= (8 if "number" in name else 2), "nothing to judge, or a number that does not end"
    for answer in finished:
        [part] = to_parts(TOKENIZER, answer.tokens)
        assert part["type"] == "text" and "\ufffd" not in part["text"] and answer.tokens[-1] in STOPS
        assert [*validator.iter_errors(json.loads(part["text"]))] == [], part["text"]
    for answer in set(answers) - set(finished):
        assert answer.finish_reason == "length" and len(answer.tokens) == 300 and not set(STOPS) & set(answer.tokens)


def test_only_what_begins_a_choice_is_drawn():
    """
    Greedy, against masks written out by hand over the plain model's logits: a token must go on with one of the texts,
    and a stop token is allowed exactly when the text is one of them, although another goes on. (Where only one text can
    follow, llguidance allows its canonical tokens alone: here these are the only ones.)
    """
    model, choices = random_model(), ["the", "the xyz", "then", "北京", "北", "th\n"]
    texts = [choice.encode() for choice in choices]
    prompts = random_prompts(5, 9, 2, 30, 17, 11)
    engine = Engine(model, TOKENIZER, max_batch=4)
    grammar = compile_grammar(" | ".join(map(json.dumps, choices)), TOKENIZER)
    answers = engine.generate(prompts, sampling(grammar, temperature=0))
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


@pytest.mark.parametrize("schema, name", [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"type": "huge"}, "huge"),
    ({"enum": ["x" * MAX_GRAMMAR_LENGTH]}, "65,536"),
])
def test_what_a_schema_may_not_say(schema, name):
    with pytest.raises(UserError, match=name):
        tried(schema)


def test_no_schema_keeps_others_waiting():
    """Small ones that explode: refused or compiled in hardly any time, and then no token takes long either."""
    primes = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}
    patterns = "^(([a-z]{1,50}){1,50}){1,50}$", "^.*a.{30}$", "^((a|b|ab)*c?){500}$"
    for schema in (primes, *({"type": "string", "pattern": pattern} for pattern in patterns)):
        started = time.process_time()
        with contextlib.suppress(UserError):
            Engine(random_model(), TOKENIZER).generate(random_prompts(3), sampling(tried(schema), 60))
        assert time.process_time() - started < 60, schema  # of the processor: others may be busy


# ---- Through the server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("structured")
    running = Running(folder, {"sft": writing_model()}, "--source=sft", DRAIN_SECONDS=100)
    yield running
    running.process.kill()
    running.process.wait()


PATTERNS = [{"type": "string", "pattern": f".*a.*b.{{{k}}}c.*"} for k in range(40)]
ENDLESS = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"allOf": PATTERNS}}}


def test_a_form_that_takes_for_ever_keeps_nobody_waiting(server):
    """It is given up; meanwhile plain requests are answered, and another form waits for seconds at most."""
    with ThreadPoolExecutor(3) as pool:
        given_up = [pool.submit(server.ask, MARKER, max_tokens=3, response_format=ENDLESS) for _ in range(3)]
        assert server.ask(MARKER, max_tokens=3).choices and not any(future.done() for future in given_up)
        assert server.ask(MARKER, max_tokens=3, response_format={"type": "json_object"}).choices
        for future in given_up:
            with pytest.raises(openai.BadRequestError, match="to compile"):
                future.result()
    assert server.log.read_text().count("\n") == 1


class Pet(BaseModel):
    kind: Literal["dog", "cat"]
    age: int = Field(ge=0, le=30)
    friends: list[Literal["Zoë", "北"]] = Field(max_length=2)


class GetWeather(BaseModel):
    """Tells the weather."""
    city: Literal["Paris", "北京"]
    days: int = Field(ge=1, le=9)


WARM = {"model": "tiny-sft", "temperature": 1}
WEATHER = openai.pydantic_function_tool(GetWeather, name="get_weather")
ARGUMENTS = re.compile(r'\{"city":"(Paris|北京)","days":[1-9]\}')


def test_pydantic_models_are_parsed(server):
    """The client's own helper makes the schema and reads the answer, whole and as a stream; also any JSON."""
    ask = WARM | {"messages": chat("?"), "response_format": Pet, "max_tokens": 400}
    [choice] = server.client.chat.completions.parse(**ask, seed=0).choices
    assert isinstance(choice.message.parsed, Pet) and choice.finish_reason == "stop"
    with server.client.chat.completions.stream(**ask, seed=0) as stream:
        assert any(event.type == "content.delta" for event in stream)
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)
    whole = server.ask(messages=chat("?"), temperature=1, n=8, response_format={"type": "json_object"}, max_tokens=300)
    ended = [choice.message.content for choice in whole.choices if choice.finish_reason == "stop"]
    assert ended and all(isinstance(json.loads(content), dict) for content in ended)


def test_functions_are_called_and_their_results_read(server):
    """required and by name, whole and as a stream; what was called is sent back with the result, as clients do."""
    messages = chat("How is the weather?")
    other = {"type": "function", "function": {"name": "now", "strict": True}}
    ask = WARM | {"messages": messages, "tools": [WEATHER, other], "max_tokens": 200}
    named = {"type": "function", "function": {"name": "get_weather"}}
    whole = server.client.chat.completions.create(**ask, tool_choice="required", seed=0, n=8)
    for choice in whole.choices:
        assert (choice.finish_reason, choice.message.content, len(choice.message.tool_calls)) == ("tool_calls", None, 1)
    assert {choice.message.tool_calls[0].function.name for choice in whole.choices} == {"get_weather", "now"}
    [choice] = server.client.chat.completions.parse(**ask, tool_choice=named, seed=1).choices
    [call] = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather) and ARGUMENTS.fullmatch(call.function.arguments)
    with server.client.chat.completions.stream(**ask, tool_choice=named, seed=1) as stream:
        for _ in stream:
            pass
        [streamed] = stream.get_final_completion().choices
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments

    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    parts = [{"type": "python", "text": f'{{"name":"get_weather","arguments":{call.function.arguments}}}'},
             {"type": "python_output", "text": "sunny"}]
    turns = {"messages": [*messages, {"role": "assistant", "content": parts}]}
    again = ask | {"messages": [*messages, choice.message, result], "max_tokens": 3}
    read = server.client.chat.completions.create(**again, tool_choice="none").usage.prompt_tokens
    assert read == len(render_prompt(TOKENIZER, turns, continue_last=True))
    told = server.client.chat.completions.create(**ask | {"max_tokens": 3}).usage.prompt_tokens
    assert told > len(prompt_of(messages)) + 200, "unless tool_choice is none the model reads the definitions"


def test_a_model_may_call_a_function_of_its_own_accord():
    """auto: what is written as a call is one, and ends the answer; other expressions are the calculator's."""
    call, functions = '{"name": "now", "arguments": {"zone": "UTC"}}', [Function(name="now")]
    assert read_call(call, functions)["function"]["arguments"] == '{"zone": "UTC"}'
    assert [read_call(text, functions) for text in ("12*3", call.replace("now", "then"), call[:-2])] == [None] * 3


def test_only_allowed_tools_are_called(server):
    """Others are neither described nor called."""
    now = {"type": "function", "function": {"name": "now"}}
    ask = {"messages": chat("?"), "max_tokens": 200}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [now]}}
    some = server.ask(**ask, tools=[WEATHER, now], tool_choice=allowed)
    alone = server.ask(**ask, tools=[now], tool_choice="required")
    assert some.choices[0].message.tool_calls[0].function.name == "now"
    assert some.usage.prompt_tokens == alone.usage.prompt_tokens


def test_zz_ctrl_c_ends_it_with_streams_open(server):
    """At once, not after DRAIN_SECONDS: streams end with an error."""
    server.pace.set(0.1)  # the answers take 100 seconds
    stream = server.ask(MARKER, max_tokens=1000, n=8, stream=True)
    for _ in range(8):
        next(stream)
    started = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="stopping"):
        list(stream)
    assert server.process.wait(timeout=200) == 0 and time.monotonic() - started < 50
