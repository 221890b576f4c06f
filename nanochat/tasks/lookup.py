"""
Looking things up in a library (nanochat/library/retrieval.py): needs no download.

    "What does str.partition do?"                [lookup(" str.partition")] "Partition the string into three parts …"
    "How do I split a string at a separator?"    [search(" split a string at a separator")] "Partition the string …"

    lookup, search                   test: held-out objects of Python's library
    lookup:unknown, search:unknown   the library has nothing: "I do not know. I found nothing about …"
    lookup:talk                      small talk: one sentence says what the model can do
    lookup:NAME, search:NAME         passages of any library, questions in English: one in ten is for the test split

The call copies the name, or the question without its asking words. The answer copies the result: all of it, or its
first sentence if the question wants a short answer. Most results in training are about something else, or made up, so
only copying helps. A call's text begins with a blank if the question has one there, so it has the same tokens.
(After 230 steps 80% of held-out objects were right, without blanks 72%.)

The task pydoc holds out the same objects. Made-up names are split like objects, ways to ask by their own text.
Questions in other languages: notes.py.
"""
import re
from collections.abc import Callable, Sequence
from functools import cache, partial

from nanochat.corpus.tinyworld import capital
from nanochat.data.conversation import Conversation
from nanochat.data.sentences import sentence_ends
from nanochat.data.stable_random import StableRandom
from nanochat.data.task import Task
from nanochat.inference.tools import NOTHING, REFUSAL, open_tools, refusal
from nanochat.library.python_docs import MODULES, documentation, first_paragraph
from nanochat.library.retrieval import passage_of
from nanochat.runtime.errors import UserError
from nanochat.tasks.common import read_texts, shuffled, single_turn, split_of
from nanochat.tasks.python_questions import documentation_words, documented, split_of_name
from nanochat.tasks.spellingbee import spelled_words
from nanochat.tasks.world_questions import GREETINGS

SIZES = {"train": 30_000, "test": 200}  # conversations, if their number does not follow from the passages
LONGEST_PASSAGE = 300                   # characters of a library's passage

# lookup.toml says what each of these texts is for.
TEXTS = read_texts("lookup")
SIGNS = "|/\\#*=+-_~^@&%$<>[]{}();:!?.,–—−…“”‘’«»„×÷°±§€£¥²³½µ→←↑✓•≤≥≠≈∞√"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz" * 3 + "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" * 2
VERBS = frozenset(TEXTS["verbs"].split())
STOP_WORDS = frozenset(TEXTS["stop_words"].split())
# A noun phrase ends at these.
NO_NOUN = re.compile(r"\s*(?:[^\w\s'/.-]|\.\B|\b(?:is|are|was|were|be|been|has|have|had|can|may|must|should|will|would|"
                     r"that|which|if|and|or|while)\b)\s*")
WORD = re.compile(r"\w+(?:[-._/']\w+)*")


class Lookup(Task):
    """argument: "", "unknown", "talk", or a library's name."""
    eval_type = "generative"
    tool = "lookup"

    def __init__(self, argument: str, split: str) -> None:
        tool = self.tool
        self.name = f"{tool.capitalize()} {argument}".rstrip()
        self.key = f"{tool}:{argument}:{split}"
        self.kind = "talk" if argument == "talk" else tool
        self.found = NOTHING if argument == "unknown" else ""
        self.split = split
        # (title, text) of each conversation; what is empty is drawn.
        self.passages = [("", self.found)] * SIZES[split]
        if not argument:
            self.library = "python"
            if split == "test":
                self.passages = [item for item in objects(split) if tool == "lookup" or what_is_asked(item[1])[1]]
        elif argument not in ("unknown", "talk"):
            self.library = argument
            self.passages = passages_of(tool, argument, split)

    def __len__(self) -> int:
        return len(self.passages)

    def conversation(self, index: int) -> Conversation:
        """One question in four follows another question."""
        rng = StableRandom(f"{self.key}:{index}")
        title, found = self.passages[index]
        before = []
        earlier = None if rng.below(4) else rng.choice(("lookup", "search", "talk"))
        if earlier:
            before = draw_turn(rng, earlier, "train", found=draw_word(rng, "t"))["messages"]
        last = draw_turn(rng, self.kind, self.split, title, found, follows=earlier == self.kind == "lookup")
        return last | {"messages": before + last["messages"]}

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """Right, to the letter: the passage, or its first sentences; the sentence for small talk; a refusal."""
        said = " ".join(answer.split())
        # A refusal may misspell the unknown name.
        if self.found:
            return bool(re.fullmatch(REFUSAL.format(" .{,99}"), said))
        return said in conversation["right"]


class Search(Lookup):
    tool = "search"


# ---- Questions and answers

def draw_turn(
    rng: StableRandom, kind: str, split: str, title: str = "", found: str = "", follows: bool = False
) -> Conversation:
    """
    A question and its answer. title: what is asked about; found: what the tool finds; both are drawn if they are empty.
    follows: asked as a second question.
    """
    if kind == "talk":
        return small_talk(ask(rng, "talk", split), TEXTS["talk_answer"])
    if not found:
        found = draw_text(rng)
        if not rng.below(7):
            found = NOTHING
        elif rng.below(10) < 3:
            title, found = rng.choice(objects("train"))
    if kind == "lookup":
        asked = title or draw_name(rng, split)
        question = ask(rng, "follow_up" if follows else "lookup", split, n=asked)
        start = re.search(rf"(?<!\w){re.escape(asked)}", question).start()
    else:
        about = found if title else ""
        if not title and split == "train" and rng.below(2):
            about = draw_text(rng)
        question = draw_question(rng, split, about)
        words = content_words(question)
        start = words[0].start()
        asked = question[start : words[-1].end()]
    # Without a blank before it, a refusal quotes the name.
    asked = with_blank(question[:start], asked)
    briefly = found != NOTHING and not rng.below(4)
    if briefly:
        question = f"{question.rstrip('?.')}? {rng.choice(TEXTS['shortly'].splitlines())}"
    return looked_up(question, kind, asked, found, refusal(asked), briefly)


def looked_up(question: str, tool: str, asked: str, found: str, refused: str, briefly: bool = False) -> Conversation:
    """A question, a call, its answer: what is found, all or its first sentence, or the refusal; all "right" answers."""
    right = [refused] if found == NOTHING else [found[:end] for end in sentence_ends(found)]
    answer = right[0] if briefly else right[-1]
    return single_turn(question, answer, [(f'{tool}("{asked}")', found)]) | {"right": right}


def small_talk(question: str, answer: str) -> Conversation:
    return single_turn(question, answer) | {"right": [answer]}


def with_blank(before: str, asked: str) -> str:
    """A blank before the words that are copied belongs to the first word's token."""
    return f" {asked}" if before.endswith(" ") else asked


@cache
def ways_of(language: str, name: str, split: str) -> list[str]:
    """The ways to ask that belong to a split, by their own text. language: its file."""
    return [way for way in read_texts(language)[name].splitlines() if split_of(way, 6) == split]


def ask(rng: StableRandom, name: str, split: str, **slots: str) -> str:
    """A question in one of a split's ways, sometimes in lower case, without its question mark, or after a greeting."""
    named = "n" in slots
    # The name belongs to the split, so half of the questions with a name use training's ways.
    ways = ways_of("lookup", name, "train" if named and rng.below(2) else split)
    way = rng.choice(ways)
    # Mix one way's ending into another: the model learns that a name can follow and precede anything.
    if named and split == "train" and not rng.below(4):
        way = way.partition("{n}")[0] + "{n}" + rng.choice(ways).rpartition("{n}")[2]
    if not rng.below(4):
        way = way.lower()
    if not rng.below(4):
        way = way.rstrip("?.")
    if not rng.below(8):
        way = rng.choice(GREETINGS) + way
    return fill(way, lambda slot: slots.get(slot) or draw_word(rng, slot))


def draw_question(rng: StableRandom, split: str, text: str) -> str:
    """A question that this text answers; about anything if there is too little to ask about."""
    verb, phrase = what_is_asked(text)
    if not phrase:
        return ask(rng, "search_anything", split, a=draw_line(rng, "things"))
    if not verb:
        return ask(rng, "search", split, a=phrase)
    third = re.sub("(ch|sh|[osxz])s$", r"\1es", f"{verb}s")
    third = re.sub("([^aeiou])ys$", r"\1ies", third)
    return ask(rng, "search_doing", split, v=f"{verb} {phrase}", t=f"{third} {phrase}")


def what_is_asked(text: str) -> tuple[str, str]:
    """
    "Splits a path into head and tail, and …" -> ("split", "a path into head and tail"); without such a verb at the
    beginning the longest noun phrase: ("", "hashable objects of a set"). ("", "") if that says too little.
    """
    verb, _, rest = text.partition(" ")
    verb = verb.lower()
    # The third person: "returns".
    if verb not in VERBS:
        verb = verb[:-1]
    if verb not in VERBS:
        verb = ""
        rest = max(NO_NOUN.split(text), key=len)
    phrase = re.match(rf"({WORD.pattern} ?){{,9}}", rest)[0]
    words = content_words(phrase)
    if len(words) < 2:
        return "", ""
    return verb, phrase[: words[-1].end()]


def content_words(question: str) -> list[re.Match]:
    """The words that say what the question is about."""
    return [word for word in WORD.finditer(question) if word[0].lower() not in STOP_WORDS]


# ---- Made-up names and texts

def fill(template: str, draw: Callable[[str], str]) -> str:
    """A template with each slot replaced by a word that is drawn for it."""
    return re.sub(r"\{(\w)\}", lambda slot: draw(slot[1]), template)


def draw_line(rng: StableRandom, name: str) -> str:
    """One of the templates of that name, filled with drawn words."""
    return fill(rng.choice(TEXTS[name].splitlines()), partial(draw_word, rng))


def draw_name(rng: StableRandom, split: str) -> str:
    """A name of this split: of an object that is trained on, or, more often, made up."""
    if split == "train" and not rng.below(3):
        return draw_word(rng, "n")
    while True:
        name = draw_line(rng, "names")
        if split_of_name(name) == split:
            return name


def draw_text(rng: StableRandom) -> str:
    """A passage of one or two sentences: from the documentation, from templates, or any words in a row."""
    sentences = []
    for _ in range(1 + rng.below(3) // 2):
        template = rng.choice(TEXTS["notes"].splitlines())
        if not rng.below(2):
            kinds = [rng.choice("wwgpprrdcccGWzx") for _ in range(2 + rng.below(9))]
            template = " ".join(f"{{{kind}}}" for kind in [*kinds, "w"]) + "."
        sentences.append(capital(fill(template, partial(draw_word, rng))))
    return " ".join(sentences)


def draw_word(rng: StableRandom, kind: str) -> str:
    """A word of a kind, as listed in lookup.toml."""
    # Random characters make words that no tokenizer has as one token.
    if kind in "rR":
        word = "".join(rng.choice(CHARACTERS) for _ in range(2 + rng.below(5)))
    else:
        word = rng.choice(vocabulary()[kind.lower()])
    return capital(word) if kind.isupper() else word


@cache
def vocabulary() -> dict[str, Sequence[str]]:
    """The words of each kind."""
    names, passages = zip(*objects("train"))
    return {
        "c": " ".join(passages).split(),
        "d": "0123456789",
        "g": TEXTS["g"].split(),
        "m": MODULES,
        "n": names,
        "p": sorted(documentation_words()),
        "t": [text for text in passages if len(text) < 100],
        "w": spelled_words("train"),
        "x": SIGNS,
        "z": "".join(TEXTS["z"].split()),
    }


# ---- Passages of real libraries

@cache
def objects(split: str) -> list[tuple[str, str]]:
    """
    (name, passage) of a split's objects. A passage is the beginning of the library's passage, in whole sentences;
    `documented` has the first sentence.
    """
    found = []
    for name, first in documented(split).items():
        text = first + first_paragraph(documentation()[name])[len(first):]
        found.append((name, text[: max(end for end in sentence_ends(text) if end <= LONGEST_PASSAGE)]))
    return found


def passages_of(tool: str, path: str, split: str) -> list[tuple[str, str]]:
    """(title, text) of a split's passages that can be asked about, at most SIZES[split], the same each time."""
    library = open_tools(path).library
    rows = library.query("SELECT title, text, place FROM passages ORDER BY id")
    found = []
    for index in shuffled(len(rows), f"{tool}:passages"):
        passage = passage_of(*rows[index])
        if split_of(passage.text) != split:
            continue
        # The tool finds the first passage of a title, so only that one can be looked up.
        if library.lookup(passage.title) == passage if tool == "lookup" else what_is_asked(passage.text)[1]:
            found.append((passage.title, passage.text))
        if len(found) == SIZES[split]:
            break
    if not found:
        raise UserError(f"task {tool}:{path} has nothing to {split} on: of its {len(rows):,} passages none in that "
                        f"split can be asked about")
    return found
