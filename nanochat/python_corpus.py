"""
The standard library of the running interpreter as text: tens of megabytes of code and English on every machine.

Three kinds of documents, and no text twice:
    the source files, docstrings inside; long ones cut between top-level definitions, all pieces of one file kin
    the language reference that `help()` carries (pydoc_data), one document per topic
    the docstrings of built-in and C modules, whose sources are not here; what a source file also says is left out
"""
import contextlib
import importlib
import inspect
import io
import os
import re
import sys
import sysconfig
import tokenize
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
# C modules that act on import, open something, or exist only to test the interpreter itself.
NOT_IMPORTED = ("_tkinter", "_test", "xx", "_xx", "_ctypes_test", "readline", "antigravity")
# Where a long source may be cut, best first. A blank line and what follows it at the margin tell enough: parsing would
# take ten times as long, and a cut inside a docstring does no harm.
CUTS = [
    re.compile(r"\n\n(?=[@#]|class |def |async def |if )"),
    re.compile(r"\n\n(?= {4}(?:[@#]|class |def |async def ))"),
    re.compile(r"\n"),
]


def documents(most: int, tally: Counter) -> Iterator[tuple[str, str]]:
    """(text, kin) of the whole corpus; no text is longer than about `most` bytes. Invalid bytes are tallied."""
    seen_lines: set[str] = set()
    for path in source_files():
        source = read_source(path, tally)
        seen_lines.update(map(bare, source.splitlines()))
        for piece in pieces(source, most):
            yield piece, source
    for text in topics():
        yield text, text
    for name in c_modules():
        for text in c_documentation(name, seen_lines, most):
            yield text, text


def source_files() -> list[Path]:
    """Every .py file of the standard library, except the installed packages below it and pydoc's table of topics."""
    found = []
    for parent, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - SKIPPED)
        found += [Path(parent, name) for name in sorted(names) if name.endswith(".py")]
    return [path for path in found if path.parent.name != "pydoc_data"]


def read_source(path: Path, tally: Counter) -> str:
    """A source file in the encoding it declares; test files that declare nonsense are read as UTF-8."""
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        escaped = data.decode(errors="surrogateescape")
        tally["invalid_bytes"] += sum("\udc80" <= char <= "\udcff" for char in escaped)
        return data.decode(errors="replace")


def pieces(source: str, most: int) -> Iterator[str]:
    """A source in pieces of at most `most` characters: cut between top-level definitions, else methods, else lines."""
    if len(source) <= most:
        yield source
        return
    levels = [[match.end() for match in pattern.finditer(source)] for pattern in CUTS]
    begin = 0
    while len(source) - begin > most:
        cuts = (level[bisect_right(level, begin + most) - 1] for level in levels if level)
        end = next((cut for cut in cuts if begin + most // 4 < cut <= begin + most), begin + most)
        yield source[begin:end]
        begin = end
    yield source[begin:]


def topics() -> list[str]:
    """The pages of the language reference behind `help("…")`."""
    try:
        from pydoc_data.topics import topics as pages
    except ImportError:  # some distributions leave it out
        return []
    return [page for _, page in sorted(pages.items())]


def c_modules() -> list[str]:
    """Names of the built-in modules and of the standard library's extension modules, without tests."""
    names = set(sys.builtin_module_names)
    folder = Path(sysconfig.get_config_var("DESTSHARED") or sysconfig.get_path("stdlib"))  # not the one of a venv
    names |= {path.name.split(".")[0] for path in folder.glob("*.so")}
    return sorted(name for name in names if not name.startswith(NOT_IMPORTED))


def c_documentation(name: str, seen_lines: set[str], most: int) -> Iterator[str]:
    """
    The docstrings of a C module, as `help()` would head them. Leaves out every docstring whose lines all stand in
    `seen_lines` already, and adds what it yields: Python and C versions of a module share many, word for word.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
    except Exception:  # an extension whose library is not installed here, or that does not run on this platform
        return
    text = f"Help on module {name}\n"
    entries = 0
    for heading, doc in docstrings(module):
        lines = {bare(line) for line in doc.splitlines()}
        if lines <= seen_lines:
            continue
        seen_lines |= lines
        if entries and len(text) + len(doc) > most:
            yield text
            text, entries = f"Help on module {name}, continued\n", 0
        text += f"\n{heading}\n" + "".join(f"    {line}".rstrip() + "\n" for line in doc.splitlines())
        entries += 1
    if entries:
        yield text


def bare(line: str) -> str:
    """A line without what surrounds it in a source: indentation and the quotes of a docstring."""
    return line.strip(" \t\"'")


def docstrings(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(heading, docstring) of a module, its functions and classes, and the methods these classes define themselves."""
    name = module.__name__
    if module.__doc__:
        yield name, inspect.cleandoc(module.__doc__)
    for key, value in sorted(vars(module).items()):
        if getattr(value, "__module__", name) not in (name, name.lstrip("_"), "builtins"):
            continue  # imported from elsewhere, and documented there
        if inspect.isclass(value):
            yield from described(f"class {name}.{key}", value)
            for attribute, member in sorted(vars(value).items()):
                if not inspect.ismethodwrapper(member) and type(member).__name__ != "wrapper_descriptor":
                    yield from described(f"{name}.{key}.{attribute}", member)
        elif inspect.isroutine(value):
            yield from described(f"{name}.{key}", value)


def described(heading: str, value: object) -> Iterator[tuple[str, str]]:
    """The heading with the signature that C code declares, and the docstring, where the object has one of its own."""
    of_its_own = inspect.isclass(value) or inspect.isroutine(value) or inspect.isdatadescriptor(value)
    doc = getattr(value, "__doc__", None)
    if of_its_own and isinstance(doc, str) and doc.strip():
        signature = getattr(value, "__text_signature__", None) or ""
        # The object itself is marked with a dollar in it: ($module, /) is (), ($self, key, /) is (key, /).
        signature = re.sub(r"\$\w+(, /(?=\)))?(, )?", "", signature)
        yield heading + signature, inspect.cleandoc(doc)
