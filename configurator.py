"""
A script's settings are its own globals; this module reads them as data and lets the command line override them.

    depth = 20    # layers
    config = configure(globals())

The assignments of plain values above the call are the settings. The comment at the end of the line is the setting's
help; a comment line such as `# ---- Batch` opens a section. A comment may begin with the numbers that are allowed:
[1..] one or more, [0..1] within, [>0] above zero, [-1, 1..] minus one, or one or more. Annotations name other types
and choices: `int | None`, `Literal["a", "b"]`.

    --key=value   override, or --key value; None goes where the annotation has it
    --flag        short for --flag=True
    -p value      short for --p=value, where a setting's name is one letter
    --help        the docstring and every setting

Source and values are parsed (`ast`, `tokenize`), never executed. Scripts import torch and everything else below the
call: a mistyped setting, and --help, are answered before.
"""
import argparse
import ast
import contextlib
import functools
import io
import math
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanochat.runtime.console import escape_unprintable
from nanochat.runtime.errors import UserError, did_you_mean
from nanochat.runtime.exits import install_one_line_errors

TYPES = {"int": int, "float": float, "bool": bool, "str": str}
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}  # a bool, as people write it
SECTION = re.compile(r"#\s*-{3,}\s*(.*?)[\s-]*$")
RANGES = re.compile(r"\[([-\d.,> ]+)\]")  # at the start of a comment: the numbers that a setting may be


@dataclass(frozen=True)
class Setting:
    """One setting. accepts: the types and the single values (choices, None) that it takes."""
    name: str
    default: Any
    accepts: tuple[Any, ...]
    comment: str
    section: str

    @property
    def ranges(self) -> str:
        """The numbers it may be, such as "-1, 1.."; "" for any."""
        found = RANGES.match(self.comment)
        return found[1] if found else ""


def configure(script_globals: dict[str, Any]) -> dict[str, Any]:
    """
    Apply the command line to a script's settings and write them into its globals.

    Returns every setting in source order, as a dict that JSON can hold. Exits with 0 after --help, and with 2 after
    one line on stderr when the command line does not fit. Installs the one-line error hook.
    """
    settings, docstring = read_settings(script_globals["__file__"])
    argv = sys.argv[1:]
    escape_unprintable()
    if "--help" in argv or "-h" in argv:
        print(help_text(settings, docstring))
        raise SystemExit(0)
    try:
        overrides = read_arguments(argv, settings)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    config = {name: overrides.get(name, setting.default) for name, setting in settings.items()}
    install_one_line_errors(config)
    script_globals.update(config)
    return config


# ---- The script: which settings there are

def read_settings(path: str) -> tuple[dict[str, Setting], str]:
    """The settings above the call of `configure` in the script's source, by name; and the script's docstring."""
    with tokenize.open(path) as file:
        source = file.read()
    tree = ast.parse(source, path)
    comments, headings = read_comments(source)
    settings: dict[str, Setting] = {}
    for node in tree.body:
        annotation: ast.expr | None = None
        match node:
            case ast.Assign(value=ast.Call(ast.Name("configure"))) | ast.Expr(ast.Call(ast.Name("configure"))):
                return settings, ast.get_docstring(tree) or ""
            case ast.Assign([ast.Name(name)], value):
                pass
            case ast.AnnAssign(ast.Name(name), annotation, ast.expr() as value):
                pass
            case _:
                continue
        try:
            default = ast.literal_eval(value)
        except ValueError:  # an expression: no setting
            continue
        if default is None or type(default) in TYPES.values():  # no list and the like
            accepts = tuple(read_annotation(annotation)) or (type(default),)
            titles = [title for line, title in headings if line < node.lineno]
            section = titles[-1] if titles else ""
            settings[name] = Setting(name, default, accepts, comments.get(node.end_lineno, ""), section)
    raise ValueError(f"{path} does not call `configure(globals())` at its top level")


def read_comments(source: str) -> tuple[dict[int, str], list[tuple[int, str]]]:
    """The comments that end a line of code, by line number; and the section headings with their line numbers."""
    comments, headings = {}, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            if token.line[:column].strip():
                comments[row] = token.string.removeprefix("#").strip()
            elif heading := SECTION.match(token.string):
                headings.append((row, heading[1]))
    return comments, headings


def read_annotation(annotation: ast.expr | None) -> Iterator[Any]:
    """The types and single values that `int | None` or `Literal["a", "b"]` name."""
    if annotation is None:
        return
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant):
            yield node.value
        elif isinstance(node, ast.Name) and node.id in TYPES:
            yield TYPES[node.id]


# ---- The values: parsed, never executed

def parse(text: str, kind: Any) -> Any:
    """The text as a value of a type, or as a single value (a choice, None). ValueError or KeyError if it is none."""
    if kind is bool:
        return WORDS[text.lower()]
    if kind in (int, float):
        number = float(text)  # also of an int, so that 1e6 is one
        if not math.isfinite(number) or number != kind(number):  # JSON cannot hold it; it is no integer
            raise ValueError
        return kind(number)
    if kind is str:
        return text
    if text == str(kind):
        return kind
    raise ValueError


def within(value: Any, ranges: str) -> bool:
    """Whether a number is in one of the ranges, such as "0..1", ">0" or "-1, 1.."; "" has all. Others: always."""
    if not ranges or type(value) not in (int, float):
        return True
    for text in ranges.split(", "):
        low, dots, high = text.partition("..")
        if text[0] == ">":
            inside = value > float(text[1:])
        elif dots:
            inside = float(low) <= value <= float(high or "inf")
        else:
            inside = value == float(low)
        if inside:
            return True
    return False


def choose(text: str, setting: Setting) -> Any:
    """The value that a text means for a setting; UserError when it means none."""
    for kind in sorted(setting.accepts, key=lambda kind: isinstance(kind, type)):  # None before str
        with contextlib.suppress(ValueError, KeyError):
            value = parse(text, kind)
            if within(value, setting.ranges):
                return value
    expected = " or ".join(kind.__name__ if isinstance(kind, type) else repr(kind) for kind in setting.accepts)
    if setting.ranges:
        expected += f" in [{setting.ranges}]"
    raise UserError(f"--{setting.name}={text}: {setting.name} takes {expected} (default: {setting.default!r})")


# ---- The command line: which values they get

def read_arguments(argv: list[str], settings: dict[str, Setting]) -> dict[str, Any]:
    """The overrides of a command line, by setting. Raises UserError where it does not fit."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                                     exit_on_error=False)
    for name, setting in settings.items():
        spellings = [f"--{name}"]
        if len(name) == 1:
            spellings.append(f"-{name}")
        option = parser.add_argument(*spellings, type=functools.partial(choose, setting=setting))
        if bool in setting.accepts:
            option.nargs, option.const = "?", True
    try:
        overrides, unknown = parser.parse_known_args([word for word in argv if word != "--"])  # torchrun's separator
    except argparse.ArgumentError as error:  # a value is missing
        raise UserError(str(error)) from None
    if unknown:
        word = unknown[0]
        if not word.startswith("-"):
            raise UserError(f"stray argument {word!r}: settings are written --key=value")
        key = word.lstrip("-").partition("=")[0]
        hint = did_you_mean(key, settings) or "; --help lists them all"
        raise UserError(f"{word}: there is no setting {key!r}{hint}")
    return vars(overrides)


def help_text(settings: dict[str, Setting], docstring: str) -> str:
    """The docstring, then every setting with its default and comment, aligned, by section."""
    assignments = {name: f"--{name}={setting.default}" for name, setting in settings.items()}
    width = max(map(len, assignments.values()), default=0)
    lines, section = [docstring], None
    for name, setting in settings.items():
        if setting.section != section:
            section = setting.section
            lines += ["", section or "Settings"]
        choices = [str(kind) for kind in setting.accepts if not isinstance(kind, type) and kind not in ("", None)]
        allowed = f"[{', '.join(choices)}] " if choices else ""
        lines.append(f"  {assignments[name]:<{width}}  {allowed}{setting.comment}".rstrip())
    return "\n".join(lines).strip()
