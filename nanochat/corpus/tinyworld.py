"""
The embedded corpus: a small consistent world told in varied English, generated, with a known entropy.

    from nanochat.corpus.tinyworld import document, floor_bits
    text = document(seed=1, index=0)      # a pure function of (seed, index): nothing to download, nothing to shuffle
    floor_bits(text)                      # -log2 p(text): what a perfect model would pay for it

Every choice is uniform over n equally likely alternatives and every text has exactly one derivation, so its
probability is a product of 1/n that `floor_bits` recovers from the text alone. Bits per byte above this floor are
what a model has not learnt; no other corpus can tell that number.

About every second fact keeps back one of its phrasings, for ever and for every seed: `held_out_questions()`. Who
answers them has combined a fact it knows with a phrasing it knows, and has not recited.
"""
import hashlib
import math
import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

from nanochat.corpus import tinyworld_facts as data
from nanochat.dataset import iter_texts, load_manifest
from nanochat.distributed import print0
from nanochat.errors import UserError

FACT_TOPICS = ("capitals", "elements", "opposites", "calendar", "planets", "colors", "animals", "spelling", "counting",
               "sums", "equations")
TOPICS = (*FACT_TOPICS, "stories", "conversations")
LENGTHS = {**dict.fromkeys(FACT_TOPICS, (3, 7)), "stories": (5, 8), "conversations": (4, 7)}  # sentences, uniform
NEVER_HELD_OUT = ("counting", "sums", "equations")  # computed: there are so many that they would drown the others
PROMPTS, COLORS = data.PROMPTS, data.COLORS

T = TypeVar("T")
Draw = Callable[[int], int]  # n -> one of 0 … n-1, equally likely
Slots = dict[str, str]       # slot of a template -> the word that fills it


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


class Question(NamedTuple):
    topic: str
    prompt: str  # a document may begin so; a space and the answer must follow, then "."
    answer: str


# ---- The facts ------------------------------------------------------------------------------------------------

def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _prompt(telling: Telling, answer: str) -> str:
    """The telling as the beginning of a document, up to its answer."""
    text = f"Question: {telling.question} Answer: {telling.reply}" if telling.question else telling.reply
    return text.removesuffix(f" {answer}.")


def _hold_out(key: str, tellings: list[Telling], answer: str) -> Telling | None:
    """For about half of all keys one of these tellings; never one of the prompts that a model is to complete."""
    digest = hashlib.sha256(key.encode()).digest()
    candidates = [telling for telling in tellings if _prompt(telling, answer) not in dict(PROMPTS)]
    return candidates[digest[1] % len(candidates)] if candidates and digest[0] % 2 else None


@cache
def facts() -> tuple[Fact, ...]:
    """Every fact of the world with all its tellings, in a fixed order."""
    found = []
    for topic, noun, table, own in data.RELATIONS:
        if isinstance(table, str):
            table = [pair.split("=") for pair in " ".join(table.split()).split(", ")]
        for row in table:
            slots = dict(zip("sayx", row))  # subject, answer, and what the computed facts need besides
            slots["np"] = (noun or "").format(**slots)
            slots |= {"S": _capital(slots["s"]), "A": _capital(slots["a"]), "Np": _capital(slots["np"])}
            tellings, answer_last = [], []
            for template in (*data.GENERIC, *own) if noun else own:
                question, _, reply = template.format(**slots).rpartition(" | ")
                tellings.append(Telling(question, reply))
                if template.endswith(" {a}.") and topic not in NEVER_HELD_OUT:
                    answer_last.append(tellings[-1])
            held_out = _hold_out(f"{noun}: {slots['s']}", answer_last, slots["a"])
            kept = tuple(telling for telling in tellings if telling != held_out)
            found.append(Fact(topic, slots["s"], slots["a"], kept, held_out))
    return tuple(found)


@cache
def held_out_questions() -> tuple[Question, ...]:
    """What a model is asked that it can have read in no document, though it has read fact and phrasing apart."""
    return tuple(Question(fact.topic, _prompt(fact.held_out, fact.answer), fact.answer)
                 for fact in facts() if fact.held_out)


@cache
def _tellings(topic: str, questions_only: bool = False) -> tuple[tuple[Telling, ...], ...]:
    """For each fact of the topic its tellings: what a document draws from."""
    return tuple(tuple(telling for telling in fact.tellings if telling.question or not questions_only)
                 for fact in facts() if fact.topic == topic)


# ---- Writing --------------------------------------------------------------------------------------------------

@cache
def _slots(template: str) -> tuple[str, ...]:
    """The slots of a template in order of their first use."""
    return tuple(dict.fromkeys(slot for _, slot, _, _ in string.Formatter().parse(template) if slot))


def _pick(choices: Sequence[T], draw: Draw) -> T:
    return choices[draw(len(choices))]


def _fill(templates: tuple[str, ...], known: Slots, draw: Draw) -> tuple[str, Slots]:
    """One of the templates, its unknown slots drawn from the words not yet in use; the sentence and all its slots."""
    template = _pick(templates, draw)
    values = dict(known)
    for slot in _slots(template):
        if slot not in values:
            words = data.SLOTS[slot]
            used = [word for other, word in values.items() if data.SLOTS.get(other) is words]
            values[slot] = _pick([word for word in words if word not in used] if used else words, draw)
    return template.format_map(values), values


def _told_fact(topic: str, draw: Draw) -> str:
    if topic in data.LINES and draw(2):
        return _fill(data.LINES[topic], {}, draw)[0]
    question, reply = _pick(_pick(_tellings(topic), draw), draw)
    if question:
        return _fill(data.QUESTION_FRAMES, {"q": question, "a": reply}, draw)[0]
    return _fill(data.STATEMENT_FRAMES, {"s": reply}, draw)[0]


def _story(count: int, draw: Draw) -> Iterator[str]:
    opening, values = _fill(data.OPENINGS, {}, draw)
    yield opening
    settled = {slot: values[slot] for slot in data.SETTLED["stories"]}
    for _ in range(count - 2):
        yield _fill(data.EVENTS, settled, draw)[0]
    yield _fill(data.ENDINGS, settled, draw)[0]


def _conversation(count: int, draw: Draw) -> Iterator[str]:
    meeting, values = _fill(data.MEETINGS, {}, draw)
    yield meeting
    for _ in range(count - 1):
        x, y = _pick(("XY", "YX"), draw)  # either may ask
        turn = {"X": values[x], "Y": values[y]}
        if draw(2):
            yield _fill(data.EXCHANGES, turn, draw)[0]
        else:
            question, reply = _pick(_pick(_tellings(_pick(FACT_TOPICS, draw), True), draw), draw)
            yield data.QUOTED_FACT.format(**turn, q=question, a=reply)


def sentences(draw: Draw) -> list[str]:
    """The sentences of one document: draws its topic, then its length, then the sentences in order."""
    topic = _pick(TOPICS, draw)
    fewest, most = LENGTHS[topic]
    count = fewest + draw(most - fewest + 1)
    if topic == "stories":
        return list(_story(count, draw))
    if topic == "conversations":
        return list(_conversation(count, draw))
    return [_told_fact(topic, draw) for _ in range(count)]


def document(seed: int, index: int) -> str:
    """
    Document `index` of corpus `seed`: one line, sentences separated by one space, each ending in ".".
    The same text on every machine: what random.Random(str).random() gives is guaranteed not to change with Python.
    """
    uniform = random.Random(f"{seed}:{index}").random
    return " ".join(sentences(lambda n: int(uniform() * n)))


# ---- Reading: the probability of a text, from the text alone --------------------------------------------------

class _Reading(NamedTuple):
    """One way to derive some sentences. What the length of the document costs is not in `bits` yet."""
    topic: str
    bits: float
    settled: Slots  # who a story or a conversation is about; empty for facts, and when a story has asked its question


@cache
def _pattern(template: str) -> tuple[re.Pattern[str], str]:
    """A template as a pattern, later uses of a slot referring back to its first; and its longest literal part."""
    shapes = dict.fromkeys(data.SLOTS, r"\w+") | {"s": ".+", "q": r".+\?", "a": ".+"}
    parts, seen, longest = [], set(), ""
    for literal, slot, _, _ in string.Formatter().parse(template):
        parts.append(re.escape(literal))
        longest = max(longest, literal, key=len)
        if slot:
            parts.append(f"(?P={slot})" if slot in seen else f"(?P<{slot}>{shapes[slot]})")
            seen.add(slot)
    return re.compile("".join(parts)), longest


@cache
def _drawn(template: str, known: tuple[str, ...]) -> tuple[list[tuple[str, frozenset[str], str]], float]:
    """The slots that are drawn, as (slot, its words, slots it must differ from), and the bits that they cost."""
    drawn, before, bits = [], list(known), 0.0
    for slot in _slots(template):
        if slot in data.SLOTS and slot not in known:
            words = data.SLOTS[slot]
            rivals = "".join(other for other in before if data.SLOTS[other] is words)
            drawn.append((slot, frozenset(words), rivals))
            before.append(slot)
            bits += math.log2(len(words) - len(rivals))
    return drawn, bits


def _matches(templates: tuple[str, ...], sentence: str, known: Slots) -> Iterator[tuple[Slots, float]]:
    """(all slots, bits) of every way to fill one of equally likely templates so that it gives the sentence."""
    for template in templates:
        pattern, literal = _pattern(template)
        # Looking for the literal first saves most patterns, which are ten times as slow.
        if literal in sentence and (found := pattern.fullmatch(sentence)):
            values = known | found.groupdict()
            drawn, bits = _drawn(template, tuple(known))
            if all(values[slot] == word for slot, word in known.items()) and all(
                    values[slot] in words and all(values[slot] != values[rival] for rival in rivals)
                    for slot, words, rivals in drawn):
                yield values, bits + math.log2(len(templates))


@cache
def _fact_bits(questions_only: bool = False) -> dict[Telling, list[tuple[str, float]]]:
    """What is told -> (topic, bits) for each fact told so: one list, because the uniqueness is tested, not assumed."""
    table: dict[Telling, list[tuple[str, float]]] = {}
    for topic in FACT_TOPICS:
        of_topic = _tellings(topic, questions_only)
        for tellings in of_topic:
            for telling in tellings:
                table.setdefault(telling, []).append((topic, math.log2(len(of_topic) * len(tellings))))
    return table


def _told_facts(sentence: str) -> Iterator[_Reading]:
    """Every way in which the sentence stands in a document about facts."""
    frames = data.QUESTION_FRAMES if "?" in sentence else data.STATEMENT_FRAMES
    for values, frame_bits in _matches(frames, sentence, {}):
        telling = (values["q"], values["a"]) if "q" in values else ("", values["s"])
        for topic, bits in _fact_bits().get(telling, ()):
            yield _Reading(topic, bits + frame_bits + (topic in data.LINES), {})
    for topic, lines in data.LINES.items():
        yield from (_Reading(topic, bits + 1, {}) for _, bits in _matches(lines, sentence, {}))


def _begin(sentence: str) -> Iterator[_Reading]:
    """Every way in which the sentence can open a document."""
    yield from _told_facts(sentence)
    for topic, openings in (("stories", data.OPENINGS), ("conversations", data.MEETINGS)):
        for values, bits in _matches(openings, sentence, {}):
            yield _Reading(topic, bits, {slot: values[slot] for slot in data.SETTLED[topic]})


def _continue(topic: str, settled: Slots, sentence: str) -> Iterator[_Reading]:
    """Every way in which the sentence can follow in a document of this topic; its own bits only."""
    if topic == "stories":
        if settled:
            yield from (_Reading(topic, bits, settled) for _, bits in _matches(data.EVENTS, sentence, settled))
            yield from (_Reading(topic, bits, {}) for _, bits in _matches(data.ENDINGS, sentence, settled))
    elif topic == "conversations":
        for turn in (settled, {"X": settled["Y"], "Y": settled["X"]}):
            # one bit for who asks, one for what kind of question
            yield from (_Reading(topic, 2 + bits, settled) for _, bits in _matches(data.EXCHANGES, sentence, turn))
            for values, _ in _matches((data.QUOTED_FACT,), sentence, turn):
                for _, bits in _fact_bits(True).get((values["q"], values["a"]), ()):
                    yield _Reading(topic, 2 + math.log2(len(FACT_TOPICS)) + bits, settled)
    else:
        yield from (reading for reading in _told_facts(sentence) if reading.topic == topic)


def _length_bits(topic: str, count: int, nothing_settled: bool) -> float:
    """-log2 of the probability that a document of this topic gets so far; inf if it cannot."""
    fewest, most = LENGTHS[topic]
    if topic == "stories" and nothing_settled:  # its question has shown how long the story is
        fitting = int(fewest <= count <= most)
    else:
        fitting = most + 1 - max(fewest, count + (topic == "stories"))
    return math.log2((most + 1 - fewest) / fitting) if fitting > 0 else math.inf


def derivations(text: str) -> list[tuple[str, float]]:
    """(topic, bits) of every way to begin a document with these sentences; the language is built to have one at most."""
    if not text.endswith("."):
        return []
    first, *rest = [piece + "." for piece in text[:-1].split(". ")]
    readings = list(_begin(first))
    for sentence in rest:
        readings = [_Reading(topic, bits + step.bits, step.settled)
                    for topic, bits, settled in readings for step in _continue(topic, settled, sentence)]
    paid = [(topic, math.log2(len(TOPICS)) + bits + _length_bits(topic, 1 + len(rest), not settled))
            for topic, bits, settled in readings]
    return [(topic, bits) for topic, bits in paid if bits < math.inf]


def _derivation(text: str) -> tuple[str, float]:
    found = derivations(text)
    if not found:
        raise UserError(f"not a text of the tiny world: {text[:80]!r}; expected whole sentences as document() writes them")
    assert len(found) == 1, f"{text!r} has several derivations: {found}"
    return found[0]


def floor_bits(text: str) -> float:
    """
    -log2 of the probability that a document begins with these sentences. Going on after the earlier ones is paid for,
    stopping after the last is not: a model pays that at <|bos|>, which has no bytes. UserError for any other text.
    """
    return _derivation(text)[1]


def topic_of(text: str) -> str:
    """The topic of a document or of its first sentences. UserError for any other text."""
    return _derivation(text)[0]


def entropy_floor(data: str) -> float | None:
    """Bits per byte of the validation documents under the process that made them, where that is known; else None."""
    if load_manifest(data)["source"] != "tinyworld":
        return None
    texts = list(iter_texts(data, "val"))
    try:
        return sum(map(floor_bits, texts)) / sum(len(text.encode()) for text in texts)
    except UserError as error:  # made by another version of the world: worth a line, not worth a run
        print0(f"no entropy floor: {error}")
        return None
