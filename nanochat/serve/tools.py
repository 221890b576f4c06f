"""
Functions of the caller's own, in the calculator's protocol: a call is a `python` part of the assistant's message, its
result the `python_output` part after it, and the assistant goes on in the same turn. So a model that uses functions can
be trained on conversations as they are. A call reads

    {"name": "weather", "arguments": {"city": "Paris"}}

The definitions are a part of the system message. A call ends an answer, so an answer has one at most.

tool_choice "auto" leaves it to the model whether it calls; one that was never trained to does not. "required", and a
named function, make it write a call whose arguments fit the function's parameters, by a grammar (structured.py).
"""
import json
import re
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from nanochat.serve.structured import json_of
from nanochat.tokenizer import Tokenizer

CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"arguments"\s*:\s*(\{.*\})\s*\}\s*', re.DOTALL)

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(BaseModel):
    name: Name
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    name: Name


class NamedTool(BaseModel):
    type: Literal["function"]
    function: FunctionName


class FunctionCall(BaseModel):
    name: Name
    arguments: str  # JSON


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def describe(functions: list[Function]) -> str:
    """For the system message: what there is to call, and how."""
    lines = [json.dumps(function.model_dump(), ensure_ascii=False) for function in functions]
    return "\n".join(['Functions, to be called with {"name": ..., "arguments": {...}}:', *lines])


def part_of(call: FunctionCall) -> dict[str, str]:
    """A call as a part of a message."""
    return {"type": "python", "text": f'{{"name":"{call.name}","arguments":{call.arguments}}}'}


def grammar_of(functions: list[Function], tokenizer: Tokenizer) -> str:
    """A grammar's expression for a call of one of these functions."""
    start, end = (tokenizer.encode_special(name) for name in ("<|python_start|>", "<|python_end|>"))
    calls = []
    for function in functions:
        beginning = json.dumps(f'{{"name":"{function.name}","arguments":')
        calls.append(f'{beginning} {json_of(function.parameters)} "}}"')
    return f"<[{start}]> ({' | '.join(calls)}) <[{end}]>"


def read_call(parts: list[dict[str, str]], functions: list[Function]) -> dict[str, Any] | None:
    """The call at the end of an answer, as OpenAI has it; None if there is none of these functions."""
    match = CALL.fullmatch(parts[-1]["text"]) if parts and parts[-1]["type"] == "python" else None
    if match is None or match[1] not in [function.name for function in functions]:
        return None
    try:
        json.loads(match[2])
    except ValueError:
        return None
    call = {"name": match[1], "arguments": match[2]}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call}
