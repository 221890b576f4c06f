"""
Make a data set: text in shuffled shards, the last of them for validation, and a manifest with their checksums.

    python -m scripts.dataset --source=~/books                     # .txt .md .rst .jsonl .json .csv .tsv .parquet
    python -m scripts.dataset --source=fineweb-edu --num_shards=8  # downloads; run again to go on or to add more
    python -m scripts.dataset --source=hf:roneneldan/TinyStories --num_shards=20
"""
from configurator import configure

# ---- Data
source = "tinyworld"   # tinyworld, python, fineweb-edu, climbmix, hf:NAME[:CONFIG], or a folder or file
name = ""              # name of the data set; default: the source's, folder's or file's
field = "text"         # field with the text, in .jsonl, .json, .csv, .parquet and hf: rows
encoding = "utf-8"     # for text files that are not UTF-8, such as gb18030
# ---- Size
num_shards = -1        # [-1, 1..] training shards at most, besides validation; -1: all (on the hub, 100 MB each!)
shard_mb = 8.0         # [0.001..1000] megabytes of text per training shard (downloads keep their own)
seed = 42              # for the shuffle and for tinyworld
config = configure(globals())

# It is stored in NANOCHAT_BASE_DIR/data/NAME. HF_ENDPOINT=https://… downloads from a mirror of the Hugging Face hub.
from nanochat.corpus.make_dataset import make
from nanochat.training.run_report import write_section

manifest = make(**config)
summary = (f"{manifest['name']}: {manifest['documents']:,} documents ({manifest['duplicates']:,} duplicates left out), "
           f"{manifest['text_bytes'] / 1e6:,.1f} MB of text in {len(manifest['shards']) - 1} training shards and 1 of "
           "validation")
print(summary)
write_section("data", "Data", summary, data=manifest["name"])
