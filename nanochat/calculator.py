"""
The tool of the assistant: it computes sums and counts letters. Expressions are parsed, never executed.

    calculate("12 * (3 + 4)")                  -> "84"
    calculate("1,250 / 8")                     -> "156.25"
    calculate("'strawberry'.count('r')")       -> "3"

Whatever the text is, the answer comes within milliseconds: a text is short, nesting is bounded, and since there are no
powers a result is about as long as the numbers in the text together.
"""
import decimal
import re
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 256  # characters of an expression
MAX_DEPTH = 32    # of nested parentheses
DIGITS = 12       # digits kept after the point of a result, zeros in front not counted

NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"  # 1,250.5 has a thousands comma, 12,50 has none
STRING = r"'[^'\\\n]*'|\"[^\"\\\n]*\""
TOKEN = re.compile(rf"\s*(?:(?P<number>{NUMBER})|(?P<text>{STRING})|(?P<sign>//|\.\s*count\b|[-+*/%()]))")
OPERATORS: list[dict[str, Callable[[Fraction, Fraction], Fraction]]] = [  # loosest first
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": lambda a, b: a / b, "//": lambda a, b: Fraction(a // b), "%": lambda a, b: a % b},
]


def calculate(text: str) -> str | None:
    """
    The value of an expression as people write it, or None for anything that is not one.

    + - * / // % with Python's meaning, minus signs, parentheses, decimals, thousands commas, and 'text'.count('part').
    Exact: 0.1 + 0.2 is 0.3.
    """
    try:
        tokens = tokenize(text)
        value = read_level(tokens, level=0, depth=0)
        return None if tokens else write(value)
    except (ValueError, ZeroDivisionError):
        return None


def tokenize(text: str) -> list[str]:
    """The tokens of an expression, last one first, so that the next one is popped."""
    text = text.rstrip()
    if len(text) > MAX_LENGTH:
        raise ValueError("too long")
    tokens, position = [], 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"unexpected {text[position]!r}")
        tokens.append(match[match.lastgroup])
        position = match.end()
    return tokens[::-1]


def read_level(tokens: list[str], level: int, depth: int) -> Fraction:
    """Operands joined by the operators of this level, from left to right; the operands bind more tightly."""
    if level == len(OPERATORS):
        return read_operand(tokens, depth)
    value = read_level(tokens, level + 1, depth)
    while tokens and tokens[-1] in OPERATORS[level]:
        operation = OPERATORS[level][tokens.pop()]
        value = operation(value, read_level(tokens, level + 1, depth))
    return value


def read_operand(tokens: list[str], depth: int) -> Fraction:
    """A number, an operand with a minus sign, a sum in parentheses, or letters counted in a text."""
    if not tokens or depth > MAX_DEPTH:
        raise ValueError("nothing to compute with, or nested too deeply")
    token = tokens.pop()
    if token == "-":
        return -read_operand(tokens, depth + 1)
    if token == "(":
        value = read_level(tokens, 0, depth + 1)
        expect(tokens, ")")
        return value
    if token[0] in "'\"":
        expect(tokens, ".count")
        expect(tokens, "(")
        part = tokens.pop() if tokens else ""
        expect(tokens, ")")
        if part[:1] not in ("'", '"') or len(part) < 3:  # an empty part is everywhere and nowhere
            raise ValueError("expected the text to count")
        return Fraction(token[1:-1].count(part[1:-1]))
    return Fraction(token.replace(",", ""))  # ValueError for a sign that cannot stand here


def expect(tokens: list[str], wanted: str) -> None:
    if not tokens or "".join(tokens.pop().split()) != wanted:
        raise ValueError(f"expected {wanted}")


def write(value: Fraction) -> str:
    """In decimals; a result that has no end is rounded."""
    whole = str(abs(value.numerator) // value.denominator).lstrip("0")
    with decimal.localcontext(prec=len(whole) + DIGITS):
        quotient = decimal.Decimal(value.numerator) / value.denominator
        return str(value.numerator) if value.denominator == 1 else f"{quotient.normalize():f}"
