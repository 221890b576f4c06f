"""The embedded world: true, unambiguous, never changing, and with an entropy that is exactly what it says."""
import functools
import hashlib
import itertools
import json
import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from conftest import make_sums

from nanochat.corpus import tinyworld
from nanochat.corpus.make_dataset import make
from nanochat.corpus.tinyworld import (
    SENTENCES,
    SLOTS,
    Document,
    Telling,
    as_prompt,
    facts,
    facts_of,
    generate,
)
from nanochat.data.embedded import entropy_floor, sample_prompts
from nanochat.data.shard_reader import dataset_dir, iter_texts


@functools.cache
def corpus(seed: int = 7, count: int = 20_000) -> list[Document]:
    return [generate(seed, index) for index in range(count)]


# ---- The same for ever ----------------------------------------------------------------------------------------------

def test_documents_never_change():
    """Another digest is another corpus: every bits-per-byte figure published for it refers to the old one."""
    keys = [(0, 0), (1, 7), (-1, 7), (1, 11), (11, 1), (2026, 123_456)]
    texts = [generate(0, index).text for index in range(1000)] + [generate(*key).text for key in keys]
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest().startswith("2283d33781c614e19b8222e836a922c1")


# ---- The oracle: every way to parse a sentence or a document, with its probability ----------------------------------

PATTERNS = dict.fromkeys(SLOTS, r"\w+") | {"s": ".+", "q": r".+\?", "a": ".+"}


@functools.cache
def pattern(template: str) -> re.Pattern[str]:
    """A template as a pattern, later uses of a slot referring back to its first."""
    parts, seen = [], set()
    for literal, slot, _, _ in string.Formatter().parse(template):
        parts.append(re.escape(literal))
        if slot:
            parts.append(f"(?P={slot})" if slot in seen else f"(?P<{slot}>{PATTERNS[slot]})")
            seen.add(slot)
    return re.compile("".join(parts))


def parses(templates: tuple[str, ...], sentence: str, known: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
    """(all slots, bits) of every way to fill one of equally likely templates so that it gives the sentence."""
    for template in templates:
        if found := pattern(template).fullmatch(sentence):
            slots, bits = dict(known), math.log2(len(templates))
            for slot, word in found.groupdict().items():
                if slot in known:
                    free = {known[slot]}
                elif words := SLOTS.get(slot):
                    free = set(words) - {used for other, used in slots.items() if SLOTS.get(other) is words}
                else:
                    free = {word}  # a whole statement, question or reply, which is looked up
                if word not in free:
                    break
                slots[slot] = word
                bits += math.log2(len(free))
            else:
                yield slots, bits


@functools.cache
def bits_of_tellings(questions_only: bool) -> dict[Telling, list[tuple[str, float]]]:
    """What is told -> (topic, bits) for each fact that is told so."""
    table = defaultdict(list)
    for topic in tinyworld.FACT_TOPICS:
        for fact in facts_of(topic):
            told = [telling for telling in fact.tellings if telling.question or not questions_only]
            for telling in told:
                table[telling].append((topic, math.log2(len(facts_of(topic)) * len(told))))
    return table


def told(sentence: str) -> list[tuple[str, float]]:
    """(topic, bits) of every way in which the sentence stands in a document about facts."""
    found = [("colors", 1 + bits) for _, bits in parses(SENTENCES["colors"], sentence, {})]
    frames = SENTENCES["question_frames"] if "?" in sentence else SENTENCES["statement_frames"]
    for slots, frame_bits in parses(frames, sentence, {}):
        telling = Telling(slots["q"], slots["a"]) if "q" in slots else Telling("", slots["s"])
        found += [(topic, frame_bits + bits + (topic == "colors"))
                  for topic, bits in bits_of_tellings(False).get(telling, ())]
    return found


def said(sentence: str, x: str, y: str) -> list[float]:
    """Bits of every way in which the sentence stands in the conversation of x and y."""
    found = []
    for turn in ({"X": x, "Y": y}, {"X": y, "Y": x}):  # one bit for who asks, one for what kind of question
        found += [2 + bits for _, bits in parses(SENTENCES["exchanges"], sentence, turn)]
        for slots, _ in parses(("{X}: {q} {Y}: {a}",), sentence, turn):
            tellings = bits_of_tellings(True).get(Telling(slots["q"], slots["a"]), ())
            found += [2 + math.log2(len(tinyworld.FACT_TOPICS)) + bits for _, bits in tellings]
    return found


def derivations(text: str) -> list[tuple[str, float]]:
    """(topic, bits) of every way to generate a document, as the bits of its beginning: not those of ending here."""
    first, *rest = sentences = [sentence + "." for sentence in text.removesuffix(".").split(". ")]
    ways: list[tuple[str, list[list[float]]]] = []  # of each topic, the bits of each sentence's parses
    for topic in tinyworld.FACT_TOPICS:
        ways.append((topic, [[bits for of, bits in found if of == topic] for found in map(told, sentences)]))
    for slots, bits in parses(SENTENCES["openings"], first, {}):
        hero = {slot: slots[slot] for slot in "HPkc"}
        templates = [SENTENCES["events"]] * (len(rest) - 1) + [SENTENCES["endings"]]
        ways.append(("stories", [[bits]] + [[more for _, more in parses(kind, sentence, hero)]
                                            for kind, sentence in zip(templates, rest)]))
    for slots, bits in parses(SENTENCES["meetings"], first, {}):
        ways.append(("conversations", [[bits]] + [said(sentence, slots["X"], slots["Y"]) for sentence in rest]))
    found = []
    for topic, of_sentences in ways:
        fewest, most = tinyworld.LENGTHS[topic]
        if fewest <= len(sentences) <= most:
            lengths = 1 if topic == "stories" else most + 1 - len(sentences)  # that are possible after this sentence
            extra = math.log2(len(tinyworld.TOPICS)) + math.log2((most + 1 - fewest) / lengths)
            found += [(topic, extra + sum(bits)) for bits in itertools.product(*of_sentences)]
    return found


def test_bits_of_documents():
    for made in corpus()[:2000]:
        ((_, bits),) = derivations(made.text)
        assert abs(bits - made.bits) < 1e-9
    bits_per_byte = sum(made.bits for made in corpus()) / sum(len(made.text) for made in corpus())
    assert 0.45 < bits_per_byte < 0.6  # as documented


def test_one_derivation_of_every_fact():
    """And the probabilities of all sentences of a topic sum to one; drawn words stand for all that could be drawn."""
    rng, total = tinyworld.StableRandom("frames"), Counter()
    for fact in facts():
        for question, reply in fact.tellings:
            known = {"q": question, "a": reply} if question else {"s": reply}
            for frame in SENTENCES["question_frames"] if question else SENTENCES["statement_frames"]:
                rng.bits = 0.0
                sentence, _ = tinyworld.fill((frame,), known, rng)
                ((topic, bits),) = told(sentence)
                assert topic == fact.topic
                total[topic] += 2 ** (rng.bits - bits)
    for line in SENTENCES["colors"]:
        rng.bits = 0.0
        ((topic, bits),) = told(tinyworld.fill((line,), {}, rng)[0])
        assert topic == "colors"
        total[topic] += 2 ** (rng.bits - bits)
    assert set(total) == set(tinyworld.FACT_TOPICS) and all(abs(mass - 1) < 1e-9 for mass in total.values())


# ---- The entropy of a data set --------------------------------------------------------------------------------------

def test_entropy_floor(base_folder, capsys):
    """Against the probabilities of the held-out texts by parsing. Unknown, and said so, for a set of older versions."""
    make("tinyworld", name="ours", seed=3, num_shards=1, shard_mb=0.2)
    texts = list(iter_texts("ours", "val"))
    expected = sum(derivations(text)[0][1] for text in texts) / sum(map(len, texts))
    assert len(texts) > 50 and entropy_floor("ours") == pytest.approx(expected, rel=1e-12)
    assert capsys.readouterr().out.count("scripts.dataset") == 0 and sample_prompts("ours") == list(tinyworld.PROMPTS)
    path = dataset_dir("ours") / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["floor"], manifest["prompts"]
    path.write_text(json.dumps(manifest))
    assert entropy_floor("ours") is None and "'seed': 3" in capsys.readouterr().out
    assert all(text.startswith(prompt) for prompt, text in zip(sample_prompts("ours"), texts))


# ---- The prompts and what is held out -------------------------------------------------------------------------------

def test_prompts():
    for prompt, answer in tinyworld.PROMPTS.items():
        if answer:
            assert len(told(f"{prompt} {answer}.")) == 1 and told(f"{prompt} Lyon.") == []


def test_sample_prompts(base_folder):
    make_sums(base_folder, 60, "{i} 加 {i} 等于 {twice}，这是很短的一句话。{twice} and more words")
    texts = list(iter_texts("sums", "val"))
    prompts = sample_prompts("sums")
    assert len(prompts) == min(6, len(texts)) > 0
    for prompt, text in zip(prompts, texts):
        assert text.startswith(f"{prompt} ") and text != prompt


def test_held_out_tellings():
    """They have no probability in documents."""
    held = [fact for fact in facts() if fact.held_out]
    prompts = [as_prompt(fact.held_out, fact.slots["a"]) for fact in held]
    assert len(set(prompts)) == len(held) >= 200
    kept_prompts = [as_prompt(telling, "") for fact in facts() for telling in fact.tellings]
    assert not any(kept.startswith(f"{prompt} ") for kept in kept_prompts for prompt in prompts)
    for fact, prompt in zip(held, prompts):
        asked, reply = fact.held_out
        assert fact.held_out not in fact.tellings
        assert f"{prompt} {fact.slots['a']}." in (reply, f"Question: {asked} Answer: {reply}")
        assert told(f"{prompt} {fact.slots['a']}.") == []
