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
import re
from functools import cache, partial

from nanochat.corpus.tinyworld import capital
from nanochat.data.conversation import Conversation
from nanochat.data.stable_random import StableRandom
from nanochat.inference.tools import NOTHING, REFUSALS
from nanochat.library.retrieval import Passage
from nanochat.tasks.common import Drawn, read_texts, split_of
from nanochat.tasks.lookup import draw_name, draw_text, fill, looked_up, small_talk, ways_of, with_blank

LANGUAGES = tuple(REFUSALS)
KINDS = ("", "unknown", "talk")
MARKS = " ?？.。!！¿¡"
PARTS = re.compile(r"[][]")  # splits a way to ask: before, between and after its brackets


class Notes(Drawn):
    """argument: one of LANGUAGES_AND_KINDS."""
    sizes = {"train": 30_000, "test": 300}

    def __init__(self, argument: str, split: str) -> None:
        super().__init__(argument, split)
        self.key = f"notes:{argument}:{split}"
        words = argument.split(":")
        self.languages = [language for language in LANGUAGES if language in words] or LANGUAGES
        self.kind = words[-1] if words[-1] in KINDS else ""
        if split == "test":
            # All are drawn now: its library has one note for the same words, in any language.
            if not self.kind:
                self.problem(len(self) - 1)
            self.notes = Folder({asked: conversation["right"][-1] for asked, conversation in self.problems})

    def draw(self, number: int) -> tuple[str, Conversation]:
        """What is asked about, and the conversation. One question in eight follows another question."""
        rng = StableRandom(f"{self.key}:{number}")
        language = self.languages[number % len(self.languages)]
        before = []
        if not rng.below(8):
            _, earlier = draw_turn(rng, language, rng.choice(KINDS), "train")
            before = earlier["messages"]
        asked, last = draw_turn(rng, language, self.kind, self.split)
        return asked, last | {"messages": before + last["messages"]}

    def conversation(self, index: int) -> Conversation:
        _, conversation = self.problems[index] if self.problems else self.draw(index)
        return conversation

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """Right, to the letter: the note, or its first sentences; the refusal; the sentence for small talk."""
        return " ".join(answer.split()) in conversation["right"]


class Folder:
    """A test split's notes in place of a library. A search with all of a note's words finds it; more words are fine."""

    is_own = False

    def __init__(self, notes: dict[str, str]) -> None:
        self.notes = notes

    def search(self, words: str) -> Passage | None:
        found = [asked for asked in self.notes if all(word in words for word in asked.split())]
        return Passage("", self.notes[max(found, key=len)], "") if found else None

    lookup = search


def draw_turn(rng: StableRandom, language: str, kind: str, split: str) -> tuple[str, Conversation]:
    """What is asked about; a question and its answer."""
    if kind == "talk":
        return "", small_talk(ask(rng, language, "talk", split), read_texts(f"notes_{language}")["talk_answer"])
    tool = rng.choice(("lookup", "search", "search"))
    head, asked, tail = PARTS.split(ask(rng, language, tool, split))
    found = NOTHING if kind == "unknown" else draw_note(rng, language)
    return asked, looked_up(f"{head}{asked}{tail}", tool, with_blank(head, asked), found, REFUSALS[language])


def ask(rng: StableRandom, language: str, name: str, split: str) -> str:
    """A question in one of the ways of that name, with brackets around the words to look up."""
    talk = name == "talk"
    ways = ways_of(f"notes_{language}", name, "train" if not talk and rng.below(2) else split)
    way = rng.choice(ways)
    # Mix ways' beginnings, middles and ends: the model learns that any words can stand between any others.
    if split == "train" and not talk:
        head, asked, tail = PARTS.split(way)
        if not rng.below(4):
            _, asked, _ = PARTS.split(rng.choice(ways))
        if not rng.below(4):
            *_, tail = PARTS.split(rng.choice(ways))
        way = f"{head}[{asked}]{tail}"
    way = fill(way, partial(draw_word, rng, language, split))
    if not rng.below(4):
        way = way.rstrip(MARKS) if talk else way.strip(MARKS)
    if not rng.below(6):
        way = way.lower()
    if not rng.below(8):
        way = rng.choice(read_texts(f"notes_{language}")["greetings"]) + way
    return way


def draw_note(rng: StableRandom, language: str) -> str:
    """One or two sentences; one note in six is English."""
    if not rng.below(6):
        return draw_text(rng)
    draw = partial(draw_word, rng, language, "train")
    ways = read_texts(f"notes_{language}")["notes"].splitlines()
    sentences = [capital(fill(rng.choice(ways), draw)) for _ in range(1 + rng.below(3) // 2)]
    return (" " if " " in REFUSALS[language] else "").join(sentences)


def draw_word(rng: StableRandom, language: str, split: str, kind: str) -> str:
    """A word of a kind, as notes_de.toml lists them."""
    if kind == "d":
        return rng.choice("0123456789")
    if kind == "x":
        return draw_name(rng, split)
    # One word in four has random letters: any word can be asked about.
    if kind == "w" or kind in "nvp" and not rng.below(4):
        letters = read_texts(f"notes_{language}")["letters"]
        return "".join(rng.choice(letters) for _ in range(3 + rng.below(4)))
    return rng.choice(words_of(language, kind, split))


@cache
def words_of(language: str, kind: str, split: str) -> list[str]:
    """The words of a kind that belong to a split, by their own text; _ stands for a blank within one."""
    words = read_texts(f"notes_{language}")[kind].split()
    return [word.replace("_", " ") for word in words if split_of(word, 6) == split]
