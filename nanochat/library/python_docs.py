"""The documentation of Python's standard library: tasks ask about its objects, a library looks them up."""
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from functools import cache

from nanochat.data.sentences import sentence_ends

MODULES = """builtins abc argparse array base64 bisect calendar codecs collections colorsys configparser contextlib
copy csv dataclasses datetime decimal difflib enum fnmatch fractions functools gc getpass glob gzip hashlib heapq html
inspect io ipaddress itertools json keyword locale logging math mimetypes operator os os.path pathlib pickle platform
pprint queue random re secrets shelve shlex shutil signal socket sqlite3 stat statistics string struct subprocess sys
tarfile tempfile textwrap threading time timeit traceback types typing unicodedata urllib.parse uuid warnings weakref
zipfile zlib""".split()
# torch and nanochat/runtime/exits.py replace these, so their documentation depends on what is imported.
REPLACED = ("inspect.getfile", "sys.excepthook")
LONGEST = 130  # characters of an answer
# At the start of older documentation: "D.pop(k[,d]) -> v, remove …", "map(…) --> map object\n\nMake …".
SIGNATURE = re.compile(r"\A(?:[\w.]+\([^)]*\)(?: *->[\w\[\]() ]+?(?=[,.:\n]|  |$)| *-->(?:[\w ]+(?=\n\n|\n\w+\())?)?"
                       r"[\s,.:-]*)*")


@cache
def documentation() -> dict[str, str]:
    """The documentation of public objects by their names."""
    docs: dict[str, str] = {}
    # Deprecated modules warn when they are imported.
    with warnings.catch_warnings(action="ignore"):
        for name, thing in public_objects():
            docs.setdefault(name, inspect.getdoc(thing) or "")
    return docs


def public_objects() -> Iterator[tuple[str, object]]:
    """(name, object): modules, their functions and classes, and the methods and properties of these classes."""
    # By id: an object has the first name that it is seen under, so uuid.int_ is int. The objects are kept, so
    # no id is used again.
    known: dict[int, object] = {}
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        # Python may have been built without a module, such as sqlite3.
        except ImportError:
            continue
        yield module_name, module
        for key in getattr(module, "__all__", vars(module)):
            thing = getattr(module, key, None)
            name = f"{module_name}.{key}".removeprefix("builtins.")
            if key.startswith("_") or name in REPLACED or id(thing) in known:
                continue
            if not inspect.isroutine(thing) and not inspect.isclass(thing):
                continue
            known[id(thing)] = thing
            yield name, thing
            if inspect.isclass(thing):
                for method, member in vars(thing).items():
                    if not method.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
                        yield f"{name}.{method}", getattr(thing, method)


def first_paragraph(doc: str) -> str:
    """The first paragraph after a signature, on one line."""
    text = SIGNATURE.sub("", doc.strip(), count=1)
    return " ".join(text.partition("\n\n")[0].split())


def first_sentence(doc: str) -> str | None:
    """The first sentence after a signature; None unless it is short and made of words."""
    paragraph = first_paragraph(doc)
    text = paragraph[: sentence_ends(paragraph)[0]].rstrip(".:!")
    if len(text) > LONGEST or len(re.findall(r"[A-Za-z]{2,}", text)) < 3:
        return None
    if not text[0].isalpha() or "->" in text:
        return None
    return text[0].upper() + text[1:] + "."
