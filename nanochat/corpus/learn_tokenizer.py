"""Learning a tokenizer from text."""
from collections.abc import Iterable, Iterator
from itertools import chain

from nanochat.data.embedded import ensure_dataset
from nanochat.data.shard_reader import iter_texts
from nanochat.data.tokenizer import SPECIAL_TOKENS, Tokenizer, byte_alphabet, split_pattern, tokenizer_dir
from nanochat.runtime.progress import progress

# In training a run of more than 64 letters or signs (base64, DNA, a line of dashes) is cut as well: for such a piece
# learning costs length times number of merges, minutes for a single megabyte, and teaches nothing.
TRAINING_PATTERN = split_pattern(letters="{0,63}", signs="{1,64}")

MAX_CHARS = 2_000_000_000   # read at most
DOCUMENT_CHARS = 10_000     # read of each document, so one very long document does not dominate


def learn_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """
    A tokenizer learned from texts. The same texts give the same merges, on any number of cores.

    vocab_size counts the bytes and the special tokens, 265; the result is smaller if fewer pairs occur twice.
    """
    # Imported late: only learning needs the package.
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Learner

    alphabet = byte_alphabet()
    learner = Learner(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(TRAINING_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        # A pair that occurs once (min_frequency) compresses only the text that it was learned from.
        vocab_size=vocab_size - len(SPECIAL_TOKENS), initial_alphabet=list(alphabet), show_progress=False,
        min_frequency=2)
    # A surrogate, which careless JSON may contain, has no UTF-8 and becomes a question mark.
    learner.train_from_iterator((text.encode(errors="replace").decode() for text in texts), trainer)

    ids = learner.get_vocab()
    tokens = [bytes(alphabet[char] for char in token) for token in sorted(ids, key=ids.__getitem__)]
    # The first 256 are the single bytes.
    return Tokenizer(tokens[256:])


def training_texts(data: str) -> Iterator[str]:
    """The beginnings of the training split's documents."""
    left = MAX_CHARS
    for text in iter_texts(data, "train"):
        # One very long document would otherwise decide which merges are learned.
        beginning = text[:DOCUMENT_CHARS]
        yield beginning
        left -= len(beginning)
        if left <= 0:
            return


def train_tokenizer(data: str, vocab_size: int, more: Iterable[str] = ()) -> Tokenizer:
    """
    Train a tokenizer on a data source's training split, and on `more` texts, and keep it in `tokenizer_dir(data)`.
    Makes the data if it is an embedded source. Learning the merges begins after all reading, and can take minutes.
    """
    ensure_dataset(data)
    texts = chain(training_texts(data), more)
    tokenizer = learn_tokenizer(progress(texts, "reading", "documents"), vocab_size)
    tokenizer.save(tokenizer_dir(data))
    return tokenizer
