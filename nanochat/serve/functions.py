"""
The caller's own functions. A call is treated like a calculator call: it is a `python` part of the assistant's
message, its result is the `python_output` part after it, and the assistant goes on in the same turn. So a model that
uses functions can be trained on ordinary conversations. A call reads

    {"name": "weather", "arguments": {"city": "Paris"}}

The definitions become a system message before the others. A call ends an answer, so an answer has at most one call.

With tool_choice "auto" the model decides whether it calls. A model that was not trained on calls rarely makes one, and
its arguments need not fit the parameters. With "required", or a function's name, a grammar (structured.py) forces one
call whose arguments fit.
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

WRITTEN_CALL = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"arguments"\s*:\s*(\{.*\})\s*\}\s*', re.DOTALL)


class FunctionName(BaseModel):
    type: Literal["function"] = "function"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(FunctionName):
    description: str | None = None
    parameters: Json = {"type": "object", "properties": {}}


Functions = Annotated[list[Annotated[Function, BeforeValidator(flat)]], Field(max_length=128)]


class ToolMode(BaseModel):
    """Whether a function is called, and which functions may be."""
    mode: Literal["none", "auto", "required"] = "auto"
    tools: list[Annotated[FunctionName, BeforeValidator(flat)]] | None = None   # None: all


def as_mode(choice: Any) -> Any:
    """OpenAI has three spellings: a mode, one function that must be called, and the functions that are allowed."""
    match flat(choice):
        case str(mode):
            return {"mode": mode}
        case {"type": "function", **function}:
            return {"mode": "required", "tools": [function]}
        case allowed:
            return allowed


ToolChoice = Annotated[ToolMode, BeforeValidator(as_mode)]


class FunctionCall(BaseModel):
    name: str
    arguments: str

    def part(self) -> Json:
        """The part of a message that stands for the call."""
        return {"type": "python", "text": f'{{"name":"{self.name}","arguments":{self.arguments}}}'}


class ToolCall(BaseModel):
    function: FunctionCall


def define(functions: Sequence[Function]) -> Json:
    """The system message that tells the model which functions exist, and how to call them."""
    lines = ['Functions, to be called with {"name": ..., "arguments": {...}}:']
    for function in functions:
        lines.append(json.dumps(function.model_dump(exclude={"type"}, exclude_none=True), ensure_ascii=False))
    return {"role": "system", "content": "\n".join(lines)}


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
    """A call in OpenAI's shape; None if the text does not call one of these functions."""
    match = WRITTEN_CALL.fullmatch(text)
    if match is None or match[1] not in [function.name for function in functions]:
        return None
    call = {"name": match[1], "arguments": match[2]}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call}
