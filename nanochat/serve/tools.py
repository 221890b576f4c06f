"""
Functions of the caller's own, in the calculator's protocol: a call is a `python` part of the assistant's message, its
result the `python_output` part after it, and the assistant goes on in the same turn. So a model that uses functions can
be trained on conversations as they are. A call reads

    {"name": "weather", "arguments": {"city": "Paris"}}

The definitions become a system message before the others. A call ends an answer: an answer has one at most.

tool_choice "auto" leaves it to the model whether it calls; one that was not trained to does not, and what it calls is
not held to the parameters. "required", or a function's name, has it write one call whose arguments fit the function's
parameters, by a grammar (structured.py).
"""
import json
import re
import uuid
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from nanochat.data.tokenizer import Tokenizer
from nanochat.serve.structured import Formed, json_of

CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"arguments"\s*:\s*(\{.*\})\s*\}\s*', re.DOTALL)

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(BaseModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    name: Name


class NamedTool(BaseModel):
    type: Literal["function"]
    function: FunctionName


class WithTools(Formed):
    """The fields of a request that may have functions called."""
    tools: Annotated[list[Tool], Field(max_length=128)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"

    @model_validator(mode="after")
    def check_choice(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        wanted = [self.tool_choice.function.name] if isinstance(self.tool_choice, NamedTool) else []
        if not set(wanted) <= set(names) or self.tool_choice == "required" and not names:
            raise ValueError(f"tool_choice: {', '.join(wanted) or 'required'} is none of the tools: {', '.join(names)}")
        return self

    @property
    def functions(self) -> list[Function]:
        """Those that may be called."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        functions = [tool.function for tool in self.tools if self.tool_choice != "none"]
        return [function for function in functions if named in (None, function.name)]

    def form(self, tokenizer: Tokenizer) -> str | None:
        form, call = super().form(tokenizer), call_of(self.functions, tokenizer)
        if not self.functions or self.tool_choice == "auto" and form is None:
            return form
        return f"{call} | {form}" if self.tool_choice == "auto" else call


def describe(functions: list[Function]) -> str:
    """For the system message: what there is to call, and how."""
    lines = [json.dumps(function.model_dump(exclude_none=True), ensure_ascii=False) for function in functions]
    return "\n".join(['Functions, to be called with {"name": ..., "arguments": {...}}:', *lines])


def call_of(functions: list[Function], tokenizer: Tokenizer) -> str:
    """A grammar's expression for a call of one of these functions."""
    start, end = (tokenizer.encode_special(name) for name in ("<|python_start|>", "<|python_end|>"))
    calls = []
    for function in functions:
        beginning = json.dumps(f'{{"name":"{function.name}","arguments":')
        calls.append(f'{beginning} {json_of({"type": "object"} | function.parameters)} "}}"')
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


def parts_with_calls(content: str | list | None, calls: Any) -> list:
    """The parts of an assistant's message with tool_calls. ValueError for calls that are none."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if parts and isinstance(parts[-1], dict) and parts[-1].get("type") == "python":
        parts = parts[:-1]  # a message of this server: its last part is the call
    texts = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        name, arguments = map(function.get, ("name", "arguments")) if isinstance(function, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise ValueError('a tool call needs "function": {"name": a text, "arguments": JSON as a text}')
        texts.append(f'{{"name":"{name}","arguments":{arguments}}}')
    return [*parts, *({"type": "python", "text": text} for text in texts)]


def parts_of_result(content: Any) -> list:
    """The parts of the assistant's message that a tool's message stands for. ValueError for content that is no text."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the content of a tool's message must be a text or a list of texts")
    return [{"type": "python_output", "text": "".join(texts)}]
