"""
How many tokens per second the loader makes on one thread: from text, and from the token files it keeps.

    python -m bench.loader --data=python
"""
import time

from configurator import configure

import numpy as np

from nanochat.dataloader import RowPlanner, TokenizedShards
from nanochat.dataset import shard_texts
from nanochat.corpus.make_dataset import ensure_dataset
from nanochat.distributed import print0
from nanochat.corpus.learn_tokenizer import ensure_tokenizer

# ---- Data
data = "tinyworld"          # name of a data set
max_seq_len = 2048          # tokens per row
# ---- Measurement
num_rows = 2000             # rows to pack
config = configure(globals())

ensure_dataset(data)
tokenizer = ensure_tokenizer(data)
shards = TokenizedShards(data, "train", tokenizer, num_threads=1)

# --- from text: parquet, byte-pair encoding, one array
start = time.perf_counter()
tokens = [shards.encode_shard(shard) for shard in range(len(shards.paths))]
seconds = time.perf_counter() - start
count = sum(map(len, tokens))
print0(f"from text: {count / seconds:,.0f} tokens/s ({count:,} tokens in {seconds:.1f} s)")

# --- of which reading text
start = time.perf_counter()
size = sum(len(text) for path in shards.paths for text in shard_texts(path))
print0(f"  reading parquet alone: {size / (time.perf_counter() - start) / 1e6:,.0f} million characters/s")

# --- from token files: plan the rows, copy them out
planner = RowPlanner(shards, max_seq_len + 1, seed=0)
planner.next_row()  # opens the files
start = time.perf_counter()
rows = [planner.next_row() for _ in range(num_rows)]
planned = time.perf_counter() - start
for first in range(0, num_rows, 32):
    planner.read(rows[first : first + 32])
seconds = time.perf_counter() - start
count = num_rows * max_seq_len
print0(f"from token files: {count / seconds:,.0f} tokens/s; planning alone, which every rank does for all rows: {count / planned:,.0f}")
print0(f"  documents per row: {np.mean([len(row) for row in rows]):.1f}")
