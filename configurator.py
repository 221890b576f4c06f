"""
A script's settings are its own globals; this module reads them as data and lets the command line override them.

    depth = 20    # layers
    config = configure(globals())

The assignments of plain values above the call are the settings. The comment at the end of the line is the setting's
help; a comment line such as `# ---- Batch` opens a section. A comment may begin with the numbers that are allowed:
[1..] one or more, [0..1] within, [-1, 1..] minus one, or one or more. Annotations name other types and choices:
`int | None`, `Literal["a", "b"]`.

    --key=value   override, or --key value; None works if the annotation has it
    --flag        short for --flag=True
    -p value      short for --p=value, if a setting's name is one letter
    --help        the docstring and every setting

Source and values are parsed, never executed. Scripts import torch and everything else below the
call, so a mistyped setting or --help is answered first.
"""
import argparse
import ast
import contextlib
import functools
import math
import re
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from nanochat.runtime.console import escape_unprintable
from nanochat.runtime.environment import set_environment
from nanochat.runtime.errors import UserError, did_you_mean
from nanochat.runtime.exits import install_one_line_errors

TYPES = {"int": int, "float": float, "bool": bool, "str": str}
SECTION = re.compile(r"#\s*-{3,}\s*(.*?)[\s-]*$")
# At the start of a comment: the numbers that a setting may be.
RANGES = re.compile(r"\A\[([-\d., ]+)\]")


class Setting(NamedTuple):
    """accepts: the types and single values (choices, None) that it takes."""
    name: str
    default: Any
    accepts: tuple[Any, ...]
    comment: str
    section: str


def configure(script_globals: dict[str, Any]) -> dict[str, Any]:
    """
    Apply the command line to a script's settings and write them into its globals.

    Returns every setting in source order, as a dict that JSON can hold. Exits with 0 after --help, and with 2 after
    one line on stderr when the command line does not fit. Installs the one-line error hook, and sets the environment
    in which torch is to be loaded.
    """
    set_environment()
    settings, docstring = read_settings(script_globals["__file__"])
    argv = sys.argv[1:]
    escape_unprintable()
    if "--help" in argv or "-h" in argv:
        print(help_text(settings, docstring))
        raise SystemExit(0)
    try:
        config = read_arguments(argv, settings)
    except UserError as error:
        refuse(error)
    install_one_line_errors(config)
    script_globals.update(config)
    return config


def refuse(problem: object) -> NoReturn:
    """End with exit code 2: the command line is wrong."""
    print(f"error: {problem}", file=sys.stderr)
    raise SystemExit(2)


# ---- The script: which settings there are

def read_settings(path: str) -> tuple[dict[str, Setting], str]:
    """The settings above the call of `configure` in the script's source, by name; and the script's docstring."""
    source = Path(path).read_text(encoding="utf-8")
    tree = ast.parse(source, path)
    lines = source.split("\n")
    settings: dict[str, Setting] = {}
    section, end = "", 0
    for node in tree.body:
        # Between two statements there are only comments and blank lines.
        for line in lines[end : node.lineno - 1]:
            if heading := SECTION.match(line):
                section = heading[1]
        end = node.end_lineno or 0
        match node:
            case ast.Assign(value=ast.Call(ast.Name("configure"))) | ast.Expr(ast.Call(ast.Name("configure"))):
                return settings, ast.get_docstring(tree) or ""
            case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                pass
            case _:
                continue
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            # An expression is not a setting: it may depend on other lines.
            continue
        # Nor is a list: a command line has no good way to write one.
        if default is None or type(default) in TYPES.values():
            accepts = tuple(read_annotation(node)) or (type(default),)
            # Columns of the syntax tree count bytes.
            comment = lines[end - 1].encode()[node.end_col_offset :].decode().strip(" #")
            settings[name] = Setting(name, default, accepts, comment, section)
    raise ValueError(f"{path} does not call `configure(globals())` at its top level")


def read_annotation(assignment: ast.Assign | ast.AnnAssign) -> Iterator[Any]:
    """The types and single values that an annotation such as `int | None` or `Literal["a", "b"]` names."""
    if isinstance(assignment, ast.AnnAssign):
        for node in ast.walk(assignment.annotation):
            if isinstance(node, ast.Constant):
                yield node.value
            elif isinstance(node, ast.Name) and node.id in TYPES:
                yield TYPES[node.id]


# ---- The values: parsed, never executed

def parse(text: str, setting: Setting) -> Any:
    """The value that a text means for a setting; UserError if it is not valid."""
    ranges = "".join(RANGES.findall(setting.comment))
    # None comes before str, which would accept its text.
    for kind in sorted(setting.accepts, key=lambda kind: isinstance(kind, type)):
        if text == str(kind):
            return kind
        if kind is str:
            return text
        with contextlib.suppress(ValueError, KeyError):
            if kind is bool:
                # yes, no, on, off, true, false, 1, 0
                return ConfigParser.BOOLEAN_STATES[text.lower()]
            if kind in (int, float):
                # A float first, so that 1e6 is an integer. JSON cannot hold nan and inf.
                number = float(text)
                if math.isfinite(number) and number == kind(number) and in_ranges(number, ranges):
                    return kind(number)
    expected = " or ".join(kind.__name__ if isinstance(kind, type) else repr(kind) for kind in setting.accepts)
    if ranges:
        expected += f" in [{ranges}]"
    raise UserError(f"--{setting.name}={text}: {setting.name} takes {expected} (default: {setting.default!r})")


def in_ranges(number: float, ranges: str) -> bool:
    """Whether a number is in one of the ranges, such as "0..1" or "-1, 1.."; "" allows all."""
    for part in ranges.split(", "):
        low, dots, high = part.partition("..")
        if not low or number == float(low):
            return True
        if dots and float(low) < number <= float(high or "inf"):
            return True
    return False


# ---- The command line: which values they get

def read_arguments(argv: list[str], settings: dict[str, Setting]) -> dict[str, Any]:
    """The value of each setting after a command line. Raises UserError if it does not fit."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, setting in settings.items():
        spellings = [f"--{name}", f"-{name}"] if len(name) == 1 else [f"--{name}"]
        option = parser.add_argument(*spellings, type=functools.partial(parse, setting=setting),
                                     default=setting.default)
        if bool in setting.accepts:
            option.nargs, option.const = "?", True
    try:
        # torchrun puts "--" between its own arguments and the script's.
        config, unknown = parser.parse_known_args([word for word in argv if word != "--"])
    except argparse.ArgumentError as error:
        # A value is missing: `parse` raises UserError for other errors.
        raise UserError(str(error)) from None
    for word in unknown:
        if not word.startswith("-"):
            raise UserError(f"stray argument {word!r}: settings are written --key=value")
        key = word.lstrip("-").partition("=")[0]
        hint = did_you_mean(key, settings) or "; --help lists them all"
        raise UserError(f"{word}: there is no setting {key!r}{hint}")
    return vars(config)


def help_text(settings: dict[str, Setting], docstring: str) -> str:
    """The docstring, then every setting with its default and comment, aligned, by section."""
    assignments = {name: f"--{name}={setting.default}" for name, setting in settings.items()}
    width = max(map(len, assignments.values()))
    lines, section = [docstring], None
    for name, setting in settings.items():
        if setting.section != section:
            section = setting.section
            lines += ["", section or "Settings"]
        choices = [str(kind) for kind in setting.accepts if not isinstance(kind, type) and kind not in ("", None)]
        allowed = f"[{', '.join(choices)}] " if choices else ""
        lines.append(f"  {assignments[name]:<{width}}  {allowed}{setting.comment}".rstrip())
    return "\n".join(lines).strip()
