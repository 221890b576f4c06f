"""
Copying without errors. The model decides what it looks up and how much of a passage it quotes, but it cannot change
the letters:

    in a call        the text in lookup("…"), search("…") and spell("…") is a stretch of whole words that the user wrote
    after a sum      the answer is the sentence of `read_sum` (sums.py)
    in one's notes   the answer begins with a call if a search for the question finds something, and a call's text has
                     all words of the question that tell what it is about
    after a passage  the answer is the passage, from its beginning up to the end of one of its sentences
    after letters    an answer that begins like a spelled word's, "s-", has all of them, then goes on as it likes
    after "nothing"  an answer that begins like a trained refusal is that refusal, with the name looked up
    after a result   an answer that begins like "The answer is" has the calculator's result

Texts are compared in bytes, so any tokenization of the same text is allowed. Without this, a model of two million
parameters quoted 2 of 55 passages wrongly; with half the training, 21 of 35.
"""
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nanochat.data.sentences import sentence_ends
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.sums import LANGUAGES
from nanochat.inference.tools import NOTHING, QUERIES, REFUSALS, TOOL_CALL, Plan, refusal
from nanochat.library.words import MARKS, UNSPACED, begins_back, telling_words

# Limits, because a call's first token compares every word of the question.
MOST_BYTES = 64         # longer tokens are not used for copying
MOST_TAIL = 4           # bytes of a stretch in a token that also closes the call, such as `?")`
MOST_QUESTION = 2000    # characters used of what the user wrote, the last ones
# The calls whose text is the user's.
COPYING_CALLS = (*QUERIES, "spell")
OPENINGS = [f'{name}("'.encode() for name in COPYING_CALLS]
# An unfinished call: its name, its quotation mark and what follows.
CALL_TEXT = re.compile(rf"\s*({'|'.join(COPYING_CALLS)})\(\s*(['\"]?)(.*)".encode(), re.DOTALL)
SENTENCE_BEGINS = 12    # bytes after which an answer counts as a refusal, or as one that says a result
# A blank, a word, or one other character. Marks belong to the character before them. In scripts without blanks each
# character is a word.
UNIT = re.compile(rf" |(?:[^\W{UNSPACED}][{MARKS}]*)+|\S[{MARKS}\ufe00-\ufe0f]*")
DOT_IN_WORD = re.compile(rf"(?<=[^\W{UNSPACED}])\.(?=[^\W{UNSPACED}])")


class Vocabulary:
    """The tokens of a tokenizer by their bytes, made once for all answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes_of = tokenizer.raw_tokens
        self.token_of = {token: number for number, token in enumerate(self.bytes_of) if len(token) <= MOST_BYTES}
        self.lengths = sorted({len(token) for token in self.token_of})
        special = tokenizer.encode_special
        self.user_end = special("<|user_end|>")
        self.python_start, self.python_end = special("<|python_start|>"), special("<|python_end|>")
        self.output_end = special("<|output_end|>")

    def is_special(self, token: int) -> bool:
        return token >= len(self.bytes_of)

    def beginnings(self, text: bytes) -> set[int]:
        """All tokens that a text may begin with."""
        beginnings = (text[:length] for length in self.lengths if length <= len(text))
        return {self.token_of[beginning] for beginning in beginnings if beginning in self.token_of}

    def questions(self, prompt: Sequence[int]) -> list[str]:
        """What the user wrote in a conversation."""
        texts = []
        text = b""      # a truncated prompt may begin within a message
        for token in prompt:
            if not self.is_special(token):
                text += self.bytes_of[token]
                continue
            if token == self.user_end:
                texts.append(text.decode(errors="replace"))
            text = b""
        return texts


@dataclass
class Copy:
    """
    A text that is being copied: `opening`, a stretch of `source`, `closing`, and then one of the tokens `after`. The
    stretch begins at one of `starts` and ends at one of `ends`, both sorted, in bytes.
    """
    source: bytes
    starts: list[int]
    ends: list[int]
    after: set[int]
    opening: bytes = b""
    closing: bytes = b""

    def rests(self, written: bytes) -> set[bytes]:
        """What may follow `written`; b"" where the text is complete. Many stretches begin alike: each rest once."""
        rests: set[bytes] = set()
        possible = []
        for start in self.starts:
            reached = start + max(0, len(written) - len(self.opening))
            texts = [self.opening + self.source[start : reached + MOST_BYTES]]
            if texts[0] == written:     # nothing is left to copy
                texts = []
            # The stretch may have ended already: then some of the closing bytes have been written.
            first = bisect_right(self.ends, max(start, reached - len(self.closing) - 1))
            for end in self.ends[first : bisect_right(self.ends, reached + MOST_TAIL)]:
                texts.append(self.opening + self.source[start:end] + self.closing)
            found = [text[len(written):] for text in texts if text.startswith(written)]
            if found:
                possible.append(start)
                rests.update(found)
        self.starts = possible
        return rests


def whole(text: str, after: set[int], ends: Sequence[int] = ()) -> Copy:
    """A text, whole or up to one of these characters; after it any token if none is given."""
    return Copy(text.encode(), [0], [len(text[:end].encode()) for end in ends or [len(text)]], after)


def word_edges(text: str) -> tuple[list[int], list[int]]:
    """
    Where a stretch of whole words may start and end, as offsets into the text's UTF-8. It may start with the blank
    before a word. It may not end at a dot within a word: "re" is something else than "re.search", but "words.sort" may
    be looked up as "sort".
    """
    at_dots = {edge for dot in DOT_IN_WORD.finditer(text) for edge in dot.span()}
    starts, ends = [], []
    for unit in UNIT.finditer(text):
        start = len(text[: unit.start()].encode())
        starts.append(start)
        if unit[0] != " " and unit.end() not in at_dots:
            ends.append(start + len(unit[0].encode()))
    return starts, ends


@lru_cache(64)
def telling_edges(text: str) -> tuple[list[int], list[int]]:
    """The edges of the stretches that have all words of a text that tell what it is about, as `word_edges`."""
    data, telling = text.encode(), telling_words(text)

    def kept(stretches: Iterable[tuple[int, bytes]]) -> Iterator[int]:
        for edge, stretch in stretches:     # shorter and shorter
            left = telling_words(stretch.decode())
            if len(left) < len(telling):
                return
            # Others are left if "how long" has been cut: "long" alone tells something.
            if left == telling:
                yield edge

    starts, ends = word_edges(text)
    starts = kept((start, data[start:]) for start in starts)
    return list(starts), sorted(kept((end, data[:end]) for end in reversed(ends)))


@dataclass
class Copying:
    """What one answer may copy. `add` gets every token of the answer, including the tools' tokens."""
    vocabulary: Vocabulary
    questions: Sequence[str]            # what the user wrote
    stop: set[int]                      # the tokens that may end the answer
    plan: Plan = Plan()                 # of `Tools.plan`
    is_own: bool = False                # whether it is one's own library
    special: int | None = None          # the answer's last special token
    written: bytes = b""                # the answer since that token
    tool: str = ""                      # the last call's name, until its result has come,
    called: str = ""                    # and its text
    spells: int = 0                     # how many words have been spelled
    held: Sequence[Copy] = ()           # the answer is one of these if it begins like it,
    held_from: int = SENTENCE_BEGINS    # with so many bytes
    copy: Copy | None = None

    def __post_init__(self) -> None:
        self.must_call = self.plan.is_found
        if self.plan.answer and not self.plan.call:
            self.copy = whole(self.plan.answer, self.stop)

    def add(self, token: int) -> None:
        """Add the answer's next token."""
        vocabulary = self.vocabulary
        if vocabulary.is_special(token):
            self._after_special(token)
        else:
            self.written += vocabulary.bytes_of[token]
        if self.copy is None and self.special == vocabulary.python_start:
            self.copy = self._copy_of_question()
        if self.copy:
            self.must_call = False
        if self.held and self.copy is None and len(self.written) >= self.held_from:
            self.copy = next((copy for copy in self.held if copy.source.startswith(self.written)), None)

    @property
    def allowed(self) -> list[int] | None:
        """The tokens that may come next; None: all. Milliseconds at the beginning of a call with a long question."""
        if self.must_call and self.special is None:
            return [self.vocabulary.python_start]
        if self.must_call:
            rests = {opening[len(self.written):] for opening in OPENINGS if opening.startswith(self.written)}
        elif self.copy is None:
            return None
        else:
            rests = self.copy.rests(self.written)
        tokens = set().union(*map(self.vocabulary.beginnings, rests))
        if self.copy and b"" in rests:
            tokens |= self.copy.after
        if tokens and not self.written and self.special == self.vocabulary.output_end and not (
                self.is_own or self.plan.answer):
            tokens.add(self.vocabulary.python_start)    # instead of quoting, the model may look up something else
        return list(tokens) or None

    def allows(self, token: int) -> bool:
        """Whether this token may come next. Quick for one that goes on with the copied text, as most do."""
        if self.copy and not self.vocabulary.is_special(token):
            more = self.vocabulary.bytes_of[token]
            if len(more) <= MOST_BYTES and any(rest.startswith(more) for rest in self.copy.rests(self.written)):
                return True
        allowed = self.allowed
        return allowed is None or token in allowed

    def _after_special(self, token: int) -> None:
        """A call, its result or the answer begins or ends."""
        vocabulary, written = self.vocabulary, self.written.decode(errors="replace")
        self.special, self.written, self.copy, self.held = token, b"", None, ()
        if token == vocabulary.python_end:
            call = TOOL_CALL.fullmatch(written)
            # A line before the last one is the question that this goes on from.
            self.tool, self.called = (call[1], call[3].rpartition("\n")[2]) if call else ("", "")
        elif token == vocabulary.output_end and self.plan.answer:
            self.copy = whole(self.plan.answer, self.stop)
        elif token == vocabulary.output_end and not self.tool:
            self._hold(language.says["answer"].format(written) for language in LANGUAGES.values())
        elif token == vocabulary.output_end and self.tool in COPYING_CALLS:
            tool, self.tool = self.tool, ""
            if written == NOTHING:
                self._hold([refusal(self.called), *REFUSALS.values()])
            elif tool == "spell":
                self.spells += 1
                if self.spells == 1:    # after two words an answer may begin with either
                    self.held = [whole(written, set())]
                    self.held_from = len(written[:2].encode())
            else:
                # "It weighs 5 kg." belongs to the sentence before it.
                ends = [end for end in sentence_ends(written) if not (self.is_own and begins_back(written[end:]))]
                self.copy = whole(written, self.stop, ends)

    def _hold(self, texts: Iterable[str]) -> None:
        """The answer is one of these texts if it begins like it."""
        self.held, self.held_from = [whole(text, self.stop) for text in texts], SENTENCE_BEGINS

    def _copy_of_question(self) -> Copy | None:
        """The user's words, once a call's name has been written."""
        call = CALL_TEXT.match(self.written)
        if call is None:
            return None
        quote = call[2] or b'"'
        if self.plan.search and call[1].decode() in QUERIES:
            question = self.plan.search
            starts, ends = telling_edges(question)
        else:
            question = "\n".join(self.questions)[-MOST_QUESTION:].rstrip()
            starts, ends = word_edges(question)
        if not starts:
            return None
        opening = self.written[: call.start(2)] + quote
        return Copy(question.encode(), starts, ends, {self.vocabulary.python_end}, opening, quote + b")")
