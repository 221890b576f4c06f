"""
Make a library that the assistant looks things up in: one file, in NANOCHAT_BASE_DIR/library.

    python -m scripts.library                     # what the documentation of Python's library says, offline
    python -m scripts.library --source=~/notes    # .txt .md .rst .jsonl .json .csv .tsv .parquet

It is replaced as a whole by the same command.
"""
from configurator import configure

source = "python"      # python, or a folder or file of your own
name = ""              # of the library; default: that of the folder or file
field = "text"         # of .jsonl, .json, .csv and .parquet: where the text is
encoding = "utf-8"     # of text files that are not UTF-8, such as gb18030
delimiter = ""         # between the fields of .csv: one character, or tab; default: what the first line has
config = configure(globals())

from nanochat.corpus.passages import make_library
from nanochat.inference.retrieval import Library

place = make_library(**config)
print(f"{place}: {Library(place).passages:,} passages, {place.stat().st_size / 1e6:.1f} MB")
