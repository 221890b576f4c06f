"""
Functions of the caller's own, in the calculator's protocol: a call is a `python` part of the assistant's message, its
result the `python_output` part after it, and the assistant goes on in the same turn. So a model that uses functions can
be trained on conversations as they are. A call reads

    {"name": "weather", "arguments": {"city": "Paris"}}

The definitions become a system message before the others. A call ends an answer: an answer has at most one.

tool_choice "auto" leaves it to the model whether it calls. A model that was not trained to call does not, and what it
calls need not fit the parameters. "required", or a function's name, makes it write one call whose arguments fit the
function's parameters, by a grammar (structured.py).
"""
import json
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from nanochat.data.tokenizer import Tokenizer
from nanochat.serve.protocol import Json
from nanochat.serve.structured import flat, json_grammar

CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"arguments"\s*:\s*(\{.*\})\s*\}\s*', re.DOTALL)


class FunctionName(BaseModel):
    type: Literal["function"] = "function"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(FunctionName):
    description: str | None = None
    parameters: Json = {"type": "object", "properties": {}}


Tools = Annotated[list[Annotated[Function, BeforeValidator(flat)]], Field(max_length=128)]


class AllowedTools(BaseModel):
    mode: Literal["auto", "required"]
    tools: list[Annotated[FunctionName, BeforeValidator(flat)]]


def as_allowed(choice: Any) -> Any:
    """A function that is named is the only one that is allowed, and must be called."""
    match flat(choice):
        case {"type": "function", **function}:
            return {"mode": "required", "tools": [function]}
        case other:
            return other


ToolChoice = Literal["none", "auto", "required"] | Annotated[AllowedTools, BeforeValidator(as_allowed)]


class FunctionCall(BaseModel):
    name: str
    arguments: str

    def part(self) -> Json:
        """The part of a message that stands for the call."""
        return {"type": "python", "text": f'{{"name":"{self.name}","arguments":{self.arguments}}}'}


class ToolCall(BaseModel):
    function: FunctionCall


def describe(functions: Sequence[Function]) -> str:
    """For the system message: what there is to call, and how."""
    lines = ['Functions, to be called with {"name": ..., "arguments": {...}}:']
    for function in functions:
        lines.append(json.dumps(function.model_dump(exclude={"type"}, exclude_none=True), ensure_ascii=False))
    return "\n".join(lines)


def call_grammar(functions: Sequence[Function], tokenizer: Tokenizer) -> str:
    """A grammar's expression for a call of one of these functions."""
    calls = []
    for function in functions:
        beginning = json.dumps(f'{{"name":"{function.name}","arguments":')
        arguments = json_grammar({"type": "object"} | function.parameters)
        calls.append(f'{beginning} {arguments} "}}"')
    start, end = map(tokenizer.encode_special, ("<|python_start|>", "<|python_end|>"))
    return f"<[{start}]> ({' | '.join(calls)}) <[{end}]>"


def read_call(text: str, functions: Sequence[Function]) -> Json | None:
    """A call in OpenAI's shape; None if the text is no call of one of these functions."""
    match = CALL.fullmatch(text)
    if match is None or match[1] not in [function.name for function in functions]:
        return None
    call = {"name": match[1], "arguments": match[2]}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call}
