"""
The tokenizer against a byte-pair encoding written out naively here, and against bytes counted by hand.

The oracle shares only the split pattern with what it tests, and runs it in another regex engine (`regex`).
"""
import base64
import json
import random
import time

import pytest
import regex
import tiktoken._educational

from nanochat.corpus import tinyworld
from nanochat.corpus.learn_tokenizer import TRAINING_PATTERN, learn_tokenizer
from nanochat.data.tokenizer import FILE_NAME, SPECIAL_TOKENS, SPLIT_PATTERN, Tokenizer, get_tokenizer, tokenizer_dir
from nanochat.runtime.errors import UserError

NASTY = ["", " ", "\n", "\r\n\r\n", "a\r\nb\r\n", "\0", "a\0b", "\u0301", "e\u0301\u0327", "👩‍👩‍👧‍👦🏳️‍🌈", "你好，世界",
         "Ünïcödé", "ſ's K's I'LL don't 'tis", "  indented\n\t\ttabs  \n", "x" * 300, " " * 700 + "y", "\n" * 700,
         "=" * 300 + "\n" * 9, "1234567 3.14 ٣٤٥ ½", "\u00a0\u3000\u2028\u0085", "\ufeff\ufffd\uffff", "\U0010ffff"]

WITHOUT_MARKS = SPLIT_PATTERN.replace(r"\p{L}[\p{L}\p{M}]*", r"\p{L}+")  # a word is letters only


def corpus() -> list[str]:
    """Small, varied, the same every time: made-up words with endings, numbers, code, and some other scripts."""
    rng = random.Random(1)
    stems = ["".join(rng.choices("abcdeilmnorstu", k=rng.randint(2, 6))) for _ in range(150)]
    texts = []
    for _ in range(300):
        words = [rng.choice(stems) + rng.choice(["", "s", "ing", "'s", ".", ",\n", "();\n    "]) for _ in range(60)]
        texts.append(" ".join(words) + f" {rng.randint(0, 99999)} 你好世界 é🙂")
    return texts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Small, yet with merges inside characters of other scripts."""
    return learn_tokenizer(corpus(), 800)


def random_texts(count: int) -> list[str]:
    """Texts of characters that meet at the edges of every rule of the split."""
    rng = random.Random(2)
    alphabet = "aaaeinst'sdlmvertSTLL  \n\r\t01239.,-=(é你世🙂\u0301\u00a0½ß\0"
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(count)]


# ---- The oracle

def naive_encode(text: str, merges: tuple[bytes, ...]) -> list[int]:
    ranks = {token: 256 + i for i, token in enumerate(merges)}
    ids = []
    for piece in regex.findall(SPLIT_PATTERN, text):
        tokens = [bytes([byte]) for byte in piece.encode()]
        while pairs := [pair for pair in zip(tokens, tokens[1:]) if b"".join(pair) in ranks]:
            first = min(pairs, key=lambda pair: ranks[b"".join(pair)])
            at = next(i for i, pair in enumerate(zip(tokens, tokens[1:])) if pair == first)
            tokens[at:at + 2] = [b"".join(first)]
        ids += [ranks.get(token, token[0]) for token in tokens]
    return ids


# ---- Encoding

def test_ids_equal_those_of_a_naive_encoder_and_every_text_comes_back(tokenizer):
    """Alone and in a batch."""
    num_bytes, user_start = tokenizer.token_bytes(), tokenizer.encode_special("<|user_start|>")
    texts = NASTY + random_texts(1500) + corpus()[:20]
    begun = tokenizer.encode(texts, prepend="<|user_start|>")
    for text, [first, *batched] in zip(texts, begun, strict=True):
        ids = tokenizer.encode(text)
        assert ids == batched == naive_encode(text, tokenizer.merges) and first == user_start, repr(text)
        assert tokenizer.decode(ids) == text and tokenizer.decode_bytes(ids) == text.encode()
        assert num_bytes[ids].sum() == len(text.encode()), repr(text)


def test_special_tokens_follow_the_ordinary_ids_in_order_and_never_come_from_a_text(tokenizer):
    names = ("bos user_start user_end assistant_start assistant_end "
             "python_start python_end output_start output_end").split()
    ids = [tokenizer.encode_special(f"<|{name}|>") for name in names]
    assert ids == list(range(256 + len(tokenizer.merges), tokenizer.get_vocab_size()))
    assert tokenizer.get_bos_token_id() == ids[0] and tokenizer.decode(ids[:1]) == "<|bos|>"
    for text in (f"<|{name}|>a <|{name}|>" for name in names):
        assert max(tokenizer.encode(text)) < ids[0] and tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(KeyError):
        tokenizer.encode_special("<|eos|>")


def test_a_megabyte_without_a_split_is_encoded_quickly_and_whole(tokenizer):
    """Unbounded blanks overflow the stack of the regex engine, and naive merging takes hours."""
    rng = random.Random(3)
    runs = [unit * 10**6 for unit in ("a", " ", "\n", "-", "1", "你", "\u0301", " \t", "'s")]
    for run in (*runs, " " * 10**6 + "x", "".join(rng.choices("abcdeilmnorstu", k=10**6))):
        start = time.process_time()
        ids = tokenizer.encode(run)
        assert tokenizer.decode(ids) == run
        assert time.process_time() - start < 5  # 0.1 to 0.5 s where it was written


def test_unpaired_surrogates_are_replaced_not_raised(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.encode(["a\ud800b"]) == [tokenizer.encode("a\ufffdb")]
    assert learn_tokenizer(["ab\ud800 ab"] * 3, 270).merges


# ---- Training

def test_merges_are_those_that_another_library_learns():
    """tiktoken's own trainer, in plain Python. In this text no two pairs are equally frequent, so no choice is free."""
    rng = random.Random(3)
    stems = [" " + "".join(rng.choices("abcdeé", k=6)) for _ in range(8)]
    text = "".join(stem[:length] * rng.randint(1, 99) for stem in stems for length in range(2, 8))
    expected = tiktoken._educational.bpe_train(text, 256 + 40, TRAINING_PATTERN, visualise=None)
    assert learn_tokenizer([text], 256 + 40 + len(SPECIAL_TOKENS)).merges == tuple(expected)[256:]


def test_the_vocabulary_is_as_large_as_asked_or_as_the_text_allows(tokenizer):
    assert tokenizer.get_vocab_size() == 800
    few = learn_tokenizer(["abcabc xyz"], 65536)
    assert few.merges == (b"ab", b"abc") or few.merges == (b"bc", b"abc")
    assert learn_tokenizer([], 265).get_vocab_size() == 265 and learn_tokenizer(["aaaa"], 265).merges == ()


def test_words_of_scripts_that_write_vowels_as_marks_are_whole():
    """In the encoder and in its training; English and emoji are cut as before."""
    words = ("हिन्दी विकिपीडिया தமிழ் விக்கிப்பீடியா မြန်မာဘာသာ अनुच्छेद مَرْحَبًا בְּרֵאשִׁית ภาษาไทยที่ "
             "Tie\u0302\u0301ng e\u0301te\u0301").split()
    expected = [words[0], *(f" {word}" for word in words[1:])]
    text = " ".join(words)
    for pattern in (SPLIT_PATTERN, TRAINING_PATTERN):
        assert regex.findall(pattern, text) == expected
    tokenizer = learn_tokenizer([text] * 3, 2000)
    assert [tokenizer.decode([token]) for token in tokenizer.encode(text)] == expected
    english = "".join(tinyworld.generate(42, i).text for i in range(200)) + " I ❤️ it, ❤️love 1️⃣ 🏳️‍🌈"
    assert regex.findall(SPLIT_PATTERN, english) == regex.findall(WITHOUT_MARKS, english)
    assert max(map(len, regex.findall(TRAINING_PATTERN, "ẹ\u0301" * 999 + "=" * 999))) <= 66


# ---- Kept as a file

@pytest.mark.parametrize("pattern", [SPLIT_PATTERN, WITHOUT_MARKS])
def test_saved_and_loaded_it_is_the_same_and_a_damaged_file_is_never_used(tokenizer, pattern):
    with pytest.raises(UserError, match="--data=x"):
        get_tokenizer("x")
    saved = Tokenizer(tokenizer.merges, pattern)
    saved.save(tokenizer_dir("x"))
    loaded = get_tokenizer("x")
    assert loaded.fingerprint == saved.fingerprint and loaded.encode(NASTY) == saved.encode(NASTY)
    path = tokenizer_dir("x") / FILE_NAME
    whole = path.read_text()
    changed = base64.b64encode(b"zz").decode()
    for damage in (whole[:-5], "[]", whole.replace(json.loads(whole)["merges"][7], changed)):
        path.write_text(damage)
        with pytest.raises(UserError, match="is missing or damaged"):
            get_tokenizer("x")
