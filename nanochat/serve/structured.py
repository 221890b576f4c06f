"""
Answers of a prescribed form: JSON, JSON that fits a schema, a call of a function. llguidance (the extra "structured")
makes a grammar of it, which says after every token which ones may come next; the engine draws among these only.

JSON is written without blanks between its tokens: a model that may write blanks may write nothing else until
max_tokens. For the same reason an object has only the properties that its schema lists, unless additionalProperties
says otherwise, an integer without limits is one that a float64 holds exactly, a time has at most six digits after the
point, and each number of a duration at most nine.
"""
import copy
import functools
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.engine import default_stop
from nanochat.inference.sampling import Grammar
from nanochat.runtime.errors import UserError
from nanochat.serve.grammar_trial import make_matcher, try_to_compile
from nanochat.serve.protocol import Json

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_INTEGER = 2**53 - 1
# Keywords of a JSON schema that have other schemas in them, as far as llguidance takes them.
MAPS = {"properties", "patternProperties", "$defs", "definitions"}     # by name, which may be that of any keyword
PARTS = {"items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf"}  # one or a list
POINT = r"^[^.]*(\.\d{1,6}([Zz+-].*)?)?$"
FINITE = {"date-time": POINT, "time": POINT, "duration": r"^(\D+\d{1,9})*\D$"}    # format: a pattern besides
CONDITIONS = {"allOf", "anyOf", "oneOf", "properties", "$ref"}  # two of them describe the same object

MAX_GRAMMAR_BYTES = 2**16


# ---- What a request says


def flat(value: Any) -> Any:
    """Chat nests what the Responses interface does not: {"type": "function", "function": {"name": …}}."""
    if not isinstance(value, dict):
        return value
    inner = value.get(str(value.get("type")))
    if not isinstance(inner, dict):
        return value
    return {"type": value["type"]} | inner


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    definition: Json = Field(default={}, alias="schema")

    def grammar(self) -> str | None:
        """None: any text."""
        if self.type == "text":
            return None
        return json_grammar({"type": "object"} if self.type == "json_object" else self.definition)


AnyResponseFormat = Annotated[ResponseFormat, BeforeValidator(flat)]


def json_grammar(schema: Json) -> str:
    """A grammar's expression for JSON that fits a schema."""
    schema = copy.deepcopy(schema)
    close(schema)
    schema["x-guidance"] = {"whitespace_flexible": False}   # llguidance's own options, which a client may not choose
    return f"%json {json.dumps(schema)}"


def close(root: Json) -> None:
    """
    Objects that list their properties, and say nothing of others, have no others; integers, times and durations get
    limits. Where a schema puts objects together from several parts, each of which would exclude the others' properties,
    objects stay open.
    """
    schemas = [root]
    is_combined = False
    for schema in schemas:  # grows meanwhile
        for keyword, value in schema.items():
            inner = []
            if keyword in PARTS:
                inner = value if isinstance(value, list) else [value]
            elif keyword in MAPS and isinstance(value, dict):
                inner = value.values()
            schemas += [one for one in inner if isinstance(one, dict)]
        all_of = schema.get("allOf")
        if isinstance(all_of, list) and len(all_of) > 1 or len(schema.keys() & CONDITIONS) > 1:
            is_combined = True
    for schema in schemas:
        types = schema.get("type")
        if not isinstance(types, list):
            types = [types]
        if "integer" in types and "number" not in types and not schema.keys() & {"const", "enum"}:
            schema.setdefault("minimum", -MAX_INTEGER)
            schema.setdefault("maximum", MAX_INTEGER)
        for format, pattern in FINITE.items():
            if schema.get("format") == format:
                schema.setdefault("pattern", pattern)
        if "properties" in schema and not is_combined:
            schema.setdefault("additionalProperties", False)


# ---- Grammars, in the engine's process


def compile_grammar(expression: str, tokenizer: Tokenizer) -> Grammar:
    """
    Takes milliseconds, at most a few seconds. UserError for what is wrong, too large, takes longer or is not supported,
    or if the library is missing.
    """
    if len(expression) > MAX_GRAMMAR_BYTES:
        sizes = f"{len(expression):,} characters; at most {MAX_GRAMMAR_BYTES:,} are allowed"
        raise UserError(f"the form of the answer: {sizes}")
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise UserError("answers of a prescribed form need the package llguidance: . ./setup.sh structured") from None
    vocab_size = tokenizer.get_vocab_size()
    try_to_compile(expression, vocab_size)
    return Grammar(make_matcher(expression, vocabulary_of(tokenizer)), vocab_size)


@functools.cache
def vocabulary_of(tokenizer: Tokenizer) -> "LLTokenizer":
    """As llguidance has it. Takes half a second for 65,536 tokens."""
    from llguidance.tiktoken import lltokenizer_from_encoding

    stop = [*default_stop(tokenizer)]
    return lltokenizer_from_encoding(tokenizer.encoding, n_vocab=tokenizer.get_vocab_size(), eos_token=stop)
