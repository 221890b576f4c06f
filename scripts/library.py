"""
Make a library that the assistant looks things up in: one file, in NANOCHAT_BASE_DIR/library.

    python -m scripts.library                     # the documentation of Python's standard library, offline
    python -m scripts.library --source=~/notes    # .txt .md .rst .org .html .jsonl .json .csv .tsv .parquet

The same command replaces the whole file.
"""
from configurator import configure

source = "python"      # python, or a folder or file of your own
name = ""              # name of the library; default: the folder's or file's
field = "text"         # field with the text, in .jsonl, .json, .csv and .parquet
encoding = "utf-8"     # for text files that are not UTF-8, such as gb18030
config = configure(globals())

from nanochat.library.make_library import make_library

make_library(**config)
