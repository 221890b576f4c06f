"""
Our tokenizer in Hugging Face's format, and the way back.

Both encoders give every text the same ids: tiktoken merges whatever pair of neighbours forms a token, `tokenizers` only
the pairs it is told, so the pair that forms each token is found by encoding it. What no text may become here, a special
token, any text may become there; the chat template prevents it with characters that are no text.
"""
import json
import math
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from nanochat.errors import UserError
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer, byte_alphabet

# Pairs of noncharacters, which Unicode keeps for such internal use: the template writes them, the tokenizer removes them.
GUARD = "\ufdd0\ufdd1"  # between "<" and "|", lest a text spell a special token: gone before anything is merged
SEAM = "\ufdd0\ufdd2"   # between two parts of text: gone as well, but nothing is merged across it

CHAT_TEMPLATE = """\
{#- Invisible in the two strings that follow: pairs of noncharacters, U+FDD0 U+FDD1 and U+FDD0 U+FDD2, which the tokenizer
    removes. The first keeps texts from spelling special tokens, the second keeps parts of text from being merged. -#}
{%- set guarded = "<GUARD|" -%}
{%- set seam = "SEAM" -%}

{%- macro plain(text) -%}
    {{- text | replace("<|", guarded) -}}
{%- endmacro -%}

{%- macro written(message) -%}
    {%- if message.content is string -%}
        {{- plain(message.content) -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == "text" -%}
                {{- seam if not loop.first and loop.previtem.type == "text" else "" -}}
                {{- plain(part.text) -}}
            {%- elif part.type == "python" and message.role == "assistant" -%}
                {{- "<|python_start|>" ~ plain(part.text) ~ "<|python_end|>" -}}
            {%- elif part.type == "python_output" and message.role == "assistant" -%}
                {{- "<|output_start|>" ~ plain(part.text) ~ "<|output_end|>" -}}
            {%- else -%}
                {{- raise_exception("a part of the " ~ message.role ~ "'s content has type " ~ part.type ~ "; expected text, or of the assistant python, python_output") -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}

{%- set turns = messages -%}
{%- set system = "" -%}
{%- if messages and messages[0].role == "system" -%}
    {%- set system = written(messages[0]) ~ "\\n\\n" -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- if not turns -%}
    {{- raise_exception("there are no messages of user and assistant") -}}
{%- endif -%}
{%- if add_generation_prompt and turns[-1].role == "assistant" -%}
    {%- set turns = turns[:-1] -%} {#- the answer that is to be written again -#}
{%- endif -%}

{{- "<|bos|>" -}}
{%- for message in turns -%}
    {%- if message.role != ("user" if loop.index0 % 2 == 0 else "assistant") -%}
        {{- raise_exception("user and assistant must take turns, the user first; a system message can only come before them") -}}
    {%- endif -%}
    {{- "<|" ~ message.role ~ "_start|>" -}}
    {{- system if loop.first else "" -}}
    {{- written(message) -}}
    {{- "<|" ~ message.role ~ "_end|>" -}}
{%- endfor -%}
{{- "<|assistant_start|>" if add_generation_prompt else "" -}}
""".replace("GUARD", GUARD).replace("SEAM", SEAM)

# What an imported tokenizer is tried on: where encoders of this kind are known to differ.
PROBES = (
    "", " ", "  a", "\r\n\r\n x\n", "\t\t\n  \n", "I'm YOU'LL we've 'ſ", "x1234567890 3.14", "a_b.c(d);\n\n\tif __x__:", "naïve café, e\u0301",
    "日本語のテキスト。", "العربية ١٢٣", "🙂👩‍👩‍👧‍👦🏴", "\u00a0\u2003\u200b\ufeff", "\x00\x01\x7f", "½²Ⅷ௧", "=" * 70, " " * 300 + "a",
)


# ---- There

def to_hf(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The same vocabulary, as what tokenizer.json holds. UserError for one that has no such form."""
    if tokenizer.special_tokens != SPECIAL_TOKENS:
        raise UserError(f"the tokenizer has the special tokens {' '.join(tokenizer.special_tokens)}; only {' '.join(SPECIAL_TOKENS)} can be exported")
    letters = {byte: char for char, byte in byte_alphabet().items()}
    ranks = {token: rank for rank, token in enumerate(tokenizer.raw_tokens)}

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    pairs = [last_merge(token, ranks) for token in tokenizer.merges]
    merges = [(spelled(pair[0]), spelled(pair[1])) for pair in pairs if len(pair) == 2]
    # ignore_merges: a piece that is a token is that token, even one that no merges lead to; so does tiktoken.
    result = tokenizers.Tokenizer(models.BPE({spelled(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    result.normalizer = normalizers.Replace(GUARD, "")
    result.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(SEAM, "removed"),
        pre_tokenizers.Split(Regex(tokenizer.pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    result.decoder = decoders.ByteLevel()
    bos = "<|bos|>", tokenizer.get_bos_token_id()  # in front of a plain text, as of every document in training
    result.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B:1", special_tokens=[bos])
    result.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL_TOKENS])
    if [result.token_to_id(name) for name in SPECIAL_TOKENS] != [tokenizer.encode_special(name) for name in SPECIAL_TOKENS]:
        raise UserError("the tokenizer has a token twice, or an ordinary one that reads like a special token: it cannot be exported")
    return result


def last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """
    The two tokens that byte-pair encoding merges last on its way from a token's bytes to the token; more than two
    where it never gets there. No other pair ever forms it: what is merged inside of it is the same in every text.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], math.inf), i) for i in range(len(parts) - 1))
        if rank == math.inf:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def tokenizer_config(tokenizer: Tokenizer, sequence_len: int) -> dict:
    """
    What tokenizer_config.json holds. Padding is <|bos|>, which is never a target: with <|assistant_end|> trainers that
    leave padding out of the loss would leave out the end of every answer.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": sequence_len, "clean_up_tokenization_spaces": False,
        "bos_token": "<|bos|>", "eos_token": "<|assistant_end|>", "pad_token": "<|bos|>",
    }


# ---- And back

def from_hf(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. UserError when it is none of ours: byte-level, bytes first, our special tokens last."""
    try:
        text = path.read_text(encoding="utf-8")
        there, document = tokenizers.Tokenizer.from_str(text), json.loads(text)
        if document["model"]["type"] != "BPE":
            raise UserError(f"{path} is no byte-pair encoding but {document['model']['type']}")
        specials = {added["content"]: added["id"] for added in document["added_tokens"]}
        letters = byte_alphabet()
        ranks = {
            bytes(letters[char] for char in token): rank
            for token, rank in document["model"]["vocab"].items() if token not in specials
        }
        steps = document["pre_tokenizer"].get("pretokenizers", [document["pre_tokenizer"]])
        patterns = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split" and "Regex" in step["pattern"]]
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no {path.name} in {path.parent}") from None
    except Exception as error:  # the Rust side has no class of its own: not JSON, a part missing, not byte-level
        raise UserError(f"{path} cannot be read as a byte-level tokenizer: {type(error).__name__}: {error}") from error
    if len(patterns) != 1:
        raise UserError(f"{path} splits texts by {len(patterns)} patterns; this program's tokenizers by one")
    tokenizer = from_ranks(ranks, patterns[0], specials, path)
    for probe in PROBES:
        if (ids := there.encode(probe, add_special_tokens=False).ids) != tokenizer.encode(probe):
            raise UserError(f"{path} encodes {probe[:40]!r} as {ids[:8]}, this program's encoder as {tokenizer.encode(probe)[:8]}: it works in another way")
    return tokenizer


def from_ranks(ranks: dict[bytes, int], pattern: str, specials: dict[str, int], where: Path) -> Tokenizer:
    """
    A tokenizer from the ids of its ordinary and its special tokens. UserError, naming the file `where`, unless the
    bytes have ids 0 to 255, the merges follow without a gap, and then our special tokens in their order.
    """
    merges = sorted(ranks, key=ranks.__getitem__)
    if [ranks[token] for token in merges] != list(range(len(merges))):
        raise UserError(f"{where}: the ids of its {len(merges):,} ordinary tokens are not 0 to {len(merges) - 1:,}")
    if merges[:256] != [bytes([byte]) for byte in range(256)]:
        raise UserError(f"{where}: the ids 0 to 255 are not the bytes in their order, as this program's tokenizers have them")
    expected = {name: len(merges) + i for i, name in enumerate(SPECIAL_TOKENS)}
    if specials != expected:
        there = " ".join(sorted(specials, key=specials.__getitem__))
        raise UserError(f"{where} has the special tokens {there or '(none)'}, from id {min(specials.values(), default='-')}; "
                        f"expected {' '.join(SPECIAL_TOKENS)}, from id {len(merges)}")
    try:
        return Tokenizer(merges[256:], pattern)
    except ValueError as error:  # the regular expression
        raise UserError(f"{where}: its pattern cannot be used: {error}") from error
