"""
OpenAI's Responses interface, as far as a text conversation needs it: a request becomes one for chat, and the answer,
whole or as events, is told in the other shape.

Nothing is stored: previous_response_id, conversation and background are refused, and every request brings its whole
conversation in `input`. What the calculator did is in no item.
"""
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from nanochat.serve.api_error import ApiError
from nanochat.serve.engine_process import Chunk
from nanochat.serve.replies import Reply

# Parameters that say the same in both interfaces, and those that have another name in chat.
SAME = {"model", "temperature", "top_p", "stream", "user", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "seed", "top_k", "min_p"}
RENAMED = {"max_output_tokens": "max_tokens"}
# Values that ask for nothing.
NEUTRAL = {"include": ([],), "truncation": ("disabled",), "background": (False,), "top_logprobs": (0,),
           "reasoning": ({}, {"effort": "none"})}
TEXTS = "input_text", "output_text", "text"
BODY = {  # for the OpenAPI page
    "type": "object", "required": ["model", "input"], "properties": {
        "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "instructions": {"type": ["string", "null"]}, "max_output_tokens": {"type": ["integer", "null"]},
        "stream": {"type": ["boolean", "null"]}, "temperature": {"type": ["number", "null"]}}}


def unsupported(what: str, param: str) -> ApiError:
    return ApiError(400, f"{what} is not supported by this server; leave it out", "unsupported_parameter", param)


def require(condition: bool, param: str, expected: str) -> None:
    if not condition:
        raise ApiError(400, f"{param}: expected {expected}", param=param)


def chat_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request for chat that asks the same. ApiError, 400, for what no conversation here has."""
    chat: dict[str, Any] = {"messages": []}
    for name, value in fields.items():
        if value is None or value in NEUTRAL.get(name, ()):
            continue
        if name in SAME | RENAMED.keys():
            chat[RENAMED.get(name, name)] = value
        elif name == "tools":
            are_objects = isinstance(value, list) and all(isinstance(tool, dict) for tool in value)
            require(are_objects, name, "a list of objects")
            chat["tools"] = [nested(tool) for tool in value]
        elif name == "tool_choice":
            chat["tool_choice"] = nested(value) if isinstance(value, dict) else value
        elif name == "text":
            require(isinstance(value, dict) and isinstance(value.get("format", {}), dict), name, "an object")
            if others := value.keys() - {"format", "verbosity"}:
                raise unsupported(f"text.{min(others):.80}", "text")
            chat["verbosity"] = value.get("verbosity")
            format = dict(value.get("format", {}))
            kind = {"type": format.pop("type", "text")}
            chat["response_format"] = kind | ({"json_schema": format} if format else {})
        elif name not in ("input", "instructions", "stream_options"):
            raise unsupported(f"{name:.80}", name[:80])
    if (instructions := fields.get("instructions")) is not None:
        require(isinstance(instructions, str), "instructions", "a text")
        chat["messages"].append({"role": "system", "content": instructions})
    asked = fields.get("input")
    require(isinstance(asked, (str, list)), "input", "a text or a list of items")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    for number, item in enumerate(items):
        add_item(chat["messages"], item, f"input[{number}]")
    return chat


def nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A function, or the choice of one, as chat has it: its fields below "function"."""
    return {"type": tool.get("type"), "function": {key: value for key, value in tool.items() if key != "type"}}


def add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """One item of a conversation as the messages of chat."""
    require(isinstance(item, dict), where, "an object")
    kind = item.get("type", "message")
    if kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        content = item.get("output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": plain(content, where)})
    elif kind == "message":
        messages.append({"role": item.get("role"), "content": plain(item.get("content"), where)})
    else:
        raise unsupported(f"an item of type {kind!r:.80}", where)


def plain(content: Any, where: str) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") in TEXTS else None for part in parts]
    require(all(isinstance(text, str) for text in texts), f"{where}.content", f"a text or parts of {', '.join(TEXTS)}")
    return "".join(texts)


class ResponsesReply(Reply):
    """One choice in the shape of a response. asked: the request's fields, which a response repeats."""

    def __init__(self, fields: dict[str, Any], *args, **settings):
        super().__init__(*args, **settings)
        defaults = {"instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": None, "text": {},
                    "tool_choice": "auto", "tools": [], "top_p": None, "max_output_tokens": None}
        self.id = self.head["id"].replace("chatcmpl-", "")
        self.repeated = {name: value if fields.get(name) is None else fields[name] for name, value in defaults.items()}

    def response(self, status: str, output: Sequence[dict] = ()) -> dict[str, Any]:
        usage = {
            "input_tokens": self.prompt_tokens, "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens}
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self.id}", "object": "response", "created_at": self.head["created"], "status": status,
            "model": self.head["model"], "output": list(output), "error": None, "incomplete_details": details,
            "previous_response_id": None, "store": False, "usage": usage if output else None,
        } | self.repeated

    def message(self, status: str, text: str | None = None) -> dict[str, Any]:
        content = [] if text is None else [self.text(text)]
        return {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": status, "content": content}

    def text(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def whole(self) -> dict[str, Any]:
        [choice] = super().whole()["choices"]
        message, status = choice["message"], "incomplete" if choice["finish_reason"] == "length" else "completed"
        calls = [
            {"id": f"fc_{self.id}", "type": "function_call", "call_id": call["id"], "status": "completed"}
            | call["function"] for call in message.get("tool_calls", ())]
        texts = [self.message(status, message["content"])] if message["content"] or not calls else []
        return self.response(status, texts + calls)

    async def events(self, first: Sequence[Chunk], later: AsyncIterator[Sequence[Chunk]]) -> AsyncIterator[bytes]:
        numbers, begun = itertools.count(), False
        place = {"output_index": 0, "item_id": f"msg_{self.id}", "content_index": 0}

        def event(kind: str, **data) -> bytes:
            data = {"type": kind, "sequence_number": next(numbers)} | data
            return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()

        def begin() -> bytes:
            nonlocal begun
            begun = True
            added = event("response.output_item.added", output_index=0, item=self.message("in_progress"))
            return added + event("response.content_part.added", **place, part=self.text(""))

        def progress(chunks: Sequence[Chunk]) -> bytes:
            texts = filter(None, (one["delta"].get("content") for one in self.add(chunks)))
            return b"".join(
                (b"" if begun else begin()) + event("response.output_text.delta", **place, delta=text, logprobs=[])
                for text in texts)

        try:
            for kind in ("response.created", "response.in_progress"):
                yield event(kind, response=self.response("in_progress"))
            yield progress(first)
            async for chunks in later:
                yield progress(chunks)
        except ApiError as error:
            told = error.body()["error"]
            yield event("error", code=told["code"], message=told["message"], param=told["param"])
            return
        response = self.whole()
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                yield b"" if begun else begin()
                [part] = item["content"]
                yield event("response.output_text.done", **place, text=part["text"], logprobs=[])
                yield event("response.content_part.done", **place, part=part)
            else:
                call, arguments = {"output_index": index, "item_id": item["id"]}, item["arguments"]
                started = item | {"arguments": "", "status": "in_progress"}
                yield event("response.output_item.added", output_index=index, item=started)
                yield event("response.function_call_arguments.delta", **call, delta=arguments)
                yield event("response.function_call_arguments.done", **call, name=item["name"], arguments=arguments)
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(f"response.{response['status']}", response=response)
