"""
What the objects of Python's standard library do, as their own documentation says: needs no download.

    "What does str.partition do?" - "Partition the string into three parts using the given separator."

    pydoc          test: objects that are held out; a fifth of the answers is trained on under another name (str.find's
                   under bytes.find)
    pydoc:known    test: objects that are trained on, each asked in the one phrasing that is never used for it

The objects, and some answers, are those of the running Python: another version has a few others.
"""
import importlib
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache

from nanochat.data.conversation import Conversation
from nanochat.data.task import Task, reference
from nanochat.tasks.common import single_turn, split_of, stable_hash

MODULES = """builtins abc argparse array base64 bisect calendar codecs collections colorsys configparser contextlib
copy csv dataclasses datetime decimal difflib enum fnmatch fractions functools gc getpass glob gzip hashlib heapq html
inspect io ipaddress itertools json keyword locale logging math mimetypes operator os os.path pathlib pickle platform
pprint queue random re secrets shelve shlex shutil signal socket sqlite3 stat statistics string struct subprocess sys
tarfile tempfile textwrap threading time timeit traceback types typing unicodedata urllib.parse uuid warnings weakref
zipfile zlib""".split()
QUESTIONS = """
What does {n} do?
What is {n} for?
Tell me what {n} does.
Explain {n}.
Describe {n}.
What do I need {n} for?
In Python, what does {n} do?
What can I do with {n}?
{n}?
Please explain {n}.
""".strip().splitlines()
REPLACED = ("inspect.getfile", "sys.excepthook")  # torch and nanochat/runtime/exits.py put others there
LONGEST = 130  # characters of an answer
WORD = re.compile(r"(?<!\S)[a-z]{3,}(?=[,.;:]?(?:\s|$))")  # in a sentence, not in a piece of code
# At the start of older documentation: "D.pop(k[,d]) -> v, remove …", "sleep(seconds)\n\nDelay …".
SIGNATURE = re.compile(r"(?:[\w.]+\([^)]*\)(?: *->[\w\[\]() ]+?(?=[,.:\n]|  |$)| *-->)?[\s,.:-]*)*")


class Pydoc(Task):
    eval_type = "generative"

    def __init__(self, argument: str, split: str) -> None:
        self.known = argument == "known"
        self.name = "Pydoc (objects it has read about)" if self.known else "Pydoc (held-out objects)"
        side = "train" if self.known else split
        self.objects = [(name, text) for name, text in documented().items() if split_of(f"pydoc:{name}") == side]
        self.turns = 1 if split == "test" else len(QUESTIONS) - 1  # in training all phrasings but the one held out
        self.held_out = split == "test" and self.known

    def __len__(self) -> int:
        return len(self.objects) * self.turns

    def conversation(self, index: int) -> Conversation:
        """In every pass over the objects each of them once, in another phrasing each time."""
        turn, number = divmod(index, len(self.objects))
        name, text = self.objects[number]
        own = stable_hash(f"phrasing:{name}")  # the phrasing that is held out for this object; the others come after it
        later = 0 if self.held_out else 1 + (own // len(QUESTIONS) + turn) % (len(QUESTIONS) - 1)
        return single_turn(QUESTIONS[(own + later) % len(QUESTIONS)].format(n=name), text)

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """The same words in the same order."""
        return words_of(answer) == words_of(reference(conversation))


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@cache
def documented() -> dict[str, str]:
    """Names of objects, and the first sentence about each, in the order of a hash."""
    found = {}
    for name in sorted(documentation(), key=lambda name: stable_hash(f"pydoc:{name}")):
        sentence = first_sentence(documentation()[name])
        if sentence:
            found[name] = sentence
    return found


@cache
def documentation_words() -> frozenset[str]:
    """The words that stand at least twice in the documentation's sentences: lower-case, of three letters and more."""
    found = Counter()
    for doc in documentation().values():
        found.update(re.findall(WORD, doc))
    return frozenset(word for word, count in found.items() if count > 1)


@cache
def documentation() -> dict[str, str]:
    """The documentation of public objects by their names."""
    found = {}
    with warnings.catch_warnings(action="ignore"):  # about deprecated modules
        for name, thing in public_objects():
            found.setdefault(name, inspect.getdoc(thing) or "")
    return found


def public_objects() -> Iterator[tuple[str, object]]:
    """(name, object): modules, their functions and classes, and the methods and properties of those classes."""
    known: dict[int, object] = {}  # by id; each object comes under its first name only: uuid.int_ is int
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # a Python that was built without sqlite3, say
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


def first_sentence(doc: str) -> str | None:
    """The first sentence after a signature; None where there is none that is short and made of words."""
    doc = doc.strip()
    paragraph = " ".join(doc[SIGNATURE.match(doc).end():].partition("\n\n")[0].split())
    sentence = re.match(r".+?[.!](?= |$)|.+", paragraph)
    text = sentence[0].rstrip(".:!") if sentence else ""
    if len(text) > LONGEST or len(re.findall(r"[A-Za-z]{2,}", text)) < 3:
        return None
    if not text[0].isalpha() or "->" in text:
        return None
    return text[0].upper() + text[1:] + "."
