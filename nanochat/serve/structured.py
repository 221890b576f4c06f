"""
Answers of a prescribed form: JSON, JSON that fits a schema, a function call. llguidance (the extra "structured")
compiles a grammar, which says after every token which tokens may come next; the engine draws only among these.

JSON has no blanks between its tokens: a model that may write blanks may write nothing else until max_tokens. For the
same reason an object has only the properties that its schema lists, unless additionalProperties says otherwise, a
number without limits lies where a float64 holds every integer, and has no exponent and at most nine digits after the
point unless multipleOf allows more, a time has at most six digits after the point, and each number of a duration at
most nine.
"""
import copy
import functools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.engine import default_stop
from nanochat.inference.sampling import Grammar
from nanochat.runtime.errors import UserError, first_line
from nanochat.serve.protocol import TABLES, Json

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_GRAMMAR_LENGTH = 2**16
MAX_INTEGER = 2**53 - 1
SCHEMAS = TABLES["schemas"]


# ---- What a request says


def flat(value: Any) -> Any:
    """OpenAI nests a definition: {"type": "function", "function": {"name": …}}."""
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
    # llguidance's own options; they replace a client's.
    schema["x-guidance"] = {"whitespace_flexible": False}
    return f"%json {json.dumps(schema)}"


def close(root: Json) -> None:
    """
    Close what a schema leaves open: an object that lists its properties, and does not mention others, gets no others;
    numbers, times and durations get limits. If a schema describes one object in several parts, closing a part would
    exclude the properties of the other parts, so all its objects stay open.
    """
    schemas = [root]
    is_combined = False
    # The list grows during the loop: a schema's inner schemas follow it.
    for schema in schemas:
        for keyword, value in schema.items():
            inner = []
            if keyword in SCHEMAS["parts"]:
                inner = value if isinstance(value, list) else [value]
            elif keyword in SCHEMAS["maps"] and isinstance(value, dict):
                inner = value.values()
            schemas += [one for one in inner if isinstance(one, dict)]
        all_of = schema.get("allOf")
        if isinstance(all_of, list) and len(all_of) > 1 or len(schema.keys() & SCHEMAS["conditions"]) > 1:
            is_combined = True
    for schema in schemas:
        types = schema.get("type")
        if not isinstance(types, list):
            types = [types]
        if ("integer" in types or "number" in types) and not schema.keys() & {"const", "enum"}:
            schema.setdefault("minimum", -MAX_INTEGER)
            schema.setdefault("maximum", MAX_INTEGER)
            if "number" in types:
                schema.setdefault("multipleOf", 1e-9)
        for format, pattern in TABLES["finite"].items():
            if schema.get("format") == format:
                schema.setdefault("pattern", pattern)
        if "properties" in schema and not is_combined:
            schema.setdefault("additionalProperties", False)


# ---- Grammars


def compile_grammar(expression: str, tokenizer: Tokenizer) -> Grammar:
    """
    UserError if the grammar is wrong, too long, not supported or takes seconds to compile, or if the library is
    missing. Can be called from any thread.
    """
    try:
        from nanochat.serve.grammar_trial import make_matcher
    except ImportError:
        raise UserError("answers of a prescribed form need the package llguidance: . ./setup.sh structured") from None
    error = what_is_wrong(expression)
    if error:
        raise UserError(f"the form of the answer: {error}")
    return Grammar(make_matcher(expression, vocabulary_of(tokenizer)), tokenizer.get_vocab_size())


@functools.lru_cache(256)
def what_is_wrong(expression: str) -> str:
    """Why the engine cannot use a grammar; "" if it can."""
    if len(expression) > MAX_GRAMMAR_LENGTH:
        return f"{len(expression):,} characters; at most {MAX_GRAMMAR_LENGTH:,} are allowed"
    command = [sys.executable, "-X", "utf8", "-m", "nanochat.serve.grammar_trial"]
    trial = subprocess.run(command, input=expression, capture_output=True, encoding="utf-8")
    if trial.returncode:
        return "it takes seconds to compile; use fewer or simpler patterns"
    return first_line(ValueError(trial.stdout)) if trial.stdout else ""


@functools.cache
def vocabulary_of(tokenizer: Tokenizer) -> "LLTokenizer":
    """The tokenizer in llguidance's form. Takes half a second for 65,536 tokens."""
    from llguidance.tiktoken import lltokenizer_from_encoding

    stop = [*default_stop(tokenizer)]
    return lltokenizer_from_encoding(tokenizer.encoding, n_vocab=tokenizer.get_vocab_size(), eos_token=stop)
