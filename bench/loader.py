"""
How many tokens per second the loader makes on one thread: from text, and from the token files it keeps.

    python -m bench.loader --data=python
"""
import time

from configurator import configure

import numpy as np

from nanochat.corpus.learn_tokenizer import ensure_tokenizer
from nanochat.corpus.make_dataset import ensure_dataset
from nanochat.dataloader import RowPlanner, TokenizedShards
from nanochat.dataset import shard_texts

data = "tinyworld"          # name of a data set
max_seq_len = 2048          # [1..] tokens per row
num_rows = 2000             # [1..] rows to pack
configure(globals())

ensure_dataset(data)
shards = TokenizedShards(data, "train", ensure_tokenizer(data), num_threads=1)

# --- from text: parquet, byte-pair encoding, one array
start = time.perf_counter()
count = sum(len(shards.encode_shard(shard)) for shard in range(len(shards.paths)))
seconds = time.perf_counter() - start
print(f"from text: {count / seconds:,.0f} tokens/s ({count:,} tokens in {seconds:.1f} s)")
start = time.perf_counter()
size = sum(len(text) for path in shards.paths for text in shard_texts(path))
print(f"  reading parquet alone: {size / (time.perf_counter() - start) / 1e6:,.0f} million characters/s")

# --- from token files: plan the rows, copy them out
planner = RowPlanner(shards, max_seq_len + 1, seed=0)
planner.next_row()  # opens the files
start = time.perf_counter()
rows = [planner.next_row() for _ in range(num_rows)]
planned = time.perf_counter() - start
for first in range(0, num_rows, 32):
    planner.read(rows[first : first + 32])
seconds, count = time.perf_counter() - start, num_rows * max_seq_len
print(f"from token files: {count / seconds:,.0f} tokens/s; planning alone, which every rank does for all rows: "
      f"{count / planned:,.0f}")
print(f"  documents per row: {np.mean([len(row) for row in rows]):.1f}")
