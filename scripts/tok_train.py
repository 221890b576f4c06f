"""
Train the tokenizer of a data source.

    python -m scripts.tok_train --data=fineweb-edu --vocab_size=32768
    python -m scripts.tok_train --vocab_size=6144 --tasks="pydoc, run"    # with the words of later tasks, too
"""
from configurator import configure

# ---- Data
data = "tinyworld"          # data source to learn from
tasks = ""                  # conversations to learn from, too, as in mid_train: they have words that the data lacks
# ---- Vocabulary
vocab_size = 65536          # [265..] ids, with bytes and special tokens (265); fewer if the data has fewer merges
config = configure(globals())

# It is stored in NANOCHAT_BASE_DIR/tokenizer/<data>; every stage that uses the data finds it there.
from itertools import islice

from nanochat.corpus.learn_tokenizer import train_tokenizer
from nanochat.data.conversation import plain_text
from nanochat.data.shard_reader import iter_texts
from nanochat.data.tokenizer import tokenizer_dir
from nanochat.tasks import make_mixture
from nanochat.training.run_report import settings_table, write_section

# --- learn the merges
conversations = make_mixture(tasks, "train", seed=0) if tasks else []
tokenizer = train_tokenizer(data, vocab_size, map(plain_text, conversations))
print(f"vocabulary: {tokenizer.get_vocab_size():,} ids in {tokenizer_dir(data)}")

# --- compression of held-out text
held_out = list(islice(iter_texts(data, "val"), 1000))
num_bytes = sum(len(text.encode(errors="replace")) for text in held_out)
compression = num_bytes / sum(map(len, tokenizer.encode(held_out)))
print(f"validation split: {compression:.3f} bytes per token")
learned = f"{tokenizer.get_vocab_size():,} ids learned from `{data}`"
measured = f"{compression:.3f} bytes per token on its validation split; fingerprint `{tokenizer.fingerprint[:16]}`"
write_section("tokenizer", "Tokenizer", f"{learned}; {measured}.\n\n{settings_table(config)}", data=data)
