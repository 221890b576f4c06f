"""
The words of a text as a library compares them, in any language.

    stems("Für getElementById")                  ["fur", "get", "eleme", "by", "id"]
    stems("京都の天気")                           ["京都", "京", "都", "の", "天気", "天", "気"]
    telling_words("How do I list directories?")  ["list", "directories"]
    stems("Heizungskeller", {"kelle"})           ["heizu", "kelle"]

Case, width and accents are ignored. A word is cut after five letters, so the language need not be known; on manual
pages in six languages this finds more than endings by language or Snowball's stemmers (docs/tried.md). A compound is
found by its beginning, and by a known word that it ends in. In scripts without blanks each pair of characters is a
word, and so is each Chinese character.
"""
import re
import unicodedata
from collections import defaultdict
from collections.abc import Container, Iterable
from functools import lru_cache

from nanochat.runtime.files import read_toml

LETTERS = 5
# Scripts without blanks between words; and Korean, whose particles are joined to their words.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
# Fewest letters of a compound: German compounds are long, and "password" has nothing to do with passing words.
COMPOUND = 10
PART = 4  # fewest letters of each part
HIRAGANA = "\u3041-\u309f"
MARKS = "".join(mark for mark in map(chr, range(0x300, 0x3100)) if unicodedata.category(mark).startswith("M"))
# Accents of Latin, Greek and Cyrillic letters, vowels of Hebrew and Arabic: questions are often typed without them.
OPTIONAL = re.compile("[\u0300-\u036f\u0591-\u05c7\u064b-\u0652]")
# In Japanese the script changes where a word ends.
WORD = re.compile(rf"[^\W_{UNSPACED}](?:[^\W_{UNSPACED}]|[{MARKS}])*"
                  rf"|[{HIRAGANA}]+|[\u30a0-\u30ff]+|[\u3005\u3400-\u9fff]+|[{UNSPACED}{MARKS}]+")
CHARACTER = re.compile(rf".[{MARKS}]*")
SEAM = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=\d)(?i:st|nd|rd|th)\b")  # getElementById; the 4th
DATE = re.compile(r"\b\d{4}-(0[1-9]|1[0-2])-(\d\d)\b")
# stopped -> stop, partitions -> part. Roughly: what counts is that questions and passages get the same stems.
SUFFIX = re.compile(r"(?<=\w{3})(?:(?<=([bdgmnprt]))\1(?:ing|ed|er)s?|ies|y|(?:at|it)?(?:ion|or|ive)(?:e?s)?|ings?|ed"
                    r"|e?s|ers?|ly|ments?|e)$")
# Endings of short words in Cyrillic and Greek: ключа, ключи -> ключ. Removing Latin ones would harm English.
VOWELS = re.compile("(?<=...)[аеиоуыэюяьαειου]+$")


def normal_form(text: str) -> str:
    """One form for texts that differ only in case, half or full width, composition, or optional marks."""
    if text.isascii():
        return text.lower()
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text).casefold())
    return unicodedata.normalize("NFC", OPTIONAL.sub("", text))


def words(text: str) -> list[str]:
    return WORD.findall(separated(text))


def with_dates(text: str) -> str:
    """Behind each date its day and month as people say them: "2026-03-04" -> "2026-03-04 4 March März …"."""
    return DATE.sub(lambda date: f"{date[0]} {int(date[2])} {MONTHS[int(date[1]) - 1]}", text)


def separated(text: str) -> str:
    return normal_form(SEAM.sub(" ", text))


def stems(text: str, known: Container[str] = ()) -> list[str]:
    """The stems of a text's words in their order; of a compound also the known stem of its longest ending."""
    found = []
    for word in words(text):
        if not re.match(f"[{UNSPACED}]", word):
            found.append(stem(word))
            if len(word) >= COMPOUND:
                endings = (stem(word[start:]) for start in range(PART, len(word) - PART + 1))
                found += [ending for ending in endings if ending in known][:1]
            continue
        characters = CHARACTER.findall(word)
        found += map("".join, zip(characters, characters[1:]))
        if len(characters) == 1 or "\u3400" <= word < "\ua000":
            found += characters
    return found


@lru_cache(1 << 16)
def stem(word: str) -> str:
    if re.search(r"\d", word):
        return word
    return VOWELS.sub("", SUFFIX.sub("", word)[:LETTERS])


def telling_words(question: str) -> list[str]:
    """The words, or parts of a text without blanks, that say what a question is about. Hiragana rarely does."""
    found = []
    for word in WORD.findall(ASKING.sub(" ", separated(question))):
        for part in PHRASES.split(word):
            if part and part not in STOP_WORDS and not re.fullmatch(f"[{HIRAGANA}]+", part):
                found.append(part)
    return found


def is_small_talk(message: str) -> bool:
    """Whether a message is a greeting, thanks, a question about the model itself or the like, and nothing besides."""
    text = normal_form(message)
    rest = TALK.sub(" ", text)
    if YOU.search(text):
        rest = ABOUT_YOU.sub(" ", YOU.sub(" ", rest))
    return rest != text and not telling_words(rest)


def refers_back(question: str) -> bool:
    """Whether a question goes on from the one before: "How old is she?", "And the rear tyre?"."""
    return bool(PRONOUN.search(normal_form(question))) or begins_back(question)


def begins_back(sentence: str) -> bool:
    """Whether a sentence or question begins with a word that needs the one before it: "And the rear tyre?"."""
    return bool(BEGINNING.match(normal_form(sentence)))


def common_stems(question: str) -> frozenset[str]:
    """The stems of common words that stand alone: "time" in "time.mkdir" is part of a name."""
    return COMMON_STEMS.intersection(stem(word.strip(".,:;!?")) for word in normal_form(question).split())


def listed(text: str) -> list[str]:
    """The words and phrases that stand between commas."""
    return [" ".join(phrase.split()) for phrase in normal_form(text).split(",") if phrase.strip()]


def any_of(phrases: Iterable[str]) -> str:
    """An expression for any of these words and phrases, the longest first. Those with the same edges share them."""
    alike = defaultdict(list)
    for phrase in sorted(phrases, key=len, reverse=True):
        alike[edged("{}", phrase)].append(re.escape(phrase))
    return "|".join(edges.format(f"(?:{'|'.join(expressions)})") for edges, expressions in alike.items())


def edged(expression: str, text: str) -> str:
    """An expression for this text, but not within a word. In scripts without blanks words have no edges."""
    letter = rf"[^\W{UNSPACED}]"
    before = f"(?<!{letter})" if text[0] < UNSPACED[0] else ""
    after = f"(?!{letter})" if text[-1] < UNSPACED[0] else ""
    return before + expression + after


def listed_under(key: str) -> str:
    """An expression for the words and phrases that languages.toml lists under a key."""
    return any_of(listed(",".join(data[key] for data in LANGUAGES.values())))


LANGUAGES = read_toml("library/languages.toml")
MONTHS = LANGUAGES.pop("months")
STOP_WORDS = frozenset(normal_form(" ".join(data["stop"] for data in LANGUAGES.values())).split())
GERMAN = frozenset(normal_form(LANGUAGES["de"]["only"]).split())
# Chinese stop words are cut out of their text; the longest first.
PHRASES = re.compile(any_of(word for word in STOP_WORDS if word >= UNSPACED[0]))
COMMON_STEMS = frozenset(stems(" ".join(data.get("common", "") for data in LANGUAGES.values())))
ASKING, PRONOUN, LINK, TALK, YOU, ABOUT_YOU = (
    re.compile(listed_under(key)) for key in ("ask", "pronouns", "links", "talk", "you", "about_you"))
BEGINNING = re.compile(rf"\W*(?:{PRONOUN.pattern}|{LINK.pattern})")
