"""
Questions in languages other than English about a folder of notes: needs no download.

    "Wo liegt der Schlüssel im Keller?"   [search(" Schlüssel im Keller")] "Der Schlüssel hängt am Haken."

    notes            a note is found, and quoted
    notes:unknown    nothing is found: the language's refusal, without a name, because names may need inflection
    notes:talk       small talk: one sentence says what the model can do
    notes:de, notes:de:unknown, notes:de:talk    the same in one language; without a language, all in turn

A language's texts are in notes_XX.toml. Notes need not answer the question: only copying helps, as in the task
lookup. Ways to ask and words are divided between the splits by their own text; in the test split half of the questions
use training's ways.
"""
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from nanochat.corpus.tinyworld import capital
from nanochat.data.conversation import Conversation
from nanochat.data.sentences import sentence_ends
from nanochat.data.stable_random import StableRandom
from nanochat.data.task import Task
from nanochat.inference.retrieval import Library, Passage
from nanochat.inference.tools import NOTHING, REFUSALS
from nanochat.tasks.common import Distinct, read_texts, single_turn, split_of, stable_hash
from nanochat.tasks.lookup import TEXTS, draw_name, draw_text

LANGUAGES = tuple(REFUSALS)
KINDS = ("", "unknown", "talk")
ARGUMENTS = tuple(f"{language}:{kind}".strip(":") for language in ("", *LANGUAGES) for kind in KINDS)
SIZES = {"train": 30_000, "test": 300}
MARKS = " ?？.。!！¿¡"


class Notes(Task):
    """argument: one of ARGUMENTS."""
    eval_type = "generative"

    def __init__(self, argument: str, split: str) -> None:
        self.name = f"Notes {argument}".rstrip()
        self.key = f"notes:{argument}:{split}"
        self.split = split
        self.languages = [language for language in LANGUAGES if language in argument.split(":")] or LANGUAGES
        self.kind = argument.split(":")[-1]
        if self.kind not in KINDS:
            self.kind = ""
        # A library has one note for the same words, in any language.
        self.tested = None
        if split == "test" and not self.kind:
            self.tested = Distinct(lambda index: ((drawn := self.draw(index))["asked"], drawn))
        if split == "test":
            self.library = Folder({item["asked"]: item["right"][-1] for item in self} if self.tested else {})

    def __len__(self) -> int:
        return SIZES[self.split]

    def conversation(self, index: int) -> Conversation:
        return self.tested[index][1] if self.tested else self.draw(index)

    def draw(self, index: int) -> Conversation:
        """One question in eight follows another question."""
        rng = StableRandom(f"{self.key}:{index}")
        language = self.languages[index % len(self.languages)]
        before = [] if rng.below(8) else draw_turn(rng, language, rng.choice(KINDS), "train")["messages"]
        last = draw_turn(rng, language, self.kind, self.split)
        return last | {"messages": before + last["messages"]}

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """Right, to the letter: the note, or its first sentences; the refusal; the sentence for small talk."""
        return " ".join(answer.split()) in conversation["right"]


class Folder:
    """A test split's notes in place of a library. A search with all of a note's words finds it; more words are fine."""

    def __init__(self, notes: dict[str, str]) -> None:
        self.notes = notes

    def search(self, words: str) -> Passage | None:
        found = [asked for asked in self.notes if all(word in words for word in asked.split())]
        return Passage("", self.notes[max(found, key=len)], "") if found else None

    lookup = search


def draw_turn(rng: StableRandom, language: str, kind: str, split: str) -> Conversation:
    """A question and its answer, what is "asked" about, and all "right" answers."""
    texts = texts_of(language)
    tool = "talk" if kind == "talk" else rng.choice(("lookup", "search", "search"))
    head, asked, tail = ask(rng, language, tool, split)
    question = head + asked + tail
    if kind == "talk":
        return single_turn(question, texts["talk_answer"]) | {"right": [texts["talk_answer"]]}
    found, answer = NOTHING, REFUSALS[language]
    right = [answer]
    if not kind:
        found = answer = draw_note(rng, language)
        right = [found[:end] for end in sentence_ends(found)]
    # A blank before the first word belongs to its token.
    blank = " " if head.endswith(" ") else ""
    return single_turn(question, answer, [(f'{tool}("{blank}{asked}")', found)]) | {"right": right, "asked": asked}


def ask(rng: StableRandom, language: str, name: str, split: str) -> tuple[str, str, str]:
    """A question in one of the ways of that name: the words before those looked up, these, and the words after."""
    side = "train" if name != "talk" and rng.below(2) else split
    ways = ways_of(language, name, side)
    head, asked, tail = rng.choice(ways)
    # Mix ways' beginnings, middles and ends: the model learns that any words can stand between any others.
    if asked and split == "train":
        asked = asked if rng.below(4) else rng.choice(ways)[1]
        tail = tail if rng.below(4) else rng.choice(ways)[2]
    words = Words(rng, language, split)
    head, asked, tail = (part.format_map(words) for part in (head, asked, tail))
    if not rng.below(4):
        head, tail = head.lstrip(MARKS), tail.rstrip(MARKS)
    if not rng.below(6):
        head, asked, tail = head.lower(), asked.lower(), tail.lower()
    if not rng.below(8):
        head = rng.choice(texts_of(language)["greetings"]) + head
    return head, asked, tail


def draw_note(rng: StableRandom, language: str) -> str:
    """One or two sentences; one note in six is English."""
    if not rng.below(6):
        return draw_text(rng)
    texts, words = texts_of(language), Words(rng, language, "train")
    ways = texts["notes"].splitlines()
    sentences = [capital(rng.choice(ways).format_map(words)) for _ in range(1 + rng.below(3) // 2)]
    return (" " if " " in REFUSALS[language] else "").join(sentences)


class Words(dict):
    """Words for the slots of a template, as notes_de.toml lists them; a slot gets a new word each time."""

    def __init__(self, rng: StableRandom, language: str, split: str) -> None:
        self.rng, self.language, self.split = rng, language, split

    def __missing__(self, kind: str) -> str:
        rng = self.rng
        if kind == "d":
            return rng.choice("0123456789")
        if kind == "x":
            return draw_name(rng, self.split)
        # One word in four has random letters: any word can be asked about.
        if kind == "w" or kind in "nvp" and not rng.below(4):
            letters = texts_of(self.language)["letters"]
            return "".join(rng.choice(letters) for _ in range(3 + rng.below(4)))
        return rng.choice(words_of(self.language, kind, self.split))


# ---- A language's texts, the ways and words of a split

@cache
def texts_of(language: str) -> dict[str, Any]:
    return read_texts(f"notes_{language}")


@cache
def ways_of(language: str, name: str, split: str) -> list[tuple[str, str, str]]:
    """Each way in three parts: before [, between the brackets, after ]; without brackets all is the last part."""
    ways = []
    for way in texts_of(language)[name].splitlines():
        head, _, rest = way.rpartition("[")
        asked, _, tail = rest.rpartition("]")
        if split_of(way, 6) == split:
            ways.append((head, asked, tail))
    return ways


@cache
def words_of(language: str, kind: str, split: str) -> list[str]:
    """The words of a kind; _ stands for a blank within one."""
    return [word.replace("_", " ") for word in texts_of(language)[kind].split() if split_of(word, 6) == split]


# ---- Examples for a user's own library

def title_questions(library: Library, languages: Sequence[str], count: int) -> list[str]:
    """Questions about some titles of a library, in most passages' language: English or one of `languages`."""
    rows = library.query("SELECT title, min(text) FROM passages WHERE length(title) < 40 GROUP BY title LIMIT 300")
    ways = {"What do my notes say about {n}?": grams(TEXTS["lookup"] + TEXTS["stop_words"])}
    for language in languages:
        texts = texts_of(language)
        ways[texts["about"]] = grams(texts["lookup"] + texts["search"] + texts["n"])
    # A share, because a longer reference has more of any text's sequences.
    votes = Counter(max(ways, key=lambda way: len(grams(text) & ways[way]) / len(ways[way])) for _, text in rows)
    way = max(ways, key=votes.__getitem__)
    titles = sorted((title for title, _ in rows), key=stable_hash)
    return [way.format(n=title) for title in titles[:count]]


def grams(text: str) -> set[str]:
    """All sequences of two to four characters; they tell languages apart."""
    text = " ".join(text.lower().split())
    return {text[start : start + length] for length in (2, 3, 4) for start in range(len(text) - length + 1)}
