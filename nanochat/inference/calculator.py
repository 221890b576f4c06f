"""
The assistant's tool: it evaluates arithmetic, compares numbers and counts letters. Expressions are parsed, never
executed.

    calculate("12 * (3 + 4)")                  -> "84"
    calculate("1,250 / 8")                     -> "156.25"
    calculate("9.11 > 9.9")                    -> "False"
    calculate("'strawberry'.count('r')")       -> "3"

Every answer takes only milliseconds: texts are short, nesting and powers are bounded, and without powers a result is
about as long as all numbers in the text together.
"""
import ast
import decimal
import operator
import re
from fractions import Fraction

MAX_LENGTH = 256  # characters of an expression
# Opening parentheses: Python's parser is recursive.
MAX_NESTING = 32
# Digits kept after the decimal point; leading zeros do not count.
DIGITS = 12
MOST_BITS = 256  # of a power: 77 digits

# The comma in 1,250.5 separates thousands; 12,50 is not a number.
NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
STRING = r"'[^'\\\n]*'|\"[^\"\\\n]*\""
TOKEN = re.compile(rf"(?P<number>{NUMBER})|(?P<string>{STRING})|(?P<space>\s+)|\.\s*count\b|[<>=!]=|[-+*/%()<>]")
def power(base: Fraction, exponent: Fraction) -> Fraction:
    """Exact, but a square root that is irrational is rounded. ValueError if the result would be long."""
    if exponent == Fraction(1, 2) and base >= 0:
        with decimal.localcontext(prec=MOST_BITS):
            return Fraction((decimal.Decimal(base.numerator) / base.denominator).sqrt())
    if exponent.denominator > 1 or abs(exponent) * (base.numerator * base.denominator).bit_length() > MOST_BITS:
        raise ValueError("not whole, or too long")
    return base ** int(exponent)


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.Pow: power,
}
COMPARISONS = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def calculate(text: str) -> str | None:
    """The value of an expression as `write` writes it, or True or False; None for any other text."""
    try:
        value = value_of(text)
    except (ValueError, ZeroDivisionError):
        return None
    return str(value) if isinstance(value, bool) else write(value)


def value_of(text: str) -> Fraction | bool:
    """
    The value of an expression as people write it; ValueError for any other text, ZeroDivisionError.

    + - * / // % ** with Python's meaning, minus signs, parentheses, decimals, thousands commas, 'text'.count('part'),
    and one comparison. Exact: 0.1 + 0.2 is 0.3. An exponent is whole, or 0.5.
    """
    if len(text) > MAX_LENGTH or text.count("(") > MAX_NESTING or TOKEN.sub("", text):
        raise ValueError("not arithmetic")
    source = TOKEN.sub(as_python, text).strip()
    try:
        body = ast.parse(source, mode="eval").body
    except (SyntaxError, RecursionError) as error:
        raise ValueError("not arithmetic") from error
    match body:
        case ast.Compare(left, [sign], [right]):
            return COMPARISONS[type(sign)](evaluate(left), evaluate(right))
        case number:
            return evaluate(number)


def as_python(token: re.Match) -> str:
    """A number becomes a fraction of integers, which Python reads exactly: "1,250.5" becomes "(2501/2)"."""
    if token["number"]:
        return f"({Fraction(token['number'].replace(',', ''))})"
    return " " if token["space"] else token[0]


def evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(int(value)):
            return Fraction(value)
        case ast.UnaryOp(ast.USub(), operand):
            return -evaluate(operand)
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](evaluate(left), evaluate(right))
        case ast.Call(ast.Attribute(ast.Constant(str(whole)), "count"), [ast.Constant(str(part))], []) if part:
            return Fraction(whole.count(part))
    raise ValueError("not arithmetic")


def write(value: Fraction) -> str:
    """The number in decimal notation; an infinite decimal is rounded."""
    whole = str(abs(value.numerator) // value.denominator).lstrip("0")
    with decimal.localcontext(prec=len(whole) + DIGITS):
        quotient = decimal.Decimal(value.numerator) / value.denominator
        return f"{quotient.normalize():f}"
