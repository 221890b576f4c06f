"""
OpenAI's Responses interface, as far as a text conversation needs it: its requests are conversations, its answers one
choice in another shape. previous_response_id, conversation and background are refused. What the calculator did is in no
item.
"""
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasPath, BeforeValidator, FailFast, Field

from nanochat.data.conversation import text_of
from nanochat.serve.openai_requests import ConversationRequest, Message
from nanochat.serve.protocol import ApiError, Chunks, Json
from nanochat.serve.replies import ChatReply, sse
from nanochat.serve.structured import ResponseFormat


def as_message(item: Any) -> Any:
    """An item of the input as a message of a chat."""
    match item:
        case {"type": "function_call"}:
            return {"role": "assistant", "tool_calls": [{"function": item}]}
        case {"type": "function_call_output", "output": output}:
            return {"role": "tool", "content": output}
    return item


def as_items(value: Any) -> Any:
    """A text is one message. Reasoning, which clients send back as they had it from another model, is none."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [item for item in value if not (isinstance(item, dict) and item.get("type") == "reasoning")]


Items = Annotated[
    list[Annotated[Message, BeforeValidator(as_message)]], Field(min_length=1), FailFast(), BeforeValidator(as_items)]


class ResponsesRequest(ConversationRequest):
    param: ClassVar[str] = "input"
    messages: Items = Field(alias="input")
    instructions: str = ""
    n: Literal[1] = 1
    format: ResponseFormat = Field(ResponseFormat(), validation_alias=AliasPath("text", "format"))
    include: list[str] = []

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs > 0 or "message.output_text.logprobs" in self.include

    def turns(self) -> list[Json]:
        turns = super().turns()
        if self.instructions:
            turns.insert(0, {"role": "system", "content": self.instructions})
        return turns


class ResponsesReply(ChatReply):
    asked: ResponsesRequest

    def response(self, status: str, output: Sequence[dict] = ()) -> Json:
        usage = {
            "input_tokens": self.prompt_tokens, "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        return {
            "id": self.id, "object": "response", "created_at": self.head["created"], "status": status,
            "model": self.asked.model, "output": list(output), "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "truncation": self.asked.truncation, "usage": usage,
        }

    def message(self, status: str, *content: Json) -> Json:
        return {
            "id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": status, "content": [*content]}

    def whole(self) -> Json:
        [written] = self.written
        status = "incomplete" if written.finish_reason == "length" else "completed"
        output = []
        if text := text_of(written.parts):
            output.append(self.message(status, text_part(text, self.describe(written.logprobs)["content"])))
        if written.call:
            function = written.call["function"]
            output.append({
                "id": f"fc_{self.id}", "call_id": written.call["id"], "type": "function_call", "status": "completed",
                **function})
        return self.response(status, output)

    async def events(self, chunks: Chunks) -> AsyncIterator[bytes]:
        numbers = itertools.count()
        place = {"output_index": 0, "item_id": f"msg_{self.id}", "content_index": 0}

        def event(kind: str, **data) -> bytes:
            return f"event: {kind}\n".encode() + sse({"type": kind, "sequence_number": next(numbers), **data})

        begun = False
        yield event("response.created", response=self.response("in_progress"))
        try:
            async for several in chunks:
                for choice in self.add(several):
                    text = choice["delta"].get("content")
                    logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
                    if text and not begun:
                        begun = True
                        yield event("response.output_item.added", output_index=0, item=self.message("in_progress"))
                        yield event("response.content_part.added", **place, part=text_part(""))
                    if text:
                        yield event("response.output_text.delta", **place, delta=text, logprobs=logprobs)
        except ApiError as error:
            reported = error.body()["error"]
            yield event("error", code=reported["code"], message=reported["message"], param=reported["param"])
            return
        response = self.whole()
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                part = item["content"][0]
                yield event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
            else:
                begun_item = item | {"arguments": "", "status": "in_progress"}
                yield event("response.output_item.added", output_index=index, item=begun_item)
                yield event(
                    "response.function_call_arguments.delta", output_index=index, item_id=item["id"],
                    delta=item["arguments"])
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(f"response.{response['status']}", response=response)


def text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}
