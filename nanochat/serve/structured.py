"""
Answers of a prescribed form: JSON, JSON that fits a schema, one of several texts, a call of a function. Here is what a
request says of it, and the grammar's expression for that; grammars.py compiles it.

JSON is written without blanks between its tokens: a model that may write blanks may write nothing else until
max_tokens.
"""
import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, FailFast, Field, model_validator

from nanochat.tokenizer import Tokenizer

Choices = Annotated[list[str], Field(min_length=1), FailFast()]


class JsonSchema(BaseModel):
    definition: dict[str, Any] = Field({}, alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel, extra="forbid"):
    choice: Choices


class Formed(BaseModel):
    """The fields of a request that prescribe a form: OpenAI's; for lists of choices vLLM's, the newer and the older."""
    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs | None = None
    guided_choice: Choices = []

    @model_validator(mode="after")
    def check_form(self) -> Self:
        formats = self.response_format.type != "text", self.structured_outputs, self.guided_choice
        if sum(map(bool, formats)) > 1:
            raise ValueError("only one of response_format, structured_outputs and guided_choice can be met")
        if self.response_format.type == "json_schema" and self.response_format.json_schema is None:
            raise ValueError("response_format.json_schema is missing")
        return self

    def form(self, tokenizer: Tokenizer) -> str | None:
        """A grammar's expression for the answer; None: any text."""
        choices = self.structured_outputs.choice if self.structured_outputs else self.guided_choice
        if choices:
            return " | ".join(map(json.dumps, choices))
        if self.response_format.type == "text":
            return None
        any_object = self.response_format.type == "json_object"
        return json_of({"type": "object"} if any_object else self.response_format.json_schema.definition)


def json_of(schema: dict[str, Any]) -> str:
    """A grammar's expression for JSON that fits a schema."""
    compact = {"x-guidance": {"whitespace_flexible": False}}  # llguidance's own options, which a client may not choose
    return f"%json {json.dumps(schema | compact)}"
