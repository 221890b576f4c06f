"""
OpenAI's Responses interface, as far as a text conversation needs it: its requests are conversations, its answers one
choice in another shape. previous_response_id, conversation and background are refused. What the calculator did is in no
item.
"""
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, FailFast

from nanochat.serve.protocol import ApiError, Chunks, Json
from nanochat.serve.replies import ChatReply, sse
from nanochat.serve.requests import ConversationRequest, Parts, result_turn, text_of, turn
from nanochat.serve.structured import ResponseFormat
from nanochat.serve.tools import FunctionCall


class InputItem(BaseModel):
    """A message, a call of a function, or its result."""
    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "assistant"
    content: Parts = []
    name: str = ""
    arguments: str = ""
    output: Parts = []

    def turn(self) -> Json:
        if self.type == "function_call_output":
            return result_turn(text_of(self.output))
        if self.type == "function_call":
            call = FunctionCall(name=self.name, arguments=self.arguments)
            return {"role": "assistant", "content": [call.part()]}
        return turn(self.role, self.content)


def as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextSettings(BaseModel):
    format: ResponseFormat = ResponseFormat()


class ResponsesRequest(ConversationRequest):
    param: ClassVar[str] = "input"
    input: Annotated[list[InputItem], FailFast(), BeforeValidator(as_items)]
    instructions: str | None = None
    n: Literal[1] = 1
    text: TextSettings = TextSettings()

    @property
    def format(self) -> ResponseFormat:
        return self.text.format

    def turns(self) -> list[Json]:
        turns = [item.turn() for item in self.input]
        if self.instructions:
            turns.insert(0, {"role": "system", "content": self.instructions})
        return turns


class ResponsesReply(ChatReply):
    prefix = "resp_"

    def response(self, status: str, output: Sequence[dict] = ()) -> Json:
        usage = {
            "input_tokens": self.prompt_tokens, "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        repeated = {"instructions", "temperature", "top_p", "tools", "tool_choice", "text"}
        return self.asked.model_dump(include=repeated, by_alias=True) | {
            "id": self.head["id"], "object": "response", "created_at": self.head["created"], "status": status,
            "model": self.head["model"], "output": list(output), "error": None, "parallel_tool_calls": True,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": usage if output else None,
        }

    def message(self, status: str, *content: Json) -> Json:
        return {
            "id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": status, "content": [*content]}

    def whole(self) -> Json:
        [written] = self.written.values()
        status = "incomplete" if written.finish_reason == "length" else "completed"
        output = []
        if written.text() or not written.call:
            output.append(self.message(status, text_part(written.text())))
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

        def begin() -> bytes:
            added = event("response.output_item.added", output_index=0, item=self.message("in_progress"))
            return added + event("response.content_part.added", **place, part=text_part(""))

        begun = False
        yield event("response.created", response=self.response("in_progress"))
        try:
            async for several in chunks:
                for choice in self.add(several):
                    text = choice["delta"].get("content")
                    if text and not begun:
                        begun = True
                        yield begin()
                    if text:
                        yield event("response.output_text.delta", **place, delta=text, logprobs=[])
        except ApiError as error:
            reported = error.body()["error"]
            yield event("error", code=reported["code"], message=reported["message"], param=reported["param"])
            return
        response = self.whole()
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                if not begun:
                    yield begin()
                [part] = item["content"]
                yield event("response.output_text.done", **place, text=part["text"], logprobs=[])
                yield event("response.content_part.done", **place, part=part)
            else:
                begun_item = item | {"arguments": "", "status": "in_progress"}
                call = {"output_index": index, "item_id": item["id"]}
                arguments = item["arguments"]
                yield event("response.output_item.added", output_index=index, item=begun_item)
                yield event("response.function_call_arguments.delta", **call, delta=arguments)
                yield event("response.function_call_arguments.done", **call, name=item["name"], arguments=arguments)
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(f"response.{response['status']}", response=response)


def text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
