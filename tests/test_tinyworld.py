"""The tiny world: true, unambiguous, the same for ever, and with an entropy that is exactly what it says."""
import calendar
import datetime
import functools
import hashlib
import math
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanochat.corpus import tinyworld, tinyworld_facts
from nanochat.errors import UserError
from nanochat.corpus.tinyworld import Draw, Fact, derivations, document, facts, floor_bits, held_out_questions, topic_of

KNOWLEDGE = ("capitals", "elements", "opposites", "calendar", "planets", "colors", "animals", "spelling")


@functools.cache
def corpus(seed: int = 7, count: int = 20_000) -> list[str]:
    return [document(seed, index) for index in range(count)]


def facts_of(topic: str) -> list[Fact]:
    return [fact for fact in facts() if fact.topic == topic]


# ---- The same for ever --------------------------------------------------------------------------------------------

def test_documents_are_pure_functions_of_seed_and_index_and_never_change():
    keys = [(0, 0), (1, 7), (-1, 7), (1, 11), (11, 1), (2026, 123_456)]
    texts = [document(*key) for key in keys]
    random.seed(5)  # nobody else's generator may matter, nor the order of the calls
    assert [document(*key) for key in reversed(keys)] == texts[::-1]
    assert len(set(texts)) == len(keys), "seeds n and -n, or (1, 11) and (11, 1), coincide"
    # Another digest is another corpus: every bits-per-byte figure published for it refers to the old one.
    digest = hashlib.sha256("\n".join(corpus(seed=0, count=1000) + texts).encode()).hexdigest()
    assert digest.startswith("2283d33781c614e19b8222e836a922c1")


def test_importing_builds_no_tables():
    code = ("import sys, nanochat.corpus.tinyworld as t\n"
            "assert t.facts.cache_info().currsize == 0 and 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=Path(__file__).parents[1])


def test_documents_are_one_line_of_whole_sentences_and_of_the_promised_length():
    documents = corpus()
    assert all(re.fullmatch(r"[!-~]+( [!-~]+)*\.", text) for text in documents[:3000])
    assert 200 < sum(map(len, documents)) / len(documents) < 350
    counts = {topic: Counter() for topic in tinyworld.TOPICS}
    for text in documents[:3000]:
        counts[topic_of(text)][text.count(". ") + 1] += 1
    for topic, (fewest, most) in tinyworld.LENGTHS.items():
        assert set(counts[topic]) == set(range(fewest, most + 1))
        assert 160 < counts[topic].total() < 300  # 231 expected, standard deviation 15


# ---- True -----------------------------------------------------------------------------------------------------

def test_there_are_many_facts_with_many_tellings_and_no_two_read_alike():
    known = [fact for fact in facts() if fact.topic in KNOWLEDGE]
    assert len(known) >= 400
    assert min(len(fact.tellings) for fact in facts()) >= 8
    everything = Counter(telling for fact in facts() for telling in (*fact.tellings, fact.held_out) if telling)
    assert everything.most_common(1)[0][1] == 1
    for fact in facts():
        questions = [telling for telling in fact.tellings if telling.question]
        assert questions and len(questions) < len(fact.tellings)
        assert all(fact.answer.lower() in f"{q} {reply}".lower() for q, reply in fact.tellings)
        assert all((q == "" or q.endswith("?")) and reply.endswith(".") for q, reply in fact.tellings)
        assert not any(". " in reply or "?" in reply for _, reply in fact.tellings)
        if fact.topic in ("colors", "animals"):
            assert not any(re.search(r"\ba [aeiou]|\ban [^aeiou]", f"{q} {reply}".lower()) for q, reply in fact.tellings)


def test_days_and_months_agree_with_the_calendar_module():
    days, months = list(calendar.day_name), list(calendar.month_name)[1:]
    checked = Counter()
    for fact in facts_of("calendar"):
        everything = " ".join(f"{q} {reply}" for q, reply in fact.tellings)
        kind = re.search(r"(two days after|the day after|the day before|month after|month before|number of days|"
                         r"month of)", everything).group(1)
        if fact.subject in days:
            step = {"the day after": 1, "the day before": -1, "two days after": 2}[kind]
            monday = datetime.date(2024, 1, 1)
            day = monday + datetime.timedelta(days.index(fact.subject) + step)
            assert fact.answer == day.strftime("%A")
        elif kind == "number of days":
            assert int(fact.answer) == calendar.monthrange(2023, 1 + months.index(fact.subject))[1]
        elif kind == "month of":
            ordinals = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
            assert fact.answer == months[ordinals.index(fact.subject)]
        else:
            assert months[(months.index(fact.subject) + (1 if kind == "month after" else -1)) % 12] == fact.answer
        checked[kind.split()[-1]] += 1
    assert checked == {"after": 7 + 7 + 12, "before": 7 + 12, "days": 11, "of": 12}


def test_what_is_computed_is_right():
    for fact in facts_of("sums"):
        x, sign, y = fact.subject.split()
        assert int(fact.answer) == {"+": int(x) + int(y), "-": int(x) - int(y)}[sign] >= 0
        assert (f"What is {x} {sign} {y}?", f"{fact.answer}.") in fact.tellings
    for fact in facts_of("equations"):
        a, b, c = map(int, re.fullmatch(r"(\d)\*x \+ (\d) = (\d+)", fact.subject).groups())
        assert a * int(fact.answer) + b == c
        assert ("", f"If {fact.subject}, then {a}*x = {c - b} and x is {fact.answer}.") in fact.tellings
    for fact in facts_of("spelling"):
        assert fact.answer.split("-") == list(fact.subject) and 3 <= len(fact.subject) <= 8
    for fact in facts_of("counting"):
        letter = re.search(r"the letter (\w) occurs", fact.tellings[0].reply).group(1)
        assert ["never", "once", "twice", "three times"].index(fact.answer) == fact.subject.count(letter)
        spelled = "-".join(fact.subject)
        assert ("", f"In {spelled}, you find the letter {letter} {fact.answer}.") in fact.tellings
    assert [len(facts_of(topic)) for topic in ("sums", "equations", "spelling")] == [200, 180, 128]


def test_some_facts_from_elsewhere():
    distance = {"Earth": 1.0, "Mars": 1.52, "Venus": 0.72, "Mercury": 0.39, "Neptune": 30.1, "Uranus": 19.2,
                "Saturn": 9.5, "Jupiter": 5.2}  # astronomical units
    answers = {(fact.topic, fact.subject): fact.answer for fact in facts()}
    assert answers["planets", "planets"].split(", ") == sorted(distance, key=distance.get)
    assert answers["planets", "third"] == "Earth"
    for subject, answer in {"Japan": "Tokyo", "Chad": "N'Djamena", "Australia": "Canberra", "Turkey": "Ankara"}.items():
        assert answers["capitals", subject] == answer
    for subject, answer in {"potassium": "K", "tungsten": "W", "silver": "Ag", "sodium": "Na", "gold": "Au"}.items():
        assert answers["elements", subject] == answer
    for fact in facts_of("opposites"):
        assert answers["opposites", fact.answer] == fact.subject != fact.answer


def test_a_story_keeps_its_hero_pet_and_color():
    for text in [text for text in corpus()[:3000] if topic_of(text) == "stories"]:
        sentences = text.removesuffix(".").split(". ")
        opening, ending = sentences[0], sentences[-1]
        answer = ending.rsplit(": ", 1)[1].removeprefix("a ").split()[-1]
        assert re.search(rf"\b{answer}\b", opening), text
        assert "?" in ending and not any("?" in sentence for sentence in sentences[:-1])


# ---- The prompts and what is held out -----------------------------------------------------------------------------

def test_the_prompts_open_a_document_and_only_with_the_expected_answer():
    asked = dict(tinyworld.PROMPTS)
    assert asked["The capital of France is"] == "Paris" and asked["If 5*x + 3 = 13, then x is"] == "2" and len(asked) == 7
    for prompt, answer in tinyworld.PROMPTS:
        if answer is None:
            bits = [floor_bits(f"{prompt} {color}, says Ana.") for color in tinyworld.COLORS]
            assert max(bits) - min(bits) < 1e-12
        else:
            assert floor_bits(f"{prompt} {answer}.") < 20
            with pytest.raises(UserError, match="not a text of the tiny world"):
                floor_bits(f"{prompt} Lyon.")


def occurrences(telling: tinyworld.Telling, text: str) -> int:
    """How often a newline-joined corpus tells a fact so: as a whole sentence, whoever says it."""
    if telling.question:
        return len(re.findall(re.escape(telling.question) + r" [\w ,]+: " + re.escape(telling.reply), text))
    starts = (match.start() for match in re.finditer(re.escape(telling.reply), text))
    return sum(start == 0 or text[start - 1] == "\n" or text[start - 2:start] in (". ", ": ") for start in starts)


def test_what_is_held_out_never_occurs_and_has_no_probability():
    questions = held_out_questions()
    assert len(questions) >= 200 and len({question.prompt for question in questions}) == len(questions)
    held = [fact for fact in facts() if fact.held_out]
    assert 0.4 < len(held) / sum(fact.topic in KNOWLEDGE for fact in facts()) < 0.6
    text = "\n".join(corpus())
    kept_prompts = [tinyworld._prompt(telling, "") for fact in facts() for telling in fact.tellings]
    assert not any(kept.startswith(f"{question.prompt} ") for kept in kept_prompts for question in questions)
    for fact, question in zip(held, questions, strict=True):
        assert fact.held_out not in fact.tellings
        assert question.topic == fact.topic and question.answer == fact.answer
        assert question.prompt not in dict(tinyworld.PROMPTS)
        assert f"{question.prompt} {question.answer}." in (
            fact.held_out.reply, f"Question: {fact.held_out.question} Answer: {fact.held_out.reply}")
        with pytest.raises(UserError):
            floor_bits(f"{question.prompt} {question.answer}.")
        assert occurrences(fact.held_out, text) == 0
    # The search would have found them: what is not held out is found, in about the frequency it should have.
    kept = random.Random(0).sample([(fact, telling) for fact in held for telling in fact.tellings], 100)
    found = sum(occurrences(telling, text) for _, telling in kept)
    expected = sum(20_000 / 13 * 5 / len(facts_of(fact.topic)) / len(fact.tellings) for fact, _ in kept)
    assert 0.8 * expected < found < 1.4 * expected  # colors tell fewer facts, conversations add some


def test_phrasing_and_fact_of_every_held_out_question_occur_apart():
    def phrasing(fact: Fact, prompt: str) -> str:
        return re.sub(rf"\b{re.escape(fact.subject)}\b", "…", prompt, flags=re.IGNORECASE)

    told = Counter(phrasing(fact, tinyworld._prompt(telling, fact.answer))
                   for fact in facts() for telling in fact.tellings)
    held = [fact for fact in facts() if fact.held_out and fact.subject != "planets"]  # there is but one list of them
    for fact in held:
        assert told[phrasing(fact, tinyworld._prompt(fact.held_out, fact.answer))] >= 4, fact


# ---- The floor ----------------------------------------------------------------------------------------------------

class Recorder:
    """A draw that remembers what it cost."""

    def __init__(self, key: str) -> None:
        self.uniform, self.sizes = random.Random(key).random, []

    def __call__(self, n: int) -> int:
        self.sizes.append(n)
        return int(self.uniform() * n)


def test_floor_bits_are_what_the_draws_cost():
    """Generator and scorer share tables but no code; topic and length come first among the draws."""
    for index in range(3000):
        draw = Recorder(f"7:{index}")
        text = " ".join(tinyworld.sentences(draw))
        assert text == corpus()[index]
        bits = sum(math.log2(n) for n in draw.sizes)
        if topic_of(text) != "stories":  # elsewhere the length drawn counts only as far as it has shown
            lengths, count = draw.sizes[1], text.count(". ") + 1
            at_least = sum(tinyworld.LENGTHS[topic_of(text)][0] + i >= count for i in range(lengths)) / lengths
            bits += -math.log2(lengths) - math.log2(at_least)
        assert abs(floor_bits(text) - bits) < 1e-9
        assert len(derivations(text)) == 1


def every(write: Callable[[Draw], str], followed: Callable[[list[int], list[int]], bool]) -> Iterator[tuple[str, float]]:
    """
    (sentence, how many it stands for) over the whole tree of draws. While `followed(choices, sizes)` holds, a draw is
    followed into each of its branches; the later ones fill in words, where one random branch stands for all n.
    """
    rng, choices = random.Random(3), [0]
    while choices:
        taken, sizes, many = [], [], 1

        def draw(n: int) -> int:
            nonlocal many
            sizes.append(n)
            if followed(taken, sizes):
                taken.append(choices[len(taken)] if len(taken) < len(choices) else 0)
                return taken[-1]
            many *= n
            return int(rng.random() * n)

        yield write(draw), many
        choices = taken
        while choices and choices[-1] + 1 == sizes[len(choices) - 1]:
            choices.pop()
        if choices:
            choices[-1] += 1


def to_the_frame(topic: str) -> Callable[[list[int], list[int]], bool]:
    """Follow fact, telling and frame; where a topic has lines, a first draw of 1 leaves only the choice of a line."""
    def followed(taken: list[int], sizes: list[int]) -> bool:
        depth = 3 if topic not in tinyworld_facts.LINES else 2 if taken and taken[0] else 4
        return len(sizes) <= depth
    return followed


def fill(templates: tuple[str, ...], settled: dict[str, str]) -> Callable[[Draw], str]:
    return lambda draw: tinyworld._fill(templates, settled, draw)[0]


def first_only(taken: list[int], sizes: list[int]) -> bool:
    return len(sizes) == 1


def test_the_probabilities_of_all_openings_sum_to_one():
    total, entropy = {}, {}
    for topic in tinyworld.FACT_TOPICS:
        write = functools.partial(tinyworld._told_fact, topic)
        scored = [(many, floor_bits(text)) for text, many in every(write, to_the_frame(topic))]
        masses = [(many * 2 ** -bits, bits) for many, bits in scored]
        total[topic] = math.fsum(mass for mass, _ in masses)
        entropy[topic] = 13 * math.fsum(mass * bits for mass, bits in masses) - math.log2(13)
    for topic, templates in (("stories", tinyworld_facts.OPENINGS), ("conversations", tinyworld_facts.MEETINGS)):
        total[topic] = math.fsum(many * 2 ** -floor_bits(text) for text, many in every(fill(templates, {}), first_only))
    assert all(abs(mass - 1 / 13) < 1e-10 for mass in total.values()) and len(total) == 13
    assert abs(math.fsum(total.values()) - 1) < 1e-9

    # The exact entropy of a sentence gives that of a document; the mean over documents must not be far from it.
    bits = defaultdict(list)
    for text in corpus()[:8000]:
        bits[topic_of(text)].append(floor_bits(text))
    for topic, per_sentence in entropy.items():
        fewest, most = tinyworld.LENGTHS[topic]
        lengths = range(fewest, most + 1)
        going_on = -sum(math.log2((most + 1 - count) / len(lengths)) for count in lengths) / len(lengths)
        exact = math.log2(13) + per_sentence * (fewest + most) / 2 + going_on
        mean = sum(bits[topic]) / len(bits[topic])
        error = math.sqrt(sum((value - mean) ** 2 for value in bits[topic])) / len(bits[topic])
        assert abs(mean - exact) < 4.5 * error, topic
    assert 0.45 < sum(map(sum, bits.values())) / sum(map(len, corpus()[:8000])) < 0.6  # bits per byte, as documented


def test_the_probabilities_of_all_continuations_of_a_story_sum_to_that_of_the_story():
    told = 0
    for text in [text for text in corpus()[:400] if topic_of(text) == "stories"]:
        sentences = [sentence.rstrip(".") + "." for sentence in text.split(". ")]
        settled = next(tinyworld._begin(sentences[0])).settled
        for count in range(1, len(sentences)):
            prefix = " ".join(sentences[:count])
            mass = 0.0
            for templates in (tinyworld_facts.EVENTS, tinyworld_facts.ENDINGS):
                for sentence, many in every(fill(templates, settled), first_only):
                    longer = derivations(f"{prefix} {sentence}")  # none where the story must end, or must not yet
                    mass += sum(many * 2 ** (floor_bits(prefix) - bits) for _, bits in longer)
            assert abs(mass - 1) < 1e-9
            told += 1
    assert told > 100


def test_the_probabilities_of_all_next_lines_of_a_conversation_sum_to_one():
    text = next(text for text in corpus() if topic_of(text) == "conversations" and text.count(". ") == 6)
    sentences = [sentence.rstrip(".") + "." for sentence in text.split(". ")]
    settled = next(tinyworld._begin(sentences[0])).settled
    prefix = " ".join(sentences[:2])  # no conversation has only two sentences: going on is certain
    mass = Counter()
    for turn in (settled, {"X": settled["Y"], "Y": settled["X"]}):
        for sentence, many in every(fill(tinyworld_facts.EXCHANGES, turn), first_only):
            mass["line"] += many * 2 ** (floor_bits(prefix) - floor_bits(f"{prefix} {sentence}"))
        for fact in facts():
            for question, reply in fact.tellings:
                if question:
                    longer = f"{prefix} {turn['X']}: {question} {turn['Y']}: {reply}"
                    mass["fact"] += 2 ** (floor_bits(prefix) - floor_bits(longer))
    assert abs(mass["line"] - 0.5) < 1e-10 and abs(mass["fact"] - 0.5) < 1e-10


PARIS = "The capital of France is Paris."
PET = "Alice has a red cat called Luna."
STORY = PET + 3 * " Alice sings for Ana and Ben."
MEET = "Alice and Luna meet at the lake."


@pytest.mark.parametrize("text, wrong", [
    (PARIS, "The capital of France is Rome."), (PARIS, "the capital of France is Paris."), (PARIS, PARIS[:-1]),
    (PARIS, PARIS + " "), (PARIS, PARIS + "\n"), (PARIS, PARIS.replace(" ", "  ")), (PARIS, PARIS + "."), (PARIS, ""),
    (f"Ana to Tom: {PARIS}", f"Ana to Ana: {PARIS}"), (f"Ana to Tom: {PARIS}", f"Ana to Alice: {PARIS}"),
    (f"Ana, page 70: {PARIS}", f"Ana, page 7: {PARIS}"), (f"{PARIS} {PARIS}", f"{PARIS} Grass is green."),
    ("Ana: What is the capital of France? Tom: Paris.", "Ana: What is the capital of France? Ana: Paris."),
    ("Ana likes red and Tom likes blue.", "Ana likes red and Tom likes red."),
    (" ".join(7 * [PARIS]), " ".join(8 * [PARIS])),
    (f"{PET} Alice sings for Ana and Ben.", f"{PET} Emma sings for Ana and Ben."),
    (f"{STORY} Question: What color is Luna? Answer: red.", f"{STORY} Question: What color is Luna? Answer: blue."),
    (f"{STORY} Question: What color is Luna? Answer: red.", f"{PET} Question: What color is Luna? Answer: red."),
    (f"{MEET} Luna: Where is Ben? Alice: At the lake, with Ida.", f"{MEET} Emma: Where is Ben? Luna: At the lake, with Ida."),
])
def test_one_small_step_outside_the_language_there_is_no_floor(text: str, wrong: str):
    assert 0 < floor_bits(text) < 300
    assert derivations(wrong) == []
    with pytest.raises(UserError):
        floor_bits(wrong)
