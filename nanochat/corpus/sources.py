"""
Where text comes from. A source is an iterator of (text, kin): documents with equal `kin` are never separated by the
split between training and validation; usually a document is its own kin.

    tinyworld            the embedded corpus, generated
    python               the standard library of the running interpreter and the reference behind its `help()`
    FOLDER or FILE       your own text in any language, see own_files.py
    hf:NAME[:CONFIG]     any text data set that the `datasets` package can load, from the hub or from a folder

(fineweb-edu and climbmix are fetched as finished shards instead, see download.py.)
"""
import io
import itertools
import re
import sys
import sysconfig
import tokenize
from pathlib import Path

from nanochat.corpus import tinyworld
from nanochat.library.own_files import MAX_CHARS, Documents, Notes, cut_text, files_below, row_text
from nanochat.runtime.errors import UserError, first_line

TINYWORLD_BYTES = 24_000_000   # text in all: about 75,000 documents, a few seconds to make
SHUFFLE_BUFFER = 10_000        # rows of a hub data set that are mixed before num_shards cuts it off


def tinyworld_documents(seed: int, text_bytes: int) -> Documents:
    """Documents 0, 1, … of the embedded corpus until they add up to text_bytes (without limit: TINYWORLD_BYTES)."""
    left = TINYWORLD_BYTES if text_bytes > sys.maxsize else text_bytes
    for index in itertools.count():
        if left <= 0:
            return
        text = tinyworld.generate(seed, index).text
        left -= len(text.encode())
        yield text, text


def python_documents() -> Documents:
    """The standard library's sources (all pieces of a file are kin), and the language reference by topic."""
    from pydoc_data.topics import topics

    for path in files_below(Path(sysconfig.get_path("stdlib")), Notes(list), re.compile(r"\.py$")):
        if not {"site-packages", "dist-packages", "pydoc_data"} & set(path.parts):
            try:
                # It uses the encoding that the source declares.
                with tokenize.open(path) as file:
                    source = file.read()
            # Tests of the interpreter declare encodings that do not exist.
            except (SyntaxError, UnicodeDecodeError):
                continue
            for piece in cut_text(io.StringIO(source), MAX_CHARS):
                yield piece, source
    for page in topics.values():
        yield page, page


def hf_documents(name: str, config: str, field: str, seed: int, text_bytes: int) -> Documents:
    """
    The rows of a Hugging Face data set's train split (or else its first), streamed; name may be a local folder.
    text_bytes: stop after that much text. The rows are mixed by a bounded shuffle buffer.
    """
    try:
        import datasets
    except ImportError:
        raise UserError("hf: sources need the `datasets` package: pip install datasets") from None
    left = text_bytes
    try:
        splits = datasets.load_dataset(name, config or None, streaming=True)
        split = splits["train" if "train" in splits else next(iter(splits))]
        for number, row in enumerate(split.shuffle(seed=seed % 2**32, buffer_size=SHUFFLE_BUFFER)):
            text = row_text(row, field, f"hf:{name}, row {number}")
            # Characters, not bytes: near enough, and encoding every text would take time.
            left -= len(text)
            yield text, text
            if left <= 0:
                return
    except UserError:
        raise
    # The package raises all kinds of errors: no data set, no network, a wrong config, a damaged file.
    except Exception as error:
        raise UserError(f"hf:{name}: {type(error).__name__}: {first_line(error)}; check the name and the network "
                        "(HF_ENDPOINT=… names a mirror)") from error
