"""
Spelling words and counting their letters: needs no download, and words of the test split are never trained on.

    spellingbee:spell    How do you spell "kamot"?                            spell("kamot") gives it: k-a-m-o-t.
    spellingbee:tool     How many o's are in "kamot"?                         the tool computes "kamot".count("o")
    spellingbee:hand     How many o's are in "kamot"? Go letter by letter.    k-a-m-o:1-t. The letter o occurs 1 time.
    spellingbee          the three in turn
    words:climbmix       real words: each spelled in five ways, its letters counted with the tool and by hand
    words:climbmix:hand  one of these kinds; only here a token's letters must be known, the tool's are copied

Most words of spellingbee are made of syllables, so there are enough. Words of the embedded corpus are only
trained on: its documents spell them, so they cannot be held out.

Real words are the tokens of a data set's tokenizer, and words of Python's documentation that are several tokens. The
letters of a token cannot be known unless it is spelled in training, so all tokens are trained on. Some of the other
words are held out: their tokens were spelled in other words. With one tokenizer, a word is in one split in all tasks.

A tool's call has the question's tokens, so copying is enough. (Quotes are double, because the tokenizer takes the 'm of
'mirror' for the end of a word such as I'm.) The letter is not quoted: its token, with the blank before it, is then none
of the word's tokens, which matters when they are compared.
"""
import itertools
import re
import string
from functools import cache

from nanochat.corpus.tinyworld import WORDS
from nanochat.data.conversation import Conversation
from nanochat.data.stable_random import StableRandom
from nanochat.data.task import Task, reference
from nanochat.data.tokenizer import Tokenizer, get_tokenizer
from nanochat.runtime.errors import UserError
from nanochat.tasks.common import last_number, read_texts, single_turn, split_of, stable_hash
from nanochat.tasks.python_questions import documentation_words

# Words; each occurs in every kind of question.
SIZES = {"train": 20_000, "test": 2_000}
KINDS = ("spell", "tool", "hand")
# nanochat's proportions: 200,000 spellings, 80,000 countings.
WORDS_KINDS = ("spell",) * 5 + ("tool", "hand")
# A token that is a word or the beginning of one.
TOKEN = re.compile(rb" [A-Za-z][a-z]{2,}")
# A token counts as a word if more than this share of its uses is not the start of a longer token.
OWN_USES = 0.3
ONSETS = "b c d f g h j k l m n p r s t v w y z bl br cl cr dr fl gr pl pr qu sh st tr".split()
VOWELS = "aeiou"
CODAS = "d k l m n p r s t x".split()
LONGEST_WORD = 8  # letters

TEXTS = read_texts("spellingbee")
SPELL = TEXTS["spell"].splitlines()
COUNT = TEXTS["count"].splitlines()


class SpellingBee(Task):
    """Each word in one kind, or each of the kinds; a repeated kind has another phrasing."""
    eval_type = "generative"

    def __init__(self, source: str, words: list[str], kind: str, kinds: tuple[str, ...]) -> None:
        self.name = f"SpellingBee {kind}".rstrip() + f" ({source} words)"
        self.words = words
        self.kinds = (kind,) if kind else kinds

    def __len__(self) -> int:
        return len(self.words) * len(self.kinds)

    def conversation(self, index: int) -> Conversation:
        """Every pass over the words has each word once, in another kind than its neighbours."""
        turn, number = divmod(index, len(self.words))
        place = (turn + number) % len(self.kinds)
        word = self.words[number]
        kind = self.kinds[place]
        rng = StableRandom(f"spellingbee:{kind}:{word}")
        if kind == "spell":
            question = SPELL[(rng.below(len(SPELL)) + self.kinds[:place].count(kind)) % len(SPELL)]
            letters = "-".join(word)
            calls = [(f'spell("{blank_before(question)}{word}")', letters)]
            return single_turn(question.format(w=word), f"{letters}.", calls) | {"word": word}
        # Letters that the word has teach more: they are drawn three times out of four.
        letter = rng.choice(sorted(set(word)) if rng.below(4) else string.ascii_lowercase)
        way = rng.choice(COUNT)
        question = way.format(w=word, x=letter) + rng.choice(TEXTS["wishes"][kind])
        count = word.count(letter)
        times = "time" if count == 1 else "times"
        answer = f"The letter {letter} occurs {count} {times}."
        if kind == "tool":
            return single_turn(question, answer, [(f'"{blank_before(way)}{word}".count("{letter}")', f"{count}")])
        return single_turn(question, f"{spell_counting(word, letter)}. {answer}")

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """Spelling: the last letters joined by hyphens are the word's. Counting: the last number is right."""
        if "word" in conversation:
            spelled = re.findall(r"\b[a-z](?:-[a-z])+\b", answer.lower())
            return spelled[-1:] == ["-".join(conversation["word"])]
        return last_number(answer) == last_number(reference(conversation))


def generated_words(argument: str, split: str) -> SpellingBee:
    """The task spellingbee:ARGUMENT. Test words are all generated; training words include the corpus's."""
    return SpellingBee("generated", spelled_words(split), argument, KINDS)


def real_words(argument: str, split: str) -> SpellingBee:
    """The task words:DATA or words:DATA:KIND. UserError without a tokenizer, or for another kind."""
    data, _, kind = argument.partition(":")
    if kind not in ("", *KINDS):
        raise UserError(f"task words:{argument}: expected words:{data}, or at its end one of :{', :'.join(KINDS)}")
    tokenizer = get_tokenizer(data)
    tokens = token_words(tokenizer) - set(spelled_words("test"))
    words = {word for word in documentation_words() - tokens
             if split_of_word(word) == split and len(tokenizer.encode(f" {word}")) > 1}
    if split == "train":
        words |= tokens
    return SpellingBee("real", sorted(words, key=stable_hash), kind, WORDS_KINDS)


def blank_before(way: str) -> str:
    """What a call has before the word, to have the question's tokens: quotation marks keep a blank from the word."""
    return "" if '"' in way else " "


def spell_counting(word: str, letter: str) -> str:
    """The letters of a word with a running count after each counted letter: "k-o:1-m-o:2-t"."""
    counts = itertools.count(1)
    return "-".join(f"{char}:{next(counts)}" if char == letter else char for char in word)


@cache
def spelled_words(split: str) -> list[str]:
    """The words of a split: a word's own letters decide its split. Sorted by hash, so every slice is a mixture."""
    found = set(WORDS) if split == "train" else set()
    # Always the same words, some more than once.
    rng = StableRandom("spellingbee: words")
    while len(found) < SIZES[split]:
        # Two or three syllables, the last one closed.
        syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(2 if rng.below(4) else 3)]
        word = "".join(syllables) + rng.choice(CODAS)
        if len(word) <= LONGEST_WORD and split_of_word(word) == split:
            found.add(word)
    return sorted(found, key=stable_hash)


def split_of_word(word: str) -> str:
    """The split of a word."""
    return "train" if word in WORDS else split_of(word)


def token_words(tokenizer: Tokenizer) -> set[str]:
    """
    The words that are tokens, in lower-case letters.

    A token with a blank before it begins a word. It may be a fragment, such as " immedi": nearly always it is the start
    of a longer token, " immediate" or " immediately". How often a token is used is estimated by Zipf's law: 1 / rank.
    """
    ranks = {token: rank for rank, token in enumerate(tokenizer.merges, 1) if TOKEN.fullmatch(token)}
    own = dict.fromkeys(ranks, 1.0)
    for token, rank in ranks.items():
        shorter = next((token[:end] for end in range(len(token) - 1, 3, -1) if token[:end] in ranks), None)
        if shorter:
            own[shorter] -= ranks[shorter] / rank
    return {token[1:].decode().lower() for token, share in own.items() if share > OWN_USES}
