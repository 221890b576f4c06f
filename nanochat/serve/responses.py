"""
OpenAI's Responses interface, as far as a text conversation needs it: its requests are conversations, its answers one
choice in another shape. previous_response_id, conversation and background are refused. Calls of the model's own tools
are not shown as items; a passage that was looked up is cited as a file, after the text that quotes it.
"""
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasPath, BeforeValidator, FailFast, Field

from nanochat.data.conversation import text_of
from nanochat.library.retrieval import file_of
from nanochat.serve.openai_requests import ChatRequest, Message
from nanochat.serve.protocol import ApiError, Chunks, Json
from nanochat.serve.replies import ChatReply, sse
from nanochat.serve.structured import ResponseFormat


def as_messages(value: Any) -> Any:
    """The input as a chat's messages. A text is one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    messages = []
    for item in value:
        match item:
            case {"type": "reasoning"}:
                # Clients send back the reasoning of another model.
                continue
            case {"type": "function_call"}:
                item = {"role": "assistant", "tool_calls": [{"function": item}]}
            case {"type": "function_call_output", "output": output}:
                item = {"role": "tool", "content": output}
        messages.append(item)
    return messages


class ResponsesRequest(ChatRequest):
    param: ClassVar[str] = "input"
    messages: Annotated[list[Message], Field(min_length=1), FailFast(), BeforeValidator(as_messages)] = Field(
        alias="input")
    instructions: str = ""
    n: Literal[1] = 1
    format: ResponseFormat = Field(ResponseFormat(), validation_alias=AliasPath("text", "format"))
    include: list[str] = []

    @property
    def wants_logprobs(self) -> bool:
        return super().wants_logprobs or "message.output_text.logprobs" in self.include

    def turns(self) -> list[Json]:
        turns = super().turns()
        if self.instructions:
            turns.insert(0, {"role": "system", "content": self.instructions})
        return turns


class ResponsesReply(ChatReply):
    """A chat's answer as items: a message, if there is text, and a function's call."""
    asked: ResponsesRequest

    def response(self, status: str, output: Sequence[Json] = ()) -> Json:
        usage = {
            "input_tokens": self.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        return {
            "id": self.id, "object": "response", "created_at": self.head["created"], "status": status,
            "model": self.asked.model, "output": [*output], "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "truncation": self.asked.truncation, "usage": usage,
        }

    def text_item(self, status: str, *content: Json) -> Json:
        return {
            "id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": status, "content": [*content]}

    def whole(self) -> Json:
        [choice] = self.choices
        output = []
        if text := text_of(choice.parts):
            logprobs = self.show(choice.logprobs)["content"]
            output.append(self.text_item("completed", text_part(text, logprobs, citations(choice.parts))))
        if choice.call:
            call = {"id": f"fc_{self.id}", "call_id": choice.call["id"], **choice.call["function"]}
            output.append({"type": "function_call", "status": "completed"} | call)
        return self.response("incomplete" if choice.finish_reason == "length" else "completed", output)

    async def events(self, chunks: Chunks) -> AsyncIterator[bytes]:
        numbers = itertools.count()
        place = {"output_index": 0, "item_id": f"msg_{self.id}", "content_index": 0}

        def event(name: str, **data) -> bytes:
            # The event's type replaces an error's own type.
            return f"event: {name}\n".encode() + sse(data | {"type": name, "sequence_number": next(numbers)})

        begun = False
        yield event("response.created", response=self.response("in_progress"))
        try:
            async for chunk in chunks:
                text = self.add(chunk)[1]["delta"].get("content")
                if not text:
                    continue
                if not begun:
                    begun = True
                    yield event("response.output_item.added", output_index=0, item=self.text_item("in_progress"))
                    yield event("response.content_part.added", **place, part=text_part(""))
                # Log-probabilities come with the whole text.
                yield event("response.output_text.delta", **place, delta=text, logprobs=[])
        except ApiError as error:
            yield event("error", **error.body()["error"])
            return
        response = self.whole()
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                [part] = item["content"]
                yield event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
            else:
                where = {"output_index": index, "item_id": item["id"]}
                begun_item = item | {"arguments": "", "status": "in_progress"}
                yield event("response.output_item.added", output_index=index, item=begun_item)
                yield event("response.function_call_arguments.delta", **where, delta=item["arguments"])
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(f"response.{response['status']}", response=response)


def text_part(text: str, logprobs: Sequence[Json] = (), annotations: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [*annotations], "logprobs": [*logprobs]}


def citations(parts: list[Json]) -> list[Json]:
    """The places of an answer's passages: a file and a line, or an object. The next text after a passage quotes it."""
    found = []
    for number, part in enumerate(parts):
        if "source" in part:
            texts = [later for later in parts[number:] if later["type"] == "text"]
            end = len(text_of(parts[:number] + texts[:1]))
            place = part["source"]["place"]
            found.append({"type": "file_citation", "index": end, "file_id": place, "filename": file_of(place) or place})
    return found
