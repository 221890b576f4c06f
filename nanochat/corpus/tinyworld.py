"""
The embedded corpus: a small consistent world told in varied English, generated, with a known entropy.

    generate(seed=1, index=0).text       # a pure function of (seed, index), with nothing to download
    generate(seed=1, index=0).bits       # -log2 p(text): the fewest bits that any model needs for it on average

Every choice is uniform over n equally likely alternatives, and every text has exactly one derivation (a test parses
texts to show this). The probability of a text is therefore the product of the 1/n of its choices, which are counted as
they are drawn. Bits per byte above this floor measure how much a model has not learned.

About every second fact has one phrasing that is held out, always and for every seed. A model that answers it (the task
tinyworld:facts) has combined a fact that it knows with a phrasing that it knows; it cannot have memorised the answer.
"""
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from nanochat.data.stable_random import StableRandom
from nanochat.runtime.files import read_toml

DATA = read_toml("corpus/tinyworld.toml")
FACT_TOPICS = tuple(dict.fromkeys(relation["topic"] for relation in DATA["relations"]))
TOPICS = (*FACT_TOPICS, "stories", "conversations")
LENGTHS = {**dict.fromkeys(FACT_TOPICS, (3, 7)), "stories": (5, 8), "conversations": (4, 7)}  # sentences, uniform
NEVER_HELD_OUT = ("counting", "sums", "equations")  # computed: they would outnumber all others

WORDS = DATA["words"].split()
PROMPTS = DATA["prompts"]  # beginning of a document -> what must follow; "" if several answers may
SENTENCES = {name: lines.splitlines() for name, lines in DATA["sentences"].items()}
SLOT = re.compile(r"\{(\w+)\}")
SLOTS: dict[str, list[str]] = {}  # slot -> the words that may fill it
for slots, words in DATA["slots"].items():
    SLOTS |= dict.fromkeys(slots, words.split())

# Computed facts: (subject, answer, {y}, {x}). They are many, about few words: small models find spelling and arithmetic
# hardest, because tokens hide letters and digits.
COMPUTED: dict[str, list[tuple[str, ...]]] = {
    "spellings": [(word, "-".join(word)) for word in WORDS],
    "letters": [
        (word, {1: "once", 2: "twice", 3: "three times"}[word.count(x)], "-".join(word), x)
        for word in WORDS
        if len(set(word)) < len(word)
        for x in dict.fromkeys(word)
    ],
    "additions": [
        (f"{x} + {y}", f"{x + y}", f"{y}", f"{x}")
        for x in range(1, 11)
        for y in range(1, 11)
    ],
    "subtractions": [
        (f"{x} - {y}", f"{x - y}", f"{y}", f"{x}")
        for x in range(11, 21)
        for y in range(1, 11)
    ],
    "equations": [
        (f"{a}*x + {b} = {a * x + b}", f"{x}", f"{a}*x = {a * x}")
        for a in range(2, 7)
        for b in range(1, 7)
        for x in range(1, 7)
    ],
}

Slots = dict[str, str]  # slot of a template -> the word that fills it


class Telling(NamedTuple):
    """One phrasing of one fact: a question and its reply, or a statement (then `question` is empty)."""
    question: str
    reply: str


class Fact(NamedTuple):
    topic: str
    tellings: list[Telling]   # equally likely in documents
    held_out: Telling | None  # one more, which no document of any seed contains
    noun: str                 # template of the noun phrase of its relation; "" for relations without one
    slots: Slots              # of its templates: {a} is the answer
    templates: list[str]      # of all its tellings


class Document(NamedTuple):
    text: str    # one line, sentences separated by one space, each ending in "."
    bits: float  # -log2 of the probability that a document begins with this text


# ---- The facts ------------------------------------------------------------------------------------------------------

def capital(text: str) -> str:
    """The text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def as_prompt(telling: Telling, answer: str) -> str:
    """The telling as the beginning of a document, up to its answer."""
    text = f"Question: {telling.question} Answer: {telling.reply}" if telling.question else telling.reply
    return text.removesuffix(f" {answer}.")


@cache
def facts() -> list[Fact]:
    """Every fact of the world with all its tellings, in a fixed order."""
    world = []
    for relation in DATA["relations"]:
        noun = relation.get("noun", "")
        templates = relation["tellings"].splitlines()
        if noun:
            templates = SENTENCES["generic"] + templates
        if "computed" in relation:
            rows = COMPUTED[relation["computed"]]
        else:
            # Pairs are separated by commas, and an answer may contain commas, too.
            pairs = re.split(", (?=[^,]*=)", " ".join(relation["facts"].split()))
            rows = [tuple(pair.split("=")) for pair in pairs]
        world += [make_fact(relation["topic"], noun, templates, row) for row in rows]
    return world


def make_fact(topic: str, noun: str, templates: list[str], row: Sequence[str]) -> Fact:
    # Subject, answer, and the helpers of computed facts.
    slots = dict(zip("sayx", row))
    slots["np"] = noun.format(**slots)
    slots |= {"S": capital(slots["s"]), "A": capital(slots["a"]), "Np": capital(slots["np"])}
    tellings = []
    answer_last = []
    for template in templates:
        question, _, reply = template.format(**slots).rpartition(" | ")
        telling = Telling(question, reply)
        tellings.append(telling)
        if template.endswith(" {a}.") and as_prompt(telling, slots["a"]) not in PROMPTS:
            answer_last.append(telling)
    # About half of the facts hold one of these out. A hash, not a draw: the choice must be the same for every seed, and
    # stay when facts are added.
    digest = hashlib.sha256(f"{noun or None}: {slots['s']}".encode()).digest()
    held_out = None
    if answer_last and digest[0] % 2 and topic not in NEVER_HELD_OUT:
        held_out = answer_last[digest[1] % len(answer_last)]
        tellings.remove(held_out)
    return Fact(topic, tellings, held_out, noun, slots, templates)


@cache
def facts_of(topic: str) -> list[Fact]:
    return [fact for fact in facts() if fact.topic == topic]


# ---- The documents --------------------------------------------------------------------------------------------------

def fill(templates: Sequence[str], known: Slots, rng: StableRandom) -> tuple[str, Slots]:
    """One of the templates, its unknown slots drawn from words not yet in use; returns the sentence and all slots."""
    template = rng.choice(templates)
    values = dict(known)
    for slot in SLOT.findall(template):
        if slot not in values:
            words = SLOTS[slot]
            # Other slots may have drawn from the same words: nobody in a sentence meets a namesake.
            used = [word for other, word in values.items() if SLOTS.get(other) is words]
            if used:
                words = [word for word in words if word not in used]
            values[slot] = rng.choice(words)
    return template.format_map(values), values


def sentence(kind: str, known: Slots, rng: StableRandom) -> str:
    text, _ = fill(SENTENCES[kind], known, rng)
    return text


def fact_sentence(topic: str, rng: StableRandom) -> str:
    if topic == "colors" and rng.below(2):
        return sentence("colors", {}, rng)
    question, reply = rng.choice(rng.choice(facts_of(topic)).tellings)
    if question:
        return sentence("question_frames", {"q": question, "a": reply}, rng)
    return sentence("statement_frames", {"s": reply}, rng)


def story(count: int, rng: StableRandom) -> Iterator[str]:
    opening, values = fill(SENTENCES["openings"], {}, rng)
    yield opening
    settled = {slot: values[slot] for slot in "HPkc"}
    for _ in range(count - 2):
        yield sentence("events", settled, rng)
    yield sentence("endings", settled, rng)


def conversation(count: int, rng: StableRandom) -> Iterator[str]:
    meeting, values = fill(SENTENCES["meetings"], {}, rng)
    yield meeting
    x, y = values["X"], values["Y"]
    for _ in range(count - 1):
        # Either of the two may ask.
        turn = rng.choice(({"X": x, "Y": y}, {"X": y, "Y": x}))
        if rng.below(2):
            yield sentence("exchanges", turn, rng)
        else:
            fact = rng.choice(facts_of(rng.choice(FACT_TOPICS)))
            question, reply = rng.choice([telling for telling in fact.tellings if telling.question])
            yield f"{turn['X']}: {question} {turn['Y']}: {reply}"


def generate(seed: int, index: int) -> Document:
    """
    Document `index` of corpus `seed`, the same on every machine: draws its topic, its length, then its sentences.

    bits: going on after a sentence counts, stopping after the last one does not, because a model pays for it at
    <|bos|>, which has no bytes. Only the last sentence of a story, its question, shows how long the story is.
    """
    rng = StableRandom(f"{seed}:{index}")
    topic = rng.choice(TOPICS)
    fewest, most = LENGTHS[topic]
    count = fewest + rng.below(most - fewest + 1)
    # After the last sentence these lengths are still possible.
    lengths = most + 1 - count
    if topic == "stories":
        sentences = story(count, rng)
        lengths = 1
    elif topic == "conversations":
        sentences = conversation(count, rng)
    else:
        sentences = (fact_sentence(topic, rng) for _ in range(count))
    text = " ".join(sentences)  # draws them
    return Document(text, rng.bits - math.log2(lengths))


# ---- The entropy of a data set --------------------------------------------------------------------------------------

def entropy_floor(seed: int, indices: list[int]) -> float:
    """Bits per byte of these documents under the process that makes them: no model can be better on average."""
    documents = [generate(seed, index) for index in indices]
    return sum(made.bits for made in documents) / sum(len(made.text.encode()) for made in documents)
