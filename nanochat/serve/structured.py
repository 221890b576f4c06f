"""
Answers of a prescribed form: JSON, JSON that fits a schema, one of several texts, a call of a function. Here is what a
request says of it, and the grammar's expression for that; grammars.py compiles it.

JSON is written without blanks between its tokens: a model that may write blanks may write nothing else until
max_tokens. For the same reason an object has only the properties that its schema lists, unless additionalProperties
says otherwise, and an integer without limits is one that a float64 holds exactly.
"""
import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, FailFast, Field, model_validator

from nanochat.data.tokenizer import Tokenizer

# Keywords of a JSON schema that have others in them: those that the same value must fit; by name; a list, or one.
COMBINED = {"allOf", "anyOf", "oneOf"}
NAMED = {"properties", "patternProperties", "$defs", "definitions"}
NESTED = COMBINED | NAMED | {"items", "prefixItems", "additionalProperties"}

LIMITS = "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"
MAX_INTEGER = 2**53 - 1

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
    return f"%json {json.dumps(bounded(schema) | compact)}"


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """
    A copy in which objects that list properties, and say nothing of others, have no others, and integers have limits.
    Objects that are put together from several schemas stay open: none of these lists all properties.
    """
    root = json.loads(json.dumps(schema))
    found, put_together = [root], []
    for one in found:
        found += schemas_in(one, NESTED)
        conditions = one.keys() & (COMBINED | {"properties", "$ref"})
        if len(conditions) > 1 or len(schemas_in(one, {"allOf"})) > 1:
            put_together.append(one)
    parts = parts_of(put_together, root)
    for one in found:
        if one.get("type") == "integer" and not one.keys() & {"const", "enum"}:
            limits = [one[name] for name in LIMITS if name in one]
            if all(isinstance(limit, (int, float)) and abs(limit) < MAX_INTEGER for limit in limits):
                one.setdefault("minimum", -MAX_INTEGER)
                one.setdefault("maximum", MAX_INTEGER)
        properties, required = one.get("properties"), one.get("required", [])
        if id(one) in parts or "additionalProperties" in one or not isinstance(properties, dict):
            continue
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        if names <= properties.keys():
            one["additionalProperties"] = False
    return root


def schemas_in(schema: dict[str, Any], keywords: set[str]) -> list[dict]:
    """The schemas directly below these keywords."""
    found = []
    for keyword in schema.keys() & keywords:
        value = schema[keyword]
        if keyword in NAMED and isinstance(value, dict):
            found += value.values()
        else:
            found += value if isinstance(value, list) else [value]
    return [one for one in found if isinstance(one, dict)]


def parts_of(schemas: list[dict], root: dict[str, Any]) -> set[int]:
    """The ids of these schemas and of all that the same values must fit."""
    ids, waiting = set(), schemas
    while waiting:
        schema = waiting.pop()
        if id(schema) in ids:
            continue
        ids.add(id(schema))
        waiting += schemas_in(schema, COMBINED)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            target: Any = root
            for name in reference.split("/")[1:]:
                target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
            if isinstance(target, dict):
                waiting.append(target)
    return ids
