"""Sums as people type them: the call that is made and the sentence that is said, by hand; what is none stays none."""
import random
import re

import pytest

import nanochat.inference.engine
from nanochat.data.conversation import render_prompt, text_of
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.calculator import calculate
from nanochat.inference.detokenizer import to_parts
from nanochat.inference.engine import Answer, Engine
from nanochat.inference.sampling import SamplingParams
from nanochat.inference.sums import LANGUAGES, read_sum
from nanochat.inference.tools import Tools
from nanochat.library.retrieval import Passage
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig, architecture
from nanochat.tasks import make_task

ZERO, UNREADABLE = LANGUAGES["en"].says["zero"], LANGUAGES["en"].says["unreadable"]


@pytest.mark.parametrize("question, call, number", [
    ("whats 5x5", "5 * 5", "25"), ("13 × 4 = ?", "13 * 4", "52"), ("48÷6", "48 / 6", "8"),
    ("24:6", "24 / 6", "4"), ("2,500 + 1", "2,500 + 1", "2501"), ("1,5 + 1", "1.5 + 1", "2.5"), ("-5+8", "-5 + 8", "3"),
    ("3 - -4", "3 - -4", "7"), ("(2+3)*4", "(2 + 3) * 4", "20"),
    ("15% of 60", "15 / 100 * 60", "9"), ("20 % off 50", "50 - 20 / 100 * 50", "40"), ("2^10", "2 ** 10", "1024"),
    ("5²", "5 ** 2", "25"), ("3 cubed", "3 ** 3", "27"), ("√81", "81 ** 0.5", "9"), ("17 mod 5", "17 % 5", "2"),
    ("sum of 8, 9 and 3", "8 + 9 + 3", "20"), ("take 5 from 12", "12 - 5", "7"), ("$3 + $4", "3 + 4", "7"),
    ("two plus two", "2 + 2", "4"), ("half of 9", "9 / 2", "4.5"),
    ("100/7", "100 / 7", "14.285714285714"), ("What is 3.5 * 4?", "3.5 * 4", "14"),
])
def test_a_sum_is_read_as_it_is_typed(question, call, number):
    wanted = read_sum(question)
    exact = "about " if number == "14.285714285714" else ""
    assert wanted == (call, f"The answer is {exact}{number}.")
    assert calculate(wanted.call) == number


@pytest.mark.parametrize("question, answer", [
    ("Was ist 7 mal 8?", "Das Ergebnis ist 56."), ("Wie viel ist 9 geteilt durch 4", "Das Ergebnis ist 2.25."),
    ("¿Cuánto es 6 por 7?", "El resultado es 42."), ("combien font 6 fois 9 ?", "Le résultat est 54."),
    ("сколько будет 5 умножить на 6", "Ответ: 30."), ("7乘8等于多少？", "答案是56。"), ("8足す7は？", "答えは15です。"),
    ("10 durch 0", LANGUAGES["de"].says["zero"]), ("10 / 3 =", "The answer is about 3.333333333333."),
])
def test_the_answer_is_in_the_questions_language(question, answer):
    assert read_sum(question).answer == answer


@pytest.mark.parametrize("question, answer", [
    ("5/0", ZERO), ("7 divided by zero", ZERO), ("3 +", UNREADABLE), ("* 4", UNREADABLE), ("4 + cat", UNREADABLE),
    ("12 apples + 3", UNREADABLE), ("2 ** 10000", UNREADABLE),
    ("is 9.11 bigger than 9.9?", LANGUAGES["en"].says["no"]), ("2+2=4?", LANGUAGES["en"].says["yes"]),
])
def test_what_has_no_number_gets_one_sentence(question, answer):
    assert read_sum(question).answer == answer


@pytest.mark.parametrize("question", [
    "When is the meeting on 3/8?", "Does it need MySQL 5.7?", "2026-03-04", "4/5/2026", "12:30", "030 123-456", "box 7",
    "How many legs has a cow?", "What is x if x + 3 = 7?", "print(3 + 4)", "docs/2024", "2024", "", "-5",
    "Add 5 to the product of 3 and 4.", "Add 5 to 4 divided by 2.", "7 * 8 and 9 * 9", "5 - minute walk",
    "Tom has 3 apples and buys 4 more. How many has he?",
])
def test_a_question_about_something_is_no_sum(question):
    assert read_sum(question) is None


def test_random_sums_have_pythons_value():
    """Python computes the text itself; the reader sees it without blanks, with other signs, within a question."""
    rng = random.Random(1)
    for _ in range(300):
        numbers = [str(rng.randrange(1, 999)) for _ in range(rng.randrange(2, 5))]
        text = numbers[0] + "".join(rng.choice("+-*") + number for number in numbers[1:])
        typed = rng.choice([text, text.replace("*", "x"), text.replace("*", "×"), text.replace("-", "−"),
                            text.replace("+", " + ").replace("*", " * ")])
        question = rng.choice(["{}", "what is {}?", "{}=", "was macht {}", "{}等于多少"]).format(typed)
        assert calculate(read_sum(question).call) == str(eval(text)), question


def test_the_hand_written_problems_are_judged_by_their_answers():
    """What read_sum says is right for all but the few that no rule reads; something else is wrong."""
    task = make_task("typed:sums", "test")
    said = [read_sum(problem["messages"][0]["content"]) for problem in task]
    right = [wanted is not None and task.evaluate(problem, wanted.answer) for problem, wanted in zip(task, said)]
    assert len(right) == 150 and sum(right) >= 147
    assert not any(task.evaluate(problem, wrong) for problem in task for wrong in ("", "The answer is 77777."))


def plain(text: str) -> str:
    """A text as two are compared: only its words, in small letters."""
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def test_typed_messages_are_trained_on_other_wordings_and_judged_by_their_kind():
    tested, trained = make_task("typed:messages", "test"), make_task("typed:messages", "train")
    ways = {plain(conversation["messages"][0]["content"]) for conversation in tested}
    assert len(ways) == 150 and not ways & {plain(conversation["messages"][0]["content"]) for conversation in trained}
    by_way = {conversation["messages"][0]["content"]: conversation for conversation in tested}
    identity = "I am nanochat, a small language model."
    assert tested.evaluate(by_way["who r u exactly"], identity)
    assert not tested.evaluate(by_way["thanks buddy"], identity)
    assert not tested.evaluate(by_way["hi there bot"], "The rent is due.")
    assert not tested.evaluate(by_way["who r u exactly"], "I cannot talk about that.")


# ---- In the engine

TOKENIZER = Tokenizer([b"th", b"the", b" the"])
SPECIAL = TOKENIZER.encode_special
END, CALL, CALLED = SPECIAL("<|assistant_end|>"), SPECIAL("<|python_start|>"), SPECIAL("<|python_end|>")


class Notes:
    """A library that has one passage about everything."""
    is_own = True
    text = "The rent is 640 euros, due on the first. It includes heating and water for the whole house."

    def search(self, question: str) -> Passage:
        return Passage("rent", self.text, "rent.md:1")

    lookup = search


def answered(
    monkeypatch, question: str, drawn: list[int], library: Notes | None = None, **settings,
) -> tuple[str, Answer]:
    """The answer's text if the model draws these tokens where it may, and then <|assistant_end|>."""
    shape = dict(sequence_len=512, vocab_size=TOKENIZER.get_vocab_size(), n_layer=1, n_head=1, n_kv_head=1, n_embd=16)
    model = GPT(GPTConfig(**shape, **architecture("classic")))
    for parameter in model.parameters():
        parameter.data.normal_()
    script = list(drawn)

    def draw(logits, samplers, *others):
        limits, wanted = samplers[0].copying, script.pop(0) if script else END
        banned = samplers[0].forbidden == wanted
        return [END if banned else wanted if limits is None or limits.allows(wanted) else limits.allowed[0]]

    monkeypatch.setattr(nanochat.inference.engine, "draw", draw)
    engine = Engine(model, TOKENIZER, tools=Tools(library))
    prompt = render_prompt(TOKENIZER, {"messages": [{"role": "user", "content": question}]})
    [answer] = engine.generate([prompt], SamplingParams(**{"max_tokens": 300} | settings))
    return text_of(to_parts(TOKENIZER, answer.tokens)), answer


def test_a_sum_is_called_and_said_whatever_the_model_draws(monkeypatch):
    said, answer = answered(monkeypatch, "whats 2+2", TOKENIZER.encode("x" * 99), Notes())
    assert said == "The answer is 4." and answer.finish_reason == "stop"
    assert TOKENIZER.decode(answer.tokens).count("2 + 2") == 1 and answer.calls == 0
    assert answered(monkeypatch, "5/0", [], Notes())[0] == ZERO


def test_no_answer_is_empty_or_endless(monkeypatch):
    lost = LANGUAGES["en"].says["lost"]
    for drawn in ([], [CALL, *TOKENIZER.encode('2+2")'), CALLED], [CALL, *TOKENIZER.encode("10/ " * 99)]):
        said, answer = answered(monkeypatch, "Why are whales blue?", drawn)
        assert (said, answer.finish_reason) == (lost, "stop") and len(answer.tokens) < 60
    said, answer = answered(monkeypatch, "Why are whales blue?", TOKENIZER.encode("It is 2.5" + ".55" * 99))
    assert said.startswith("It is 2.5.55") and len(said) < 40 and answer.finish_reason == "stop"
    said, _ = answered(monkeypatch, "Why are whales blue?", TOKENIZER.encode("ha" * 40))
    assert said == "ha" * 40, "words may repeat themselves"
    assert answered(monkeypatch, "Wieso sind Wale blau?", [])[0] == LANGUAGES["de"].says["lost"]


def test_small_talk_makes_no_call_and_other_questions_do(monkeypatch):
    call = [CALL, *TOKENIZER.encode('search("rent')]
    for message in ("Good morning!", "Thanks a lot", "Who are you?", "wie heißt du", "你好", "what can you do"):
        assert not answered(monkeypatch, message, call, Notes())[1].calls, message
    for message in ("How much is the rent?", "Thanks, and the rent?", "What do I do in the morning?", "When do I work"):
        assert answered(monkeypatch, message, [], Notes())[1].calls == 1, message


@pytest.mark.parametrize("room, said, reason", [
    (300, Notes.text, "stop"), (110, Notes.text[:Notes.text.index(" It")], "stop"), (60, "The rent is", "length"),
])
def test_a_quotation_that_has_no_room_ends_with_length(monkeypatch, room, said, reason):
    whole = TOKENIZER.encode(Notes.text)
    text, answer = answered(monkeypatch, "How much is the rent?", [
        CALL, *TOKENIZER.encode('search(" rent")'), CALLED, *whole], Notes(), max_tokens=room)
    assert text.startswith(said) and answer.finish_reason == reason


def test_digits_that_are_quoted_may_repeat_themselves(monkeypatch):
    notes = Notes()
    notes.text = f"The rent is{' 0,' * 20} 1."
    text, answer = answered(monkeypatch, "How much is the rent?", TOKENIZER.encode(notes.text), notes)
    assert (text, answer.finish_reason) == (notes.text, "stop")
