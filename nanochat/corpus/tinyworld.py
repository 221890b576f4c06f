"""
The embedded corpus: a small consistent world told in varied English, generated, with a known entropy.

    document(seed=1, index=0)            # a text; a pure function of (seed, index), with nothing to download
    generate(seed=1, index=0).bits       # -log2 p(text): the fewest bits that any model needs for it on average

Every choice is uniform over n equally likely alternatives, and every text has exactly one derivation (a test parses
texts to show this). The probability of a text is therefore the product of the 1/n of its choices, which are counted as
they are drawn. Bits per byte above this floor are what a model has not learnt.

About every second fact has one phrasing that is held out, always and for every seed: `held_out_questions()`. A model
that answers them has combined a fact that it knows with a phrasing that it knows; it cannot have memorised the answer.
"""
import hashlib
import math
import random
import string
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

from nanochat.corpus import tinyworld_facts as data
from nanochat.data.dataset import iter_texts, load_manifest

FACT_TOPICS = ("capitals", "elements", "opposites", "calendar", "planets", "colors", "animals", "spelling", "counting",
               "sums", "equations")
TOPICS = (*FACT_TOPICS, "stories", "conversations")
LENGTHS = {**dict.fromkeys(FACT_TOPICS, (3, 7)), "stories": (5, 8), "conversations": (4, 7)}  # sentences, uniform
NEVER_HELD_OUT = ("counting", "sums", "equations")  # computed: there are so many that they would outnumber the others
PROMPTS, COLORS = data.PROMPTS, data.COLORS

T = TypeVar("T")
Slots = dict[str, str]  # slot of a template -> the word that fills it


class Telling(NamedTuple):
    """One phrasing of one fact: a question and its reply, or a statement (then `question` is empty)."""
    question: str
    reply: str


class Fact(NamedTuple):
    topic: str
    subject: str
    answer: str
    tellings: tuple[Telling, ...]  # those that occur, equally likely
    held_out: Telling | None       # one more, which no document of any seed contains
    noun: str                      # template of the noun phrase of its relation; "" for relations without one
    slots: Slots                   # what the templates are filled with
    templates: tuple[str, ...]     # of all its tellings


class Question(NamedTuple):
    topic: str
    prompt: str  # a document may begin so; a space and the answer must follow, then "."
    answer: str


class Document(NamedTuple):
    text: str    # one line, sentences separated by one space, each ending in "."
    topic: str
    bits: float  # -log2 of the probability that a document begins with this text


class StableRandom:
    """
    Random draws that depend on the key only, on every machine and in every version of Python: for Random(str).random()
    alone Python promises this. bits: log2 of the number of equally likely outcomes of all draws so far.
    """

    def __init__(self, key: str) -> None:
        self.uniform, self.bits = random.Random(key).random, 0.0

    def below(self, n: int) -> int:
        """One of 0 … n − 1."""
        self.bits += math.log2(n)
        return int(self.uniform() * n)

    def choice(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]


# ---- The facts ------------------------------------------------------------------------------------------------------

def capital(text: str) -> str:
    """The text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def as_prompt(telling: Telling, answer: str) -> str:
    """The telling as the beginning of a document, up to its answer."""
    text = f"Question: {telling.question} Answer: {telling.reply}" if telling.question else telling.reply
    return text.removesuffix(f" {answer}.")


def choose_held_out(key: str, tellings: list[Telling], answer: str) -> Telling | None:
    """For about half of all keys one of these tellings; never one of the prompts that a model is to complete."""
    digest = hashlib.sha256(key.encode()).digest()
    candidates = [telling for telling in tellings if as_prompt(telling, answer) not in dict(PROMPTS)]
    return candidates[digest[1] % len(candidates)] if candidates and digest[0] % 2 else None


@cache
def facts() -> tuple[Fact, ...]:
    """Every fact of the world with all its tellings, in a fixed order."""
    found = []
    for topic, noun, table, own in data.RELATIONS:
        rows = [pair.split("=") for pair in " ".join(table.split()).split(", ")] if isinstance(table, str) else table
        templates = (*data.GENERIC, *own) if noun else own
        for row in rows:
            slots = dict(zip("sayx", row))  # subject, answer, and what the computed facts need besides
            slots["np"] = (noun or "").format(**slots)
            slots |= {"S": capital(slots["s"]), "A": capital(slots["a"]), "Np": capital(slots["np"])}
            split = (template.format(**slots).rpartition(" | ") for template in templates)
            tellings = [Telling(question, reply) for question, _, reply in split]
            answer_last = [telling for telling, template in zip(tellings, templates)
                           if template.endswith(" {a}.") and topic not in NEVER_HELD_OUT]
            held_out = choose_held_out(f"{noun}: {slots['s']}", answer_last, slots["a"])
            kept = tuple(telling for telling in tellings if telling != held_out)
            found.append(Fact(topic, slots["s"], slots["a"], kept, held_out, noun or "", slots, templates))
    return tuple(found)


@cache
def held_out_questions() -> tuple[Question, ...]:
    """Questions that occur in no document, though fact and phrasing of each occur apart."""
    return tuple(Question(fact.topic, as_prompt(fact.held_out, fact.answer), fact.answer)
                 for fact in facts() if fact.held_out)


@cache
def tellings_of(topic: str, questions_only: bool = False) -> tuple[tuple[Telling, ...], ...]:
    """For each fact of the topic its tellings: what a document draws from."""
    return tuple(tuple(telling for telling in fact.tellings if telling.question or not questions_only)
                 for fact in facts() if fact.topic == topic)


# ---- The documents --------------------------------------------------------------------------------------------------

@cache
def slots_of(template: str) -> tuple[str, ...]:
    """The slots of a template in order of their first use."""
    return tuple(dict.fromkeys(slot for _, slot, _, _ in string.Formatter().parse(template) if slot))


def fill(templates: tuple[str, ...], known: Slots, rng: StableRandom) -> tuple[str, Slots]:
    """One of the templates, its unknown slots drawn from the words not yet in use; the sentence and all its slots."""
    template = rng.choice(templates)
    values = dict(known)
    for slot in slots_of(template):
        if slot not in values:
            words = data.SLOTS[slot]
            used = [word for other, word in values.items() if data.SLOTS.get(other) is words]
            values[slot] = rng.choice([word for word in words if word not in used] if used else words)
    return template.format_map(values), values


def fact_sentence(topic: str, rng: StableRandom) -> str:
    if topic in data.LINES and rng.below(2):
        return fill(data.LINES[topic], {}, rng)[0]
    question, reply = rng.choice(rng.choice(tellings_of(topic)))
    if question:
        return fill(data.QUESTION_FRAMES, {"q": question, "a": reply}, rng)[0]
    return fill(data.STATEMENT_FRAMES, {"s": reply}, rng)[0]


def story(count: int, rng: StableRandom) -> Iterator[str]:
    opening, values = fill(data.OPENINGS, {}, rng)
    yield opening
    settled = {slot: values[slot] for slot in data.SETTLED["stories"]}
    for _ in range(count - 2):
        yield fill(data.EVENTS, settled, rng)[0]
    yield fill(data.ENDINGS, settled, rng)[0]


def conversation(count: int, rng: StableRandom) -> Iterator[str]:
    meeting, values = fill(data.MEETINGS, {}, rng)
    yield meeting
    for _ in range(count - 1):
        x, y = rng.choice(("XY", "YX"))  # either may ask
        turn = {"X": values[x], "Y": values[y]}
        if rng.below(2):
            yield fill(data.EXCHANGES, turn, rng)[0]
        else:
            question, reply = rng.choice(rng.choice(tellings_of(rng.choice(FACT_TOPICS), True)))
            yield data.QUOTED_FACT.format(**turn, q=question, a=reply)


def generate(seed: int, index: int) -> Document:
    """
    Document `index` of corpus `seed`, the same on every machine: draws its topic, its length, then its sentences.

    bits: going on after a sentence is paid for, stopping after the last one is not, because a model pays for that at
    <|bos|>, which has no bytes. Only the last sentence of a story, its question, shows how long the story is.
    """
    rng = StableRandom(f"{seed}:{index}")
    topic = rng.choice(TOPICS)
    fewest, most = LENGTHS[topic]
    count = fewest + rng.below(most - fewest + 1)
    if topic == "stories":
        return Document(" ".join(story(count, rng)), topic, rng.bits)
    if topic == "conversations":
        text = " ".join(conversation(count, rng))
    else:
        text = " ".join(fact_sentence(topic, rng) for _ in range(count))
    return Document(text, topic, rng.bits - math.log2(most + 1 - count))  # so many lengths are still possible


def document(seed: int, index: int) -> str:
    """The text of document `index` of corpus `seed`."""
    return generate(seed, index).text


# ---- The entropy of a data set --------------------------------------------------------------------------------------

def validation_documents(data: str) -> list[Document] | None:
    """
    The validation documents of a data set with their bits, in the order of the shard. None for a data set of another
    source, and, with a message, for one that another version of this module has made.
    """
    manifest = load_manifest(data)
    if manifest["source"] != "tinyworld":
        return None
    texts = list(iter_texts(data, "val"))
    # Data sets of earlier versions do not tell which documents were held out: all are generated again, in some seconds.
    generated = sum(manifest[key] for key in ("documents", "duplicates", "left_out"))
    indices = manifest.get("val_indices", range(generated))
    wanted: dict[str, Document | None] = dict.fromkeys(texts)
    wanted |= {made.text: made for made in (generate(manifest["seed"], i) for i in indices) if made.text in wanted}
    documents = [wanted[text] for text in texts]
    if None in documents:  # worth a line, not worth a run
        from nanochat.runtime.console import print0  # here: it loads torch, which making a data set does without

        print0(f"no entropy floor: another version has made {texts[documents.index(None)][:80]!r} of data set {data!r}")
        return None
    return documents


def entropy_floor(data: str) -> float | None:
    """Bits per byte of the validation documents under the process that made them, where that is known; else None."""
    documents = validation_documents(data)
    if documents is None:
        return None
    return sum(made.bits for made in documents) / sum(len(made.text.encode()) for made in documents)
