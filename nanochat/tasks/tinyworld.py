"""
Questions about the embedded world, and who the model is: needs no download.

    tinyworld:facts       "Tell me the capital of France." - "The capital of France is Paris."
    tinyworld:identity    "Who are you?" - "I am nanochat, a small language model."
    tinyworld             both

A fact is held out together with a phrasing. Every fact is asked in many ways. Of the ways that occur in no document of
the corpus, HELD_OUT for each fact are only in the test split, with the phrasing that the corpus itself holds out. A
model that answers them knows the fact from other phrasings and the phrasing from other facts. Of the questions about
the model itself, whole phrasings are held out.
"""
import itertools
import re
from functools import cache
from typing import NamedTuple

from nanochat.corpus.tinyworld import Fact, Telling, capital, facts
from nanochat.data.conversation import Conversation
from nanochat.data.stable_random import StableRandom
from nanochat.data.task import Task, reference
from nanochat.tasks.common import paragraphs, shuffled, single_turn, split_of, stable_hash

HELD_OUT = 2            # phrasings of each fact
TWO_TURNS = {"train": 3_000, "test": 300}  # conversations of tinyworld, and of tinyworld:facts
GREETINGS = ("", "Hello! ", "Hi! ", "Hey! ", "Good morning! ", "Hello, nanochat. ")
ENDINGS = ("", " Please answer.", " I am curious.")
SYSTEM = ("You are nanochat, a small language model.", "You are a helpful assistant.", "Answer in one short sentence.")
FOLLOW_UP = ("What about {s}?", "And what about {s}?", "And {s}?")


# ---- Ways to ask that occur in no document. " | " separates a question from what it asks for, where that is not {a}.
CHAT = """
Tell me {np}.
{Np}?
I would like to know {np}.
Please name {np}.
Give me {np}.
I forgot {np}.
Could you tell me {np}?
Say what {np} is.
{Np}, please.
I need to know what {np} is.
""".strip().splitlines()  # for every relation that has a noun phrase
CHAT_BY_NOUN = paragraphs("""
the capital of {s}
Of which country is {a} the capital? | {s}
Tell me which country has the capital {a}. | {s}

the chemical symbol of {s}
Of which element is {a} the symbol? | {s}
Tell me which element has the symbol {a}. | {s}
""")  # besides, for two of them
SENTENCE = "{Np} is {a}."  # that answers all of these
# For relations without one, by one of their questions in the corpus: the sentence that answers, then ways to ask. Sums
# are asked for in other words than those of the task Arithmetic, which has larger numbers and wants the tool.
CHAT_BY_QUESTION = paragraphs("""
If yesterday was {s}, what will tomorrow be? | {a}.
If yesterday was {s}, then tomorrow will be {a}.
Yesterday was {s}. What will tomorrow be?
Tell me which day comes two days after {s}.
It was {s} yesterday, so what is tomorrow?
Name the day two days after {s}.
Yesterday was {s}. Tell me what tomorrow will be.
Which day will it be two days after {s}?

What are the planets of the solar system? | {a}.
The planets of the solar system are: {a}.
Tell me the planets.
List the planets of the solar system.
Name all planets.
I would like to know the planets.
Give me a list of the planets.
Which planets are there?

In {s}, how often does {x} occur? | {a}.
Since {s} is {y}, it has the letter {x} {a}.
Tell me how often {s} contains the letter {x}.
How often is the letter {x} in {s}?
How often does the word {s} contain {x}?
I would like to know how often {s} contains {x}.
In the word {s}, how often do you see {x}?
Say how often {x} occurs in {s}.

How much is {x} plus {y}? | {a}.
{s} = {a}.
Tell me the sum of {x} and {y}.
How much do {x} and {y} make?
What do {x} and {y} make?
What will {x} and {y} make?
I add {x} and {y}. What do I get?
What do you get if you add {x} and {y}?

How much is {x} minus {y}? | {a}.
{s} = {a}.
How much is {x} without {y}?
What is {x} without {y}?
From {x} take {y}. What is left?
What remains of {x} without {y}?
I have {x} and lose {y}. What do I keep?
What do you get if you take {y} from {x}?

If {s}, what is x? | {a}.
If {s}, then {y} and x is {a}.
Solve {s}.
Find x if {s}.
Tell me x if {s}.
What is x in {s}?
Which x solves {s}?
Please solve {s}.
""")

# ---- What the model says about itself, and ways to ask. Every answer has "I am nanochat" or "my name is nanochat".
IDENTITY = paragraphs("""
I am nanochat, a small language model.
Who are you?
What are you?
Tell me who you are.
Introduce yourself.
Please introduce yourself.
Who are you, please?
Can you introduce yourself?
Who am I talking to?
Say who you are.
I would like to know who you are.
Do you know who you are?
Tell me about yourself.
Describe yourself.
Please describe yourself.
Are you nanochat?
Are you a language model?
Tell me what you are.
Please say what you are.
What is nanochat?
Who is nanochat?

Hello! I am nanochat, a small language model.
Hello!
Hello.
Hello
Hello, nanochat!
Hello, nanochat.
Hi!
Hi.
Hi
Hi, nanochat!
Hi, nanochat.
Hey!
Hey.
Hey
Hey, nanochat!
Hey, nanochat.
Good morning!
Good morning.
Good morning
Good morning, nanochat!
Good morning, nanochat.
Good evening!
Good evening.
Good evening
Good evening, nanochat!
Good evening, nanochat.
Hello there!
Hello there.
Hello there
Hello there, nanochat!
Hello there, nanochat.

My name is nanochat.
What is your name?
Tell me your name.
Do you have a name?
What should I call you?
Say your name.
How are you called?
What name do you have?
I would like to know your name.
Could you tell me your name?
Please tell me your name.
What are you called?
Please say your name.
Give me your name.

I am nanochat, a small language model, not a person.
Are you a person?
Are you a human?
Are you human?
Are you a real person?
Am I talking to a person?
Are you alive?
Are you a man or a woman?
Do you have a body?
Am I talking to a human?
Tell me if you are a person.
Are you a child?

I am nanochat, a small language model, trained with the program of that name.
Who made you?
Who created you?
Who trained you?
Who built you?
Where do you come from?
How were you made?
Tell me who made you.
Who is your maker?
Who wrote you?
Did a person make you?
I would like to know who made you.
Do you know who made you?

I am nanochat, a small language model. I can answer short questions, spell words and calculate.
What can you do?
How can you help me?
What can I ask you?
What are you good at?
What do you know?
Can you help me?
Tell me what you can do.
What can you do for me?
I would like to know what you can do.
Which questions can you answer?
What can I do with you?
Please help me.

I am nanochat, a small language model. I make mistakes, so check what I say.
Do you make mistakes?
Are you always right?
Can I trust you?
Are your answers right?
Is what you say right?
How often are you wrong?
Can I believe you?
Are you sure?
Tell me if I can trust you.
Can I trust your answers?
""")
# More ways that are only trained on: the questions of the test split stay the same.
MORE_IDENTITY = paragraphs("""
I am nanochat, a small language model.
What kind of program are you?
What sort of thing are you?
Who is speaking?
Who is there?
Who is answering me?
Whom am I speaking with?
What am I talking to?
Who might you be?
Say something about yourself.
Tell me something about you.
Tell me a little about yourself.
May I ask who you are?
Could you tell me who you are?
I want to know who you are.
I wonder what you are.
What exactly are you?
Please tell me about nanochat.
Explain what nanochat is.
Do you know what nanochat is?
Are you called a language model?

My name is nanochat.
What are you named?
Which name do you have?
Which name were you given?
What is the name of this model?
How may I call you?
How should I call you?
May I ask your name?
Can you say your name?
I want to know your name.
I wonder what your name is.
Do you know your name?
Have you got a name?
Has anybody given you a name?
Your name, please.

I am nanochat, a small language model, not a person.
Are you a machine?
Are you a robot?
Are you a computer?
Are you really a person?
Tell me if you are human.
Tell me if you are a machine.
Is there a person behind you?
Are you a living being?
Are you a person or a program?
Say if you are a person.
I want to know if you are a person.
I wonder if you are human.
May I ask if you are alive?
Could you tell me if you are a machine?
Have you got a body?
Do you have feelings?
Do you have parents?
Are you old?

I am nanochat, a small language model, trained with the program of that name.
Who has made you?
Who is your creator?
Who programmed you?
Who developed you?
By whom were you made?
Tell me who trained you.
How were you trained?
What were you trained with?
Did somebody make you?
Which program trained you?
Who designed you?
Who invented you?
Who coded you?
Who is your author?
Who is your trainer?
Who are your makers?
Whose work are you?
Who stands behind you?
Which people made you?
How did you come to be?
I want to know who built you.
I wonder who created you.
May I ask who trained you?
Could you tell me how you were made?

I am nanochat, a small language model. I can answer short questions, spell words and calculate.
What are you able to do?
What can you answer?
Show me what you can do.
How do I use you?
What should I ask you?
What are you for?
What do you do?
What may I ask you?
What can you help me with?
What are you useful for?
I want to know what you can do.
I wonder how you can help me.
May I ask what you can do?
Could you tell me what you are good at?

I am nanochat, a small language model. I make mistakes, so check what I say.
Could you be wrong?
Can you be wrong?
Are you ever wrong?
Are you often wrong?
Do you ever make mistakes?
Is all that you say right?
Are you always correct?
Should I believe you?
Should I check what you say?
May I trust what you say?
Is what you tell me true?
How right are you?
I want to know if you are right.
I wonder if you are ever wrong.
May I ask if you are sure?
Could you tell me if your answers are true?
""")
SAYS_WHO = re.compile(r"\b(I am|I'm|name is|called) nanochat\b", re.IGNORECASE)
GREETING = re.compile(r"\W*(hello|hi|hey|good (morning|evening|afternoon))\b", re.IGNORECASE)
CLAIMS = [re.compile(pattern, re.IGNORECASE) for pattern in (  # what an answer may claim besides the name
    r"language model", r"\bnot (a |an )?(real )?(person|human|alive)", r"\b(trained|made|built|created|written)\b",
    r"\bprogram\b", r"\b(answer|spell|calculate)\b", r"\bmistakes?\b|\bwrong\b")]


class Item(NamedTuple):
    """A question and its answer."""
    question: str
    reply: str
    right: frozenset[str]  # all answers that count as right; empty for questions about the model itself
    relation: str          # where another fact may follow with "And what about …?": their noun phrase; else empty


class TinyWorld(Task):
    eval_type = "generative"

    def __init__(self, argument: str, split: str) -> None:
        self.name = f"TinyWorld {argument}".rstrip()
        self.key = f"tinyworld:{argument}:{split}"
        self.singles = list(items(split))
        if argument == "facts":
            self.singles = [item for item in self.singles if item.right]
        elif argument == "identity":
            self.singles = [item for item in self.singles if not item.right]
        self.second = []
        count = len(self.singles)
        if argument != "identity":
            self.second = follow_ups(split)
            count += TWO_TURNS[split]
        self.order = shuffled(count, self.key)

    def __len__(self) -> int:
        return len(self.order)

    def conversation(self, index: int) -> Conversation:
        number = int(self.order[index])
        rng = StableRandom(f"{self.key}:{number}")
        if number < len(self.singles):
            turns = [self.singles[number]]
        elif rng.below(2):  # any two questions
            turns = [rng.choice(self.singles), rng.choice(self.singles)]
        else:               # one that is understood only after another of the same kind
            last = rng.choice(self.second)
            others = [item for item in self.singles if item.relation == last.relation and item.right != last.right]
            turns = [rng.choice(others), last]
        messages = []
        for question, reply, *_ in turns:
            messages += single_turn(question, reply)["messages"]
        right = sorted(turns[-1].right)
        if turns[0].right and rng.below(8) == 0:
            messages[0]["content"] = rng.choice(GREETINGS) + messages[0]["content"]
        if rng.below(25) == 0:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
        return {"messages": messages, "right": right}

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """
        Facts: the answer is the bare fact, or one of the sentences that state it. Looking for a word in it instead
        would accept an answer that repeats the question, or names several. The model itself: the answer says that it is
        nanochat, and makes the same claims as the reference. A greeting may come first, and must where one is answered.
        """
        if conversation["right"]:
            return " ".join(answer.split()).rstrip(".!") + "." in conversation["right"]
        reply = reference(conversation)
        if not SAYS_WHO.search(answer) or GREETING.match(reply) and not GREETING.match(answer):
            return False
        return all(bool(claim.search(answer)) == bool(claim.search(reply)) for claim in CLAIMS)


# ---- The questions of both splits -----------------------------------------------------------------------------------

def relation_of(fact: Fact) -> str:
    """The noun phrase of the fact's relation, or its key in CHAT_BY_QUESTION."""
    return fact.noun or next(question for question in CHAT_BY_QUESTION if question in fact.templates)


@cache
def items(split: str) -> list[Item]:
    """The questions of a split, each asked once; those about the model with every greeting and ending."""
    found = []
    for fact in facts():
        for template in fact.templates:  # the corpus's own questions: those in its documents can only be trained on
            question, _, reply = template.format(**fact.slots).rpartition(" | ")
            if question and (Telling(question, reply) == fact.held_out) == (split == "test"):
                asked = "s" if template.endswith("| {s}.") else "a"
                found.append(make_item(fact, question, asked))
        relation = relation_of(fact)
        if fact.noun:
            chat = CHAT + CHAT_BY_NOUN.get(relation, [])
        else:
            chat = CHAT_BY_QUESTION[relation][1:]
        # Ranked by the hash of fact and phrasing: the split depends on no seed, and each fact has as many in test.
        keys = {template: stable_hash(f"{relation} {template} {template.format(**fact.slots)}") for template in chat}
        for template in side_of(sorted(chat, key=keys.__getitem__), HELD_OUT, split):
            question, _, asked = template.partition(" | ")
            found.append(make_item(fact, question.format(**fact.slots), asked.strip("{}") or "a"))
    for reply, phrasings in IDENTITY.items():
        ranked = sorted(phrasings, key=stable_hash)
        around = list(itertools.product(GREETINGS, ENDINGS))
        if reply.startswith("Hello"):
            around = [("", "")]
        questions = side_of(ranked, len(ranked) // 4, split)
        if split == "train":
            questions = questions + MORE_IDENTITY.get(reply, [])
        for question in questions:
            for greeting, ending in around:
                found.append(Item(greeting + question + ending, reply, frozenset(), ""))
    return found


def side_of(ranked: list[str], held_out: int, split: str) -> list[str]:
    """The first phrasings of a ranking are held out for the test split."""
    return ranked[:held_out] if split == "test" else ranked[held_out:]


def make_item(fact: Fact, question: str, asked: str) -> Item:
    """The item of a question that asks for the fact's subject (asked = "s") or its answer ("a")."""
    word = fact.slots[asked]
    right = {f"{word}.", f"{capital(word)}.", f"It is {word}.", f"Yes, it is {word}."}
    for template in fact.templates:
        before, _, reply = template.rpartition(" | ")
        if not before or reply.endswith(f" {{{asked}}}."):  # a statement of the fact, or a reply that names the word
            right.add(reply.format(**fact.slots))
    sentence = SENTENCE if fact.noun else CHAT_BY_QUESTION[relation_of(fact)][0]
    reply = sentence.format(**fact.slots)
    if Telling("", reply) == fact.held_out:  # what the corpus holds out stays so
        reply = f"It is {word}."
    relation = fact.noun if fact.noun.endswith("{s}") and asked == "a" else ""
    return Item(question, reply, frozenset(right), relation)


@cache
def follow_ups(split: str) -> list[Item]:
    """Second questions of a split that leave out what is asked for: "And what about Italy?"."""
    found = []
    for fact in facts():
        if fact.noun.endswith("{s}"):
            for template in FOLLOW_UP:
                question = template.format(**fact.slots)
                if split_of(f"{fact.noun} {question}", 6) == split:
                    found.append(make_item(fact, question, asked="a"))
    return found
