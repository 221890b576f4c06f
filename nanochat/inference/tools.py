"""
The assistant's tools: what may stand between <|python_start|> and <|python_end|>, and what the tools return.

    12 * (3 + 4)                    84, by the calculator
    spell('sugar')                  s-u-g-a-r: a model reads tokens, and cannot see a token's letters
    lookup('str.partition')         the passage with that title in a library
    search('split three parts')     the best passage about these words

If nothing is found, the result is "nothing", so the model can say so. If the library was not searched to the end, the
result is a sentence that says why, which the model quotes like a passage. A passage is data: special tokens in it are
encoded as text. A passage that would fill the context is cut, at a sentence's end if possible.
"""
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from nanochat.data.sentences import sentence_ends
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.calculator import calculate
from nanochat.inference.sums import LANGUAGES, language_of, read_sum
from nanochat.library.retrieval import LONGEST, Library, Passage, SearchFailed, library_path
from nanochat.library.words import is_small_talk, refers_back, telling_words

NOTHING = "nothing"
# What a model is trained to say after "nothing"; the name is in quotation marks unless it begins with a blank.
REFUSAL = "I do not know. I found nothing about{}."
# Refusals in other languages have no name, because names may need inflection.
REFUSALS = {
    "de": "Das weiß ich nicht. Ich habe nichts gefunden.",
    "es": "No lo sé. No he encontrado nada.",
    "fr": "Je ne sais pas. Je n'ai rien trouvé.",
    "ja": "わかりません。何も見つかりませんでした。",
    "ru": "Я не знаю. Я ничего не нашёл.",
    "zh": "我不知道。我没有找到。",
}
# Calls in one answer: a model that repeats itself would never end.
MOST_CALLS = 3
# Methods of a library that a model can call.
QUERIES = ("lookup", "search")
TOOL_CALL = re.compile(r"\s*(\w+)\(\s*(['\"])(.*)\2\s*\)\s*", re.DOTALL)


class Plan(NamedTuple):
    """
    What is decided about an answer before the model writes it. Nothing of this: the model decides.

    lost: what an answer says that would end without a word; "" if nothing was planned. search: in one's own library the
    words that a search must have; is_found: they find something, so the answer begins with a call. call, answer: a
    sum's; the answer says this sentence, after the call if there is one. is_small_talk: the answer makes no call.
    """
    lost: str = ""
    search: str = ""
    is_found: bool = False
    call: str = ""
    answer: str = ""
    is_small_talk: bool = False


class Tools:
    """
    What an engine can call. library: where passages are looked up; None: nothing is found. copying: whether `plan`
    decides what is called, and the model must look up the user's words and quote the result's letters
    (nanochat/inference/copying.py).
    """

    def __init__(self, library: Library | None = None, copying: bool = True) -> None:
        self.library = library
        self.copying = copying
        self.is_own = library is not None and library.is_own

    def refresh(self) -> None:
        """Called before each question, in any thread: read what has changed (fresh_tools.py)."""

    def find(self, expression: str) -> Passage | None:
        """The passage that a call finds; if the library is not read to the end, a sentence that says so."""
        call = TOOL_CALL.fullmatch(expression)
        if call is None or self.library is None or call[1] not in QUERIES:
            return None
        return found_by(self.library, call[1], call[3])

    def source(self, parts: Sequence[dict[str, str]]) -> Passage | None:
        """
        The passage that a message's last part is, or is the beginning of; else None. Made again since the call, the
        library may find another.
        """
        if [part["type"] for part in parts[-2:]] != ["python", "python_output"]:
            return None
        # Only the calls can tell: an "n" may be the beginning of "nothing" or of a passage.
        *before, call, result = parts
        calls = sum(part["type"] == "python" and bool(TOOL_CALL.fullmatch(part["text"])) for part in before)
        passage = self.find(call["text"]) if calls < MOST_CALLS else None
        return passage if passage and passage.text.startswith(result["text"]) else None

    def plan(self, questions: Sequence[str]) -> Plan:
        """What is decided about the answer to the user's last question."""
        if not questions:
            return Plan()
        last = question_in(questions[-1])
        lost = LANGUAGES[language_of(last)].says["lost"]
        if is_small_talk(last):
            return Plan(lost, is_small_talk=True)
        if wanted := read_sum(last):
            return Plan(lost, call=wanted.call, answer=wanted.answer)
        return Plan(lost, *self.asked(questions)) if self.is_own else Plan(lost)

    def asked(self, questions: Sequence[str]) -> tuple[str, bool]:
        """
        What to search for to answer the last question, and whether it is found: the question; or, after a line with the
        questions that it goes on from, at once if it refers back ("And the rear tyre?").
        """
        *before, last = map(question_in, questions[-3:] or [""])
        last = last[-LONGEST:]
        searches = [last]
        if before and (refers_back(last) or telling_words(last)):
            # The question before this one may itself go on from another.
            begins = 0 if refers_back(before[-1]) else -1
            together = f"{' '.join(before[begins:])}\n{last}"[-LONGEST:]
            searches.insert(0 if refers_back(last) else 1, together)
        for words in searches:
            if self.find(f'search("{words}")'):
                return words, True
        return searches[0], False

    def result(self, expression: str, tokenizer: Tokenizer, calls: int, room: int) -> str | None:
        """
        The result; None for a text that is neither a call nor for the calculator: then the model goes on.
        calls: how many this answer has made before; arithmetic does not count. room: most tokens of a passage.
        """
        call = TOOL_CALL.fullmatch(expression)
        if call is None:
            return calculate(expression)
        if calls >= MOST_CALLS:
            return NOTHING
        if call[1] == "spell":
            return shortened("-".join(call[3].strip()), tokenizer, room)
        passage = self.find(expression)
        return shortened(passage.text, tokenizer, room) if passage else NOTHING


@lru_cache(256)
def found_by(library: Library, query: str, text: str) -> Passage | None:
    """What `find` returns. The plan asks with the question; the call's words are asked for result, end and place."""
    try:
        return getattr(library, query)(text)
    except SearchFailed as error:
        return Passage(str(error), str(error), library.path.name)


def question_in(text: str) -> str:
    """The last paragraph with a question mark, or else the last: a system message stands before the first question."""
    paragraphs = text.split("\n\n")
    asking = [paragraph for paragraph in paragraphs if re.search("[?？؟]", paragraph)]
    return (asking or paragraphs)[-1].replace("\n", " ")


def open_tools(library: str | None, copying: bool = True) -> Tools:
    """The tools with a library, given by its name; None: Python's library, if it has been made."""
    path = library_path(library or "python")
    if library is None and not path.is_file():
        return Tools(None, copying)
    return Tools(Library(path), copying)


def refusal(asked: str) -> str:
    """The English answer to a call with this text that found nothing. A blank before the text belongs to its token."""
    return REFUSAL.format(asked if asked.startswith(" ") else f' "{asked}"')


def shortened(text: str, tokenizer: Tokenizer, size: int) -> str:
    """The first sentences of a text, up to `size` tokens; if the first has more, its beginning."""
    for end in reversed(sentence_ends(text)):
        if len(tokenizer.encode(text[:end])) <= size:
            return text[:end]
    text = tokenizer.decode(tokenizer.encode(text)[:size]).rstrip("\ufffd")
    return text.rpartition(" ")[0] or text
