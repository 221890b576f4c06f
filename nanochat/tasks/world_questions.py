"""
Questions about the embedded world, and who the model is: needs no download.

    tinyworld:facts       "Tell me the capital of France." - "The capital of France is Paris."
    tinyworld:identity    "Who are you?" - "I am nanochat, a small language model."
    tinyworld             both

A fact is held out together with a phrasing. Every fact is asked in many ways. For each fact, HELD_OUT of the ways that
occur in no document of the corpus are only in the test split, like the phrasing that the corpus itself holds out. A
model that answers them knows the fact from other phrasings and the phrasing from other facts. For questions about
the model itself, whole phrasings are held out.
"""
import re
from collections import defaultdict
from functools import cache
from itertools import product
from typing import NamedTuple

from nanochat.corpus.tinyworld import Fact, Telling, capital, facts
from nanochat.data.conversation import Conversation
from nanochat.data.stable_random import StableRandom
from nanochat.data.task import reference
from nanochat.tasks.common import Shuffled, lines_of, read_texts, shuffled, single_turn, split_of, stable_hash
from nanochat.tasks.spellingbee import spell_counting

HELD_OUT = 2            # phrasings of each fact
TWO_TURNS = {"train": 3_000, "test": 300}  # conversations with a second question

# world_questions.toml says what each of these texts is for.
TEXTS = read_texts("world_questions")
GREETINGS = TEXTS["greetings"]
CHAT = TEXTS["chat"].splitlines()
CHAT_BY_NOUN = lines_of(TEXTS["chat_by_noun"])
CHAT_BY_QUESTION = lines_of(TEXTS["chat_by_question"])
IDENTITY = lines_of(TEXTS["identity"])
MORE_IDENTITY = lines_of(TEXTS["more_identity"])
SAYS_WHO = re.compile(r"\b(I am|I'm|name is|called) nanochat\b", re.IGNORECASE)
GREETING = re.compile(r"\W*(hello|hi|hey|good (morning|evening|afternoon))\b", re.IGNORECASE)
# What an answer may claim besides the name.
CLAIMS = [re.compile(pattern, re.IGNORECASE) for pattern in TEXTS["claims"]]


class Item(NamedTuple):
    """A question and its answer."""
    question: str
    reply: str
    right: list[str]  # all answers that count as right; empty for questions about the model itself
    relation: str     # the noun phrase, if "And what about …?" may ask for another fact; else empty
    calls: list[tuple[str, str]]  # of the calculator, before the reply: (expression, result)


class TinyWorld(Shuffled):
    eval_type = "generative"

    def __init__(self, argument: str, split: str) -> None:
        self.name = f"TinyWorld {argument}".rstrip()
        self.key = f"tinyworld:{argument}:{split}"
        self.singles = [item for item in items(split) if not argument or bool(item.right) == (argument == "facts")]
        self.by_relation: dict[str, list[Item]] = defaultdict(list)
        for item in self.singles:
            self.by_relation[item.relation].append(item)
        self.second = [] if argument == "identity" else follow_ups(split)
        two_turns = TWO_TURNS[split] if self.second else 0
        self.order = shuffled(len(self.singles) + two_turns, self.key)

    def conversation(self, index: int) -> Conversation:
        number = int(self.order[index])
        rng = StableRandom(f"{self.key}:{number}")
        if number < len(self.singles):
            turns = [self.singles[number]]
        elif rng.below(2):
            turns = [rng.choice(self.singles), rng.choice(self.singles)]
        else:
            # "And what about Italy?" can be understood only after a question about the same relation.
            last = rng.choice(self.second)
            others = [item for item in self.by_relation[last.relation] if item.right != last.right]
            turns = [rng.choice(others), last]
        messages = []
        for item in turns:
            question = item.question
            # As people type: "whats the capital of japan".
            if self.key.endswith("train") and item.relation and not rng.below(3):
                question = question.lower().rstrip("?.").replace("'", "")
            messages += single_turn(question, item.reply, item.calls)["messages"]
        if turns[0].right and rng.below(8) == 0:
            messages[0]["content"] = rng.choice(GREETINGS) + messages[0]["content"]
        if rng.below(25) == 0:
            messages.insert(0, {"role": "system", "content": rng.choice(TEXTS["system"])})
        return {"messages": messages, "right": turns[-1].right}

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """
        Facts: the answer is the bare fact, or one of the sentences that state it. Looking for a word in the answer
        would accept answers that repeat the question, or name several. The model itself: the answer says that it is
        nanochat, and makes the same claims as the reference. A greeting may come first, and must if the reference does.
        """
        if conversation["right"]:
            return " ".join(answer.split()).rstrip(".!") + "." in conversation["right"]
        reply = reference(conversation)
        if not SAYS_WHO.search(answer) or GREETING.match(reply) and not GREETING.match(answer):
            return False
        return all(bool(claim.search(answer)) == bool(claim.search(reply)) for claim in CLAIMS)


# ---- The questions of both splits -----------------------------------------------------------------------------------

@cache
def items(split: str) -> list[Item]:
    """The questions of a split, each asked once; questions about the model with every greeting and ending."""
    found = []
    for fact in facts():
        # The template of the answer, and the ways to ask that are not in the corpus.
        if fact.noun:
            relation, sentence, ways = fact.noun, TEXTS["sentence"], CHAT + CHAT_BY_NOUN.get(fact.noun, [])
        else:
            relation = next(question for question in CHAT_BY_QUESTION if question in fact.templates)
            sentence, *ways = CHAT_BY_QUESTION[relation]
        # The corpus's own questions: a model has read them in documents, so only the held-out ones can be tests.
        for template in fact.templates:
            question, _, reply = template.format(**fact.slots).rpartition(" | ")
            if question and (Telling(question, reply) == fact.held_out) == (split == "test"):
                found.append(make_item(fact, sentence, question, "s" if template.endswith("| {s}.") else "a"))
        # Ranked by the hash of fact and phrasing: the split depends on no seed, and facts have equally many in test.
        ways = sorted(ways, key=lambda way: stable_hash(f"{relation} {way} {way.format(**fact.slots)}"))
        ways = ways[:HELD_OUT] if split == "test" else ways[HELD_OUT:]
        if fact.noun and split == "train":
            ways += TEXTS["more_chat"].splitlines()
        for template in ways:
            question, _, asked = template.partition(" | ")
            slots = fact.slots | {"short": fact.slots["np"].removeprefix("the ")}
            found.append(make_item(fact, sentence, question.format(**slots), asked.strip("{}") or "a"))
    for reply, phrasings in IDENTITY.items():
        questions = sorted(phrasings, key=stable_hash)
        held_out = len(phrasings) // 4
        if split == "test":
            questions = questions[:held_out]
        else:
            questions = questions[held_out:] + MORE_IDENTITY.get(reply, [])
        # A greeting is not asked after another greeting.
        around = [("", "")] if reply.startswith("Hello") else [*product(GREETINGS, TEXTS["endings"])]
        for question, (greeting, ending) in product(questions, around):
            asked = f"{greeting}{question}{ending}"
            # In training one in three, and each question alone.
            if split == "test" or asked == question or split_of(asked, 3) == "test":
                found.append(Item(asked, reply, [], "", []))
    return found


def make_item(fact: Fact, sentence: str, question: str, asked: str) -> Item:
    """
    The item of a question that asks for the fact's subject (asked = "s") or its answer ("a"). sentence: the template of
    the answer.
    """
    word = fact.slots[asked]
    right = {f"{word}.", f"{capital(word)}.", f"It is {word}.", f"Yes, it is {word}."}
    for template in fact.templates:
        before, _, reply = template.rpartition(" | ")
        # A statement of the fact, or a reply that names the word.
        if not before or reply.endswith(f" {{{asked}}}."):
            right.add(reply.format(**fact.slots))
    slots = fact.slots
    if fact.topic == "counting":
        slots = slots | {"c": spell_counting(slots["s"], slots["x"])}
    reply = sentence.format(**slots)
    right.add(reply)
    # A sentence that the corpus holds out is not trained on here either.
    if Telling("", reply) == fact.held_out:
        reply = f"It is {word}."
    relation = fact.noun if fact.noun.endswith("{s}") and asked == "a" else ""
    # Sums are calculated, and words spelled, as in the tasks: a model that sees both ways also guesses larger sums, and
    # the letters of words that it has not read.
    calls = []
    if fact.topic == "sums":
        calls = [(slots["s"], word)]
    elif fact.topic == "spelling":
        calls = [(f'spell(" {slots["s"]}")', word)]
        reply = f"{word}."
    return Item(question, reply, sorted(right), relation, calls)


@cache
def follow_ups(split: str) -> list[Item]:
    """Second questions of a split, which name only the subject: "And what about Italy?"."""
    found = []
    for fact, template in product(facts(), TEXTS["follow_up"]):
        question = template.format(**fact.slots)
        if fact.noun.endswith("{s}") and split_of(f"{fact.noun} {question}", 6) == split:
            found.append(make_item(fact, TEXTS["sentence"], question, "a"))
    return found
