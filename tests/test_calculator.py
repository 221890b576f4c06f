"""The calculator against sums whose value is known from how they were made, and against what it must refuse."""
import random
import time
import timeit
from fractions import Fraction

import pytest

from nanochat.inference.calculator import calculate


@pytest.mark.parametrize("text,result", [
    # What the random expressions below do not have: precedence, other ways of writing numbers, rounding, counting,
    # comparing.
    ("10 - 4 - 3", "3"), ("2 + 3 * 4", "14"), ("--5", "5"), (" 1+1 \n", "2"), ("0.1 + 0.2", "0.3"), (".5 * 4", "2"),
    ("1 / 3", "0.333333333333"), ("2 / 3000000", "0.000000666666666667"), ("1 / 7 * 7", "1"), ("0 * -1", "0"),
    ("'strawberry'.count('r')", "3"), ('"it\'s".count("s")', "1"), ("'banana' . count( 'ana' )", "1"),
    ("'aab'.count('a') * 2 + 1", "5"), ("'naïve café'.count('é')", "1"), ("9.11 > 9.9", "False"),
    ("0.1 + 0.2 == 0.3", "True"), ("1,000 >= 500 * 2", "True"), ("7 % 2 != 1", "False"),
])
def test_values(text, result):
    assert calculate(text) == result


@pytest.mark.parametrize("text", [
    "", "1 +", "(1", "1 2", "+5", "five", "x = 1", "1 < 2 < 3", "(1 < 2) + 1", "1 =< 2", "1 < 1 / 0", "20%", "$5",
    "1 / 0", "1 // 0", "1 % (2 - 2)", "1,23", "1.2.3", "1e9", "0x10", "1_000", "٣ + 1", "9 ** 9 ** 9", "1 << 9", "'a'",
    "'a'.count", "'a'.count('')", "'a'.count(1)", "'a'.upper()", "'a' * 9", "3.count('3')",
    "__import__('os').system('true')", "print(1)", "<|bos|>", "(" * 100 + "1" + ")" * 100, "1;2", "\0",
])
def test_what_is_no_expression_has_no_value(text):
    """None, not an exception: the model may write anything between its python tokens."""
    assert calculate(text) is None


def grow(rng: random.Random, depth: int) -> tuple[str, Fraction]:
    """A random expression and its value, put together side by side: the value never sees the text."""
    if depth == 0 or rng.random() < 0.2:
        cents = rng.randrange(10**7)
        return rng.choice([(f"{cents:,}", Fraction(cents)), (str(cents), Fraction(cents)),
                           (f"{cents / 100:,.2f}", Fraction(cents, 100))])
    if rng.random() < 0.2:
        text, value = grow(rng, depth - 1)
        return f"-({text})", -value
    (left, a), (right, b) = grow(rng, depth - 1), grow(rng, depth - 1)
    values = {"+": a + b, "-": a - b, "*": a * b}
    if b:
        values |= {"/": a / b, "//": Fraction(a // b), "%": a - b * (a // b)}
    sign = rng.choice([*values])
    return f"({left}) {sign} ({right})", values[sign]


def test_random_expressions():
    """Correct to twelve digits, and to the last one where the result has an end before that."""
    rng = random.Random(0)
    for text, value in [grow(rng, 3) for _ in range(500)]:
        result = Fraction(calculate(text))
        assert len(text) <= 256 and abs(result - value) <= abs(value) * Fraction(1, 10**11), text
        assert result == value or (value * 10**6).denominator > 1, text


@pytest.mark.parametrize("text", [
    "9*" * 127 + "9", "1/9+" * 63 + "1", "(" * 128 + "1" + ")" * 127, "-" * 255 + "1", "(" * 10**6,
    "'" + "a" * 10**7, "9" * 127 + "%" + "7" * 128, "1," * 128,
])
def test_nothing_takes_long_or_grows(text):
    times = timeit.repeat(lambda: calculate(text), number=1, repeat=3, timer=time.process_time)
    result = calculate(text)
    assert min(times) < 0.1
    assert result is None or len(result) < 600
