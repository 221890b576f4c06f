"""
Sums as people type them. They are read here, not by the model: a small model misreads numbers.

    read_sum("whats 5x5")                       Sum("5 * 5", "The answer is 25.")
    read_sum("Was ist 7 mal 8?")                Sum("7 * 8", "Das Ergebnis ist 56.")
    read_sum("15% of 60")                       Sum("15 / 100 * 60", "The answer is 9.")
    read_sum("100/7")                           Sum("100 / 7", "The answer is about 14.2857142857.")
    read_sum("5/0")                             Sum("", "I cannot divide by zero.")
    read_sum("When is the meeting on 3/8?")     None: it asks about a meeting

A question is a sum if nothing else in it tells what it is about. `sums.toml` has the words of seven languages.
"""
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from nanochat.inference.calculator import MAX_LENGTH, NUMBER, calculate, value_of, write
from nanochat.library import words
from nanochat.library.words import UNSPACED, any_of, edged, listed, normal_form, telling_words
from nanochat.runtime.files import read_toml

DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d{1,2}(?!\d))")
SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "^": "**", "²": "**2", "³": "**3",
                       "$": "", "€": "", "£": "", "¥": ""})
X = re.compile(r"(?<=[\d)])\s*[xх]\s*(?=[-\d(.])")
COLON = re.compile(r"(?<=\d)(?:\s*:\s+|\s+:|:(?!\d\d(?!\d)))(?=\d)")  # 24:6 is divided, 12:30 is a time
STRETCH = re.compile(r"[-+*/%<>=().,\d\s]*\d[-+*/%<>=().,\d\s]*")
# A number and a sign: "3 + 4", and "3 +" or "* 4", which have no value.
WANTED = re.compile(r"[*/%].*|.*\d[\s)]*[-+*/%<>=].*")
# Neither dates nor telephone numbers are sums.
DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?([/.-])\d\d?\1\d{2,4}|.*(?<![\d.,])0\d.*")
UNIT = re.compile(rf"[^\W\d_{UNSPACED}]+|[{UNSPACED}]")
# "4 + cat", "12 apples + 3"
TERM = rf"(?:(?:{NUMBER})(?: [^\W\d]+)?|[^\W\d]{{2,}})"
AMONG_WORDS = re.compile(rf"{TERM}(?:(?:\s*[+*=]\s*|\s[-/]\s){TERM})+")


class Sum(NamedTuple):
    """call: what the calculator is asked, empty if the sum has no value; answer: what the answer says, a sentence."""
    call: str
    answer: str


class Language:
    """How people ask for sums in a language. says: its part of sums.toml; asking: its part of languages.toml."""

    def __init__(self, says: dict[str, Any], asking: dict[str, str]) -> None:
        self.says = says
        # Words for signs and numbers.
        self.signs = {word: sign for sign, named in says["signs"].items() for word in listed(named)}
        self.sign = whole(self.signs)
        # What may stand around a sum.
        around = [*normal_form(asking["stop"]).split(), *listed(f"{asking['ask']},{says['words']}")]
        self.around = whole(around)
        # What takes the place of other ways to name a sum.
        self.forms = [read_form(line) for line in says["forms"].strip().splitlines()]
        # Its words for sums and its stop words, to know the language.
        self.common = {*units(" ".join([*around, *self.signs, re.sub(r"[ABC]\b|=.*", " ", says["forms"])]))}


def read_sum(question: str) -> Sum | None:
    """The sum that a question asks for; None if it asks for something else."""
    language = LANGUAGES[language_of(question)]
    says, around = language.says, language.around
    text = language.sign.sub(lambda word: f" {language.signs[word[0]]} ", normal_form(question.translate(SIGNS)))
    if len(text) > MAX_LENGTH or not re.search(r"\d", text):
        return None
    text = COLON.sub(" / ", X.sub(" * ", DECIMAL_COMMA.sub(".", text)))
    for form, meant in language.forms:
        text = form.sub(meant, text)
    unreadable = Sum("", says["unreadable"])
    if telling_words(around.sub(" ", STRETCH.sub("|", text))):
        left = " ".join(around.sub(" ", text).strip(" ?!.=").split())
        return unreadable if AMONG_WORDS.fullmatch(left) else None
    call, *others = (stretch.lstrip(" =,").rstrip(" =,.") for stretch in STRETCH.findall(text))
    if others or DATE.fullmatch(call) or not WANTED.fullmatch(call):
        return None
    if call[0] + call[-1] == "()" and calculate(call[1:-1]):    # parentheses around all of it
        call = call[1:-1]
    # One blank on each side of a sign between two numbers.
    call = re.sub(r"(?<![<>=!])=(?!=)", "==", "".join(call.split()))
    call = re.sub(r"(?<=[\d)])(\*\*|//|[<>=]=|[-+*/%<>])", r" \1 ", call)
    try:
        value = value_of(call)
    except ZeroDivisionError:
        return Sum("", says["zero"])
    except ValueError:
        return unreadable
    if isinstance(value, bool):
        return Sum(call, says["yes" if value else "no"])
    result = write(value)
    return Sum(call, says["answer" if Fraction(result) == value else "rounded"].format(result))


def language_of(text: str) -> str:
    """The language whose common words make up most of a text; English if it has none of any."""
    found = units(text)
    return max(LANGUAGES, key=lambda language: sum(len(unit) for unit in found if unit in LANGUAGES[language].common))


def units(text: str) -> list[str]:
    """The words of a text; in scripts without blanks its characters."""
    return UNIT.findall(normal_form(text))


def read_form(line: str) -> tuple[re.Pattern[str], str]:
    """A line of `forms`: a pattern, and what takes the place of what it matches."""
    named, meant = line.split(" = ")
    # "3, 4", but not "3,456"
    parts = [rf"(?P<{part}>{NUMBER}|\([^()]*\))" if part in "ABC" else (
                 r",(?!\d)" if part == "," else re.escape(normal_form(part)))
             for part in re.findall(r"[ABC]\b|[^\sABC,]+|,", named)]
    # "Add 5 to 4 divided by 2" has no clear order.
    form = edged(r"\s*".join(parts), named) + r"(?!\s*[-+*/%])"
    return re.compile(form), re.sub("[ABC]", r"\\g<\g<0>>", f"({meant})")


def whole(phrases: Iterable[str]) -> re.Pattern[str]:
    """Any of these phrases, but not within "twenty-fold"."""
    return re.compile(f"(?<!-)(?:{any_of(phrases)})(?!-)")


LANGUAGES = {language: Language(says, words.LANGUAGES[language])
             for language, says in read_toml("inference/sums.toml").items()}
