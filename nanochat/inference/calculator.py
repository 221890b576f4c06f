"""
The assistant's tool: it evaluates arithmetic and counts letters. Expressions are parsed, never executed.

    calculate("12 * (3 + 4)")                  -> "84"
    calculate("1,250 / 8")                     -> "156.25"
    calculate("'strawberry'.count('r')")       -> "3"

Whatever the text is, the answer comes within milliseconds: a text is short, nesting is bounded, and since there are no
powers a result is about as long as the numbers in the text together.
"""
import ast
import decimal
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

MAX_LENGTH = 256  # characters of an expression
MAX_DEPTH = 32    # of nested parentheses
MAX_BITS = 1024   # of an integer power in `arithmetic`: 9**9**9 must not fill the memory
DIGITS = 12       # digits kept after the point of a result, zeros in front not counted

NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"  # 1,250.5 has a thousands comma, 12,50 has none
STRING = r"'[^'\\\n]*'|\"[^\"\\\n]*\""
TOKEN = re.compile(rf"\s*(?:(?P<number>{NUMBER})|(?P<string>{STRING})|(?P<sign>//|\.\s*count\b|[-+*/%()]))")
OPERATORS: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: type(a)(a // b),  # an exact fraction stays one
    ast.Mod: operator.mod, ast.Pow: operator.pow,
}

N = TypeVar("N", int, float, Fraction)


def arithmetic(node: ast.expr, leaf: Callable[[ast.expr], N]) -> N:
    """
    The value of a parsed expression of + - * / // % ** and minus signs. leaf: gives the value of any other node, or
    raises ValueError. Other errors are Python's own: ArithmeticError, and RecursionError for deep nesting.
    """
    match node:
        case ast.UnaryOp(op=ast.USub()):
            return -arithmetic(node.operand, leaf)
        case ast.BinOp() if type(node.op) in OPERATORS:
            left, right = arithmetic(node.left, leaf), arithmetic(node.right, leaf)
            if type(node.op) is ast.Pow and type(left) is type(right) is int and left.bit_length() * right > MAX_BITS:
                raise ValueError("the power is too large")
            return OPERATORS[type(node.op)](left, right)
    return leaf(node)


def calculate(text: str) -> str | None:
    """
    The value of an expression as people write it, or None for anything that is not one.

    + - * / // % with Python's meaning, minus signs, parentheses, decimals, thousands commas, and 'text'.count('part').
    Exact: 0.1 + 0.2 is 0.3.
    """
    try:
        source, operands = read_tokens(text.rstrip())
        return write(arithmetic(ast.parse(source, mode="eval").body, lambda node: read_operand(node, operands)))
    except (ValueError, ZeroDivisionError, SyntaxError, RecursionError):
        return None


def read_tokens(text: str) -> tuple[str, list[Fraction | str]]:
    """
    An expression as Python source in which each number and string is replaced by its index in the list of operands:
    "1,250 / .5" becomes "0 / 1" and [1250, 1/2].
    """
    source, operands, depth, position = "", [], 0, 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None or len(text) > MAX_LENGTH or depth > MAX_DEPTH:
            raise ValueError("an unknown token, too long, or nested too deeply")
        position = match.end()
        if match["sign"]:
            if match["sign"] == "(":
                depth += 1
            elif match["sign"] == ")":
                depth -= 1
            source += " " + "".join(match["sign"].split())  # without the blanks of ". count"
        else:
            source += f" {len(operands)}"
            if match["number"]:
                operands.append(Fraction(match["number"].replace(",", "")))
            else:
                operands.append(match["string"][1:-1])
    return source.strip(), operands


def read_operand(node: ast.expr, operands: list[Fraction | str]) -> Fraction:
    """The number that a node of such source stands for, or the letters counted in a text."""
    match node:
        case ast.Constant(value=index) if isinstance(operands[index], Fraction):
            return operands[index]
        case ast.Call(ast.Attribute(ast.Constant(whole), "count"), [ast.Constant(part)], []):
            if operands[part] and all(isinstance(operands[index], str) for index in (whole, part)):
                return Fraction(operands[whole].count(operands[part]))
    raise ValueError("neither a number nor letters counted in a text")


def write(value: Fraction) -> str:
    """In decimals; a result that has no end is rounded."""
    whole = str(abs(value.numerator) // value.denominator).lstrip("0")
    with decimal.localcontext(prec=len(whole) + DIGITS):
        quotient = decimal.Decimal(value.numerator) / value.denominator
        return str(value.numerator) if value.denominator == 1 else f"{quotient.normalize():f}"
