"""
Text to token ids and back: byte-level byte-pair encoding, as in GPT-4.

A text is first split into words, numbers, punctuation and whitespace. Inside each piece, the adjacent pair that
forms the token of the lowest rank is merged, until no pair forms a token. Ids: 0 to 255 are the bytes, then the merges
in the order in which they were learned (the rank), then the special tokens.

Merges are learned by Hugging Face's `tokenizers` and applied by `tiktoken`. Special tokens never come out of a
text: only `encode_special` and `prepend` produce them.
"""
import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tiktoken

from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir, write_text

SPECIAL_TOKENS = (
    "<|bos|>",              # every document begins with it
    "<|user_start|>", "<|user_end|>",
    "<|assistant_start|>", "<|assistant_end|>",
    "<|python_start|>", "<|python_end|>",    # the assistant calls a tool
    "<|output_start|>", "<|output_end|>",    # the tool's answer
)

# Merges stay within these pieces of a text. The group holds the alternatives without lookahead: the regex engine runs
# it as one automaton, a quarter faster than separate alternatives. Whitespace is bounded because lookahead backtracks:
# a million blanks overflow its stack. (Letters and punctuation may run on for megabytes.)
def split_pattern(letters: str = "*", signs: str = "+") -> str:
    """letters, signs: how many letters follow a word's first one, and how many signs stand together."""
    return (
        r"(?:'(?i:[sdmt]|ll|ve|re)"           # the ends of I'm, you're, we'll
        # A word, with one blank or sign before it; many scripts write vowels as marks, but marks after no letter
        # (in emoji) are signs.
        r"|[^\r\n\p{L}\p{N}]?\p{L}[\p{L}\p{M}]" + letters +
        r"|\p{N}{1,2}"                        # digits in twos: few tokens per number, and only 100 pairs to learn
        # Punctuation, with the line ends after it.
        r"| ?[^\s\p{L}\p{N}]" + signs + r"[\r\n]*"
        r"|\s{0,255}[\r\n])"                  # blank lines
        r"|\s{1,256}(?!\S)"                   # blanks except the last one, which belongs to the next piece
        r"|\s"
    )


SPLIT_PATTERN = split_pattern()
FILE_NAME = "tokenizer_nanochat.json"        # not tokenizer.json: that name promises Hugging Face's format


class Tokenizer:
    """An immutable vocabulary, ready to encode. `encoding` is the tiktoken encoder of the ordinary tokens."""

    def __init__(self, merges: Sequence[bytes], pattern: str = SPLIT_PATTERN) -> None:
        """merges: the bytes of the tokens after the 256 single bytes, in rank order."""
        self.merges = tuple(merges)
        self.pattern = pattern
        self.raw_tokens = [bytes([byte]) for byte in range(256)] + list(merges)  # id -> bytes, without the specials
        self._special_ids = {name: len(self.raw_tokens) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding(
            "nanochat", pat_str=pattern, special_tokens=self._special_ids,
            mergeable_ranks={token: rank for rank, token in enumerate(self.raw_tokens)})

    def content(self) -> dict[str, object]:
        """Everything that decides how a text is encoded, as plain data."""
        return {"pattern": self.pattern, "special_tokens": list(SPECIAL_TOKENS),
                "merges": [base64.b64encode(token).decode("ascii") for token in self.merges]}

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content, as hex: equal exactly for tokenizers that give every text the same ids."""
        canonical = json.dumps(self.content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def save(self, folder: Path) -> None:
        """Write this tokenizer's one file into a folder, whole or not at all."""
        document = {"format": 1, "fingerprint": self.fingerprint} | self.content()
        write_text(folder / FILE_NAME, json.dumps(document, indent=0) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read what `save` wrote. UserError if it is missing or damaged."""
        path = folder / FILE_NAME
        try:
            document = json.loads(path.read_bytes())
            merges = [base64.b64decode(token, validate=True) for token in document["merges"]]
            tokenizer = cls(merges, document["pattern"])
            if tokenizer.fingerprint == document["fingerprint"]:
                return tokenizer
        # Missing, not UTF-8, not JSON, not base64, or not what was written: the advice is the same.
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise UserError(f"{path} is missing or damaged: train it again: python -m scripts.tok_train --data=…")

    def encode(self, text: str | list[str], prepend: str | None = None) -> list:
        """
        The ids of a text; for a list of texts, a list of ids for each. A list is faster: it uses threads without the
        GIL.

        prepend: a special token before every text. No text raises an error; unpaired surrogates, which have no bytes,
        become U+FFFD.
        """
        first = [] if prepend is None else [self.encode_special(prepend)]
        if isinstance(text, str):
            return first + self.encoding.encode_ordinary(text)
        return [first + ids for ids in self.encoding.encode_ordinary_batch(text)]

    def encode_special(self, name: str) -> int:
        """The id of a special token; KeyError for an unknown name."""
        return self._special_ids[name]

    def get_bos_token_id(self) -> int:
        """The id of the token that begins every document."""
        return self.encode_special("<|bos|>")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD, special tokens become their names."""
        return self.encoding.decode(list(ids))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of ids. KeyError for an id outside the vocabulary."""
        return self.encoding.decode_bytes(list(ids))

    def get_vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return self.encoding.n_vocab

    def token_bytes(self) -> np.ndarray:
        """
        (vocab_size,) int32: how many bytes of text each id stands for, 0 for special tokens.

        The raw bytes are counted: half an emoji decodes to U+FFFD, which would always count as three.
        """
        return np.array([len(token) for token in self.raw_tokens] + [0] * len(SPECIAL_TOKENS), dtype=np.int32)


def byte_alphabet() -> dict[str, int]:
    """
    The byte that each character stands for in Hugging Face's byte-level models.

    These models merge characters, so each byte gets a visible one: visible Latin-1 characters stand for themselves,
    the other bytes follow in order from U+0100.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


# ---- The tokenizer of a data source

def tokenizer_dir(name: str) -> Path:
    """The folder of the tokenizer for this data source."""
    return base_dir() / "tokenizer" / name


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer trained on this data source. UserError if there is none or it cannot be used."""
    folder = tokenizer_dir(name)
    if not (folder / FILE_NAME).is_file():
        raise UserError(f"no tokenizer for data {name!r} in {folder}; "
                        f"make one: python -m scripts.tok_train --data={name}")
    return Tokenizer.load(folder)
