"""The text of a file in whatever encoding: UTF-8 where it is that, else the one that is named, never silent garbage."""
import contextlib
import io
import re
from collections import Counter
from pathlib import Path
from typing import BinaryIO, TextIO

import pyarrow as pa

from nanochat.runtime.errors import UserError

UTF8 = "utf-8-sig"             # without the mark that some programs begin a file with
BLOCK = 1 << 18                # characters, or bytes, to look at together
BAD_SHARE = 0.001              # of a file's characters that may be replaced: more is another encoding
FEW_BAD = 10                   # and so many of a shorter file, where they are at most one in a hundred; one always
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}


def open_bytes(path: Path) -> BinaryIO:
    """A file's bytes, decompressed."""
    codec = COMPRESSION.get(path.suffix.lower())
    return io.BufferedReader(pa.input_stream(str(path), compression=codec)) if codec else open(path, "rb")


def open_text(path: Path, encoding: str, errors: str = "replace", newline: str = "\n") -> TextIO:
    """A file's text, decompressed, its line ends as they are."""
    return io.TextIOWrapper(open_bytes(path), encoding, errors, newline)


def encoding_of(path: Path, encoding: str) -> tuple[str, int, int]:
    """
    How to read a text file: UTF-8 if it is that, if a little damaged as well, else `encoding`; its characters, and how
    many of them are U+FFFD, in place of what cannot be read so, or NUL, as of UTF-16. UserError where these are
    `too_many`, with a guess if it is not UTF-8.
    """
    named = UTF8 if encoding == "utf-8" else encoding
    for candidate, errors in dict.fromkeys([(UTF8, "strict"), (UTF8, "replace"), (named, "replace")]):
        characters = foreign = bad = 0
        with contextlib.suppress(UnicodeError), open_text(path, candidate, errors) as file:
            while block := file.read(BLOCK):
                characters += len(block)
                foreign += len(block) - len(block.encode("ascii", "ignore"))
                bad += block.count("\ufffd") + block.count("\0")
            utf8 = candidate == UTF8 and foreign > 10 * bad  # other encodings hardly ever look like it
            if not too_many(bad, characters) and (utf8 or errors == "strict" or candidate == named):
                return candidate, characters, bad
            if utf8:  # in another encoding it would be garbage
                damage = f"{bad:,} of {characters:,} characters are damaged"
                raise UserError(f"{path} is UTF-8, but {damage}; mend it, or take it away")
    raise not_text(path, encoding, bad, characters)


def too_many(bad: int, characters: int) -> bool:
    return bad > max(1, min(FEW_BAD, characters / 100), BAD_SHARE * characters)


def not_text(path: Path, encoding: str, bad: int, characters: int, where: str = "") -> UserError:
    """The error about a file, or about all files and this the worst of them, with what its encoding may be."""
    import charset_normalizer  # here: few need it

    with open_bytes(path) as file:
        blocks = iter(lambda: file.read(BLOCK), b"")
        telling = next((block for block in blocks if not block.isascii() or 0 in block), b"")
    guesses = charset_normalizer.from_bytes(telling)
    names = [guess.encoding for guess in guesses][:1]
    if any("cp1252" in guess.could_be_from_charset for guess in guesses):
        names.append("cp1252")  # Western text is often taken for cp1250, which has other letters at a few places
    texts = {telling.decode(name, "replace"): name for name in names if name not in ("ascii", "utf_8", encoding)}
    found = []
    for text, name in texts.items():
        telling_words = re.findall(r"\w*[^\x00-\x7f]\w*", text) or text.split()
        preview = " ".join(list(dict.fromkeys(telling_words))[:8])[:60]
        found.insert(0, f"{name} (“{preview}”): --encoding={name}")
    advice = f"perhaps it is {'; or '.join(found)}" if found else "convert it to UTF-8, or take it away"
    # No bad character: it stopped at the first byte, as utf-16 without its mark does.
    count = f"is not {encoding}: {bad:,} of {characters:,} characters{where} cannot be read"
    return UserError(f"{path} {count if bad else f'cannot be read as {encoding}'}; {advice}")


def decode(data: bytes, tally: Counter) -> str:
    """UTF-8 to text without a byte order mark; what is invalid becomes U+FFFD, and these are counted."""
    text = data.decode(errors="replace").removeprefix("\ufeff")
    tally["invalid"] += text.count("\ufffd")
    return text
