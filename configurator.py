"""
A script's settings are its own globals; this module reads them as data and lets the command line override them.

    depth = 20    # layers
    config = configure(globals())

The assignments of plain values above the call are the settings. The comment at the end of the line is the setting's
help; a comment line such as `# ---- Batch` opens a section. A comment may begin with the numbers that are allowed:
[1..] one or more, [0..1] within, [>0] above zero, [-1, 1..] minus one, or one or more. Annotations name other types
and choices: `int | None`, `Literal["a", "b"]`.

    --key=value   override, or --key value; a number may be arithmetic (2**19), None goes where the annotation has it
    --flag        short for --flag=True
    -p value      short for --p=value, where a setting's name is one letter
    file.py       overrides as `key = value` lines; a key on the command line beats the same key in a file
    --help        the docstring and every setting

Source, files and values are parsed (`ast`, `tokenize`), never executed.

The command line of the running script is checked as this module is imported: a script that imports it before torch
answers a mistyped setting, and --help, at once.
"""
import ast
import contextlib
import functools
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanochat.inference.calculator import arithmetic
from nanochat.runtime.errors import UserError, did_you_mean
from nanochat.runtime.exits import install_one_line_errors

TYPES = {"int": int, "float": float, "bool": bool, "str": str}
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}  # a bool, as people write it
SECTION = re.compile(r"#\s*-{3,}\s*(.*?)[\s-]*$")
RANGES = re.compile(r"\[([-\d.,> ]+)\]")  # at the start of a comment: the numbers that a setting may be
ARITHMETIC = re.compile(r"[\s\d.eE_xXa-fA-F()*/+-]+")  # keeps words away from the parser, which warns about some
NOT_PLAIN = (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError)  # whatever text can provoke


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
        """The numbers it may be, such as "[-1, 1..]"; "" for any."""
        found = RANGES.match(self.comment)
        return found[0] if found else ""

    def allows(self, value: Any) -> bool:
        """Whether a number is within the ranges that the comment declares."""
        if not self.ranges or type(value) not in (int, float):
            return True
        return any(within(value, text.strip()) for text in self.ranges[1:-1].split(","))


def configure(script_globals: dict[str, Any], argv: list[str] | None = None) -> dict[str, Any]:
    """
    Apply the command line (default: `sys.argv[1:]`) to a script's settings and write them into its globals.

    Returns every setting in source order, as a dict that JSON can hold. Exits with 0 after --help, and with 2 after
    one line on stderr when the command line does not fit. Installs the one-line error hook.
    """
    config = settings_of(script_globals, sys.argv[1:] if argv is None else argv)
    install_one_line_errors(config)
    script_globals.update(config)
    return config


def settings_of(script_globals: dict[str, Any], argv: list[str]) -> dict[str, Any]:
    """What `configure` returns; it changes nothing yet, and exits as `configure` does."""
    settings, docstring = read_settings(script_globals)
    if "--help" in argv or "-h" in argv:
        print(help_text(settings, docstring))
        raise SystemExit(0)
    try:
        overrides = read_arguments(argv, settings)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return {name: overrides.get(name, setting.default) for name, setting in settings.items()}


# ---- The script: which settings there are

def read_settings(script_globals: dict[str, Any]) -> tuple[dict[str, Setting], str]:
    """The settings above the call of `configure` in the script's source, by name; and the script's docstring."""
    path = script_globals["__file__"]
    with tokenize.open(path) as file:
        source = file.read()
    tree = ast.parse(source, path)
    comments, headings = read_comments(source)
    settings: dict[str, Setting] = {}
    for node in statements_above_call(tree, path):
        name, annotation, value = assignment(node)
        if name is None or name.startswith("_"):
            continue
        try:
            literal = plain_value(value)
        except NOT_PLAIN:
            continue
        default = script_globals.get(name, literal)  # absent while this module is imported
        accepts = tuple(read_annotation(annotation)) or (type(default),)
        comment = next((comments[row] for row in range(node.lineno, node.end_lineno + 1) if row in comments), "")
        section = [title for line, title in headings if line < node.lineno][-1:] or [""]
        setting = settings[name] = Setting(name, default, accepts, comment, section[0])
        if accepts == (type(None),) or not any(fits(default, kind) for kind in accepts) or not setting.allows(literal):
            raise ValueError(f"{path}:{node.lineno}: {name} = {default!r} does not fit its annotation or its range")
    return settings, ast.get_docstring(tree) or ""


@functools.cache  # a script's are read before torch is imported, and when it configures itself
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


def statements_above_call(tree: ast.Module, path: str) -> list[ast.stmt]:
    """The top-level statements before `configure(...)`."""
    for position, node in enumerate(tree.body):
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", "")) == "configure":
            return tree.body[:position]
    raise ValueError(f"{path} does not call `configure(globals())` at its top level")


def assignment(node: ast.stmt) -> tuple[str | None, ast.expr | None, ast.expr | None]:
    """Name, annotation and value of `name = value` or `name: annotation = value`; three Nones for anything else."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, None, value
        case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
            return name, annotation, value
    return None, None, None


def read_annotation(annotation: ast.expr | None) -> Iterator[Any]:
    """The types and single values that `int | None` or `Literal["a", "b"]` name."""
    for node in ast.walk(annotation) if annotation else ():
        if isinstance(node, ast.Constant):
            yield node.value
        elif isinstance(node, ast.Name) and node.id in TYPES:
            yield TYPES[node.id]


# ---- The values: parsed, never executed

def plain_value(node: ast.expr) -> Any:
    """The value of a literal bool, number, string or None, or of arithmetic with numbers; else one of NOT_PLAIN."""
    if isinstance(node, ast.Constant):
        if node.value is None or type(node.value) in TYPES.values():
            return node.value
        raise ValueError("not a plain value")
    return arithmetic(node, number)


def number(node: ast.expr) -> int | float:
    """The value of an operand."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    raise ValueError("not a number")


def readings(text: str) -> Iterator[Any]:
    """What a text on the command line may mean, in the order of trial; which one is meant, the setting decides."""
    if text == "None":
        yield None
    if text.lower() in WORDS:
        yield WORDS[text.lower()]
    if ARITHMETIC.fullmatch(text):
        with contextlib.suppress(*NOT_PLAIN):  # then it is only a text
            yield plain_value(ast.parse(text.strip(), mode="eval").body)
    yield text


def fits(value: Any, kind: Any) -> bool:
    """Whether a value may go where a type or one single value is accepted; whole floats count as int, ints as float."""
    if not isinstance(kind, type):
        return type(value) is type(kind) and value == kind
    if kind is int and type(value) is float:
        return value.is_integer()
    if kind is float and type(value) in (int, float):
        return abs(value) <= sys.float_info.max  # false for infinities and NaN, which JSON cannot hold either
    return type(value) is kind


def within(value: int | float, text: str) -> bool:
    """Whether a number is in a range such as "1..", "0..1" or ">0", or is the number that the text says."""
    if text.startswith(">"):
        return value > float(text[1:])
    low, dots, high = text.partition("..")
    return float(low) <= value <= float(high or "inf") if dots else value == float(text)


def choose(candidates: Iterator[Any], setting: Setting, where: str) -> Any:
    """The first candidate that the setting accepts, in the setting's own type; UserError when there is none."""
    for value in candidates:
        for kind in setting.accepts:
            if fits(value, kind) and setting.allows(value):
                return kind(value) if kind in (int, float) else value
    expected = " or ".join(kind.__name__ if isinstance(kind, type) else repr(kind) for kind in setting.accepts)
    expected += f" in {setting.ranges}" * bool(setting.ranges)
    raise UserError(f"{where}: {setting.name} takes {expected} (default: {setting.default!r})")


# ---- The command line: which values they get

def read_arguments(argv: list[str], settings: dict[str, Setting]) -> dict[str, Any]:
    """The overrides of a command line and of the files it names, by setting. Raises UserError where it does not fit."""
    from_files: dict[str, Any] = {}
    from_keys: dict[str, Any] = {}
    rest = [argument for argument in argv if argument != "--"]  # torchrun puts it before our arguments
    while rest:
        argument = rest.pop(0)
        if argument.endswith(".py") and not argument.startswith("-"):
            from_files |= read_file(argument, settings)
            continue
        short = re.fullmatch("-[a-z]", argument) and argument[1] in settings
        if not short and not argument.startswith("--"):
            raise UserError(f"stray argument {argument!r}: settings are written --key=value")
        key, equals, text = argument.removeprefix("-").removeprefix("-").partition("=")
        setting = find(key.replace("-", "_"), settings, f"--{key}")
        if setting.name in from_keys:
            raise UserError(f"--{key} is given twice")
        if not equals and rest and takes_next(setting, rest[0], short):
            text = rest.pop(0)
        elif not equals and bool in setting.accepts:
            text = "True"
        elif not equals:
            raise UserError(f"--{key} needs a value, such as --{key}={setting.default}")
        from_keys[setting.name] = choose(readings(text), setting, f"--{key}={text}")
    return from_files | from_keys


def takes_next(setting: Setting, following: str, short: Any) -> bool:
    """Whether the next argument is the value of a key without "=": for a flag only a word such as True."""
    if bool in setting.accepts:
        return following.lower() in WORDS
    return bool(short) or not following.startswith("--")


def read_file(path: str, settings: dict[str, Setting]) -> dict[str, Any]:
    """The overrides in a file of `key = value` lines. Raises UserError, with the line, for anything else in it."""
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read(), path)
    except OSError as error:
        raise UserError(f"cannot read settings from {path}: {os.strerror(error.errno)}") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}") from None
    overrides: dict[str, Any] = {}
    for node in tree.body:
        where = f"{path}:{node.lineno}"
        name, _, expression = assignment(node)
        try:
            value = plain_value(expression) if name else None
        except NOT_PLAIN:
            name = None
        if name is None:
            raise UserError(f"{where}: only lines such as `key = 1` are read here, with a plain value; nothing is run")
        if name in overrides:
            raise UserError(f"{where}: {name} is given twice")
        overrides[name] = choose(iter([value]), find(name, settings, where), where)
    return overrides


def find(key: str, settings: dict[str, Setting], where: str) -> Setting:
    """The setting of that name, or a UserError with the nearest one."""
    if key in settings:
        return settings[key]
    raise UserError(f"{where}: there is no setting {key!r}{did_you_mean(key, settings) or '; --help lists them all'}")


def help_text(settings: dict[str, Setting], docstring: str) -> str:
    """The docstring, then every setting with its default and comment, aligned, by section."""
    width = max((len(f"--{name}={setting.default}") for name, setting in settings.items()), default=0)
    lines, section = [docstring], ""
    for name, setting in settings.items():
        if setting.section != section or len(lines) == 1:
            section = setting.section
            lines += ["", section or "Settings"]
        choices = [str(kind) for kind in setting.accepts if not isinstance(kind, type) and kind not in ("", None)]
        allowed = f"[{', '.join(choices)}] " * bool(choices)
        lines.append(f"  {f'--{name}={setting.default}':<{width}}  {allowed}{setting.comment}".rstrip())
    return "\n".join(lines).strip()


def check_names(config: dict[str, Any], defaults: dict[str, Any]) -> None:
    """UserError for a data set or a task that does not exist: without torch, which takes seconds to import."""
    data = config.get("data")
    if data and defaults["data"] != "":  # empty by default: of a report, whose data set may be gone
        from nanochat.data.dataset import (  # here, like the tasks: most scripts have no such setting
            OFFLINE,
            load_manifest,
        )

        if data not in OFFLINE:  # they are made where they are needed
            load_manifest(data)
    for specs in filter(None, (config.get("task"), config.get("tasks"))):
        from nanochat.tasks import read_spec

        for spec in specs.split(","):
            read_spec(spec)


with contextlib.suppress(AttributeError, OSError, ValueError, SyntaxError):  # the program is no script of settings
    main = {"__file__": sys.modules["__main__"].__file__}
    config = settings_of(main, sys.argv[1:])
    install_one_line_errors(config)
    check_names(config, settings_of(main, []))
