"""
Passages of a note: Markdown (with what Obsidian and Notion add), reStructuredText or plain text.

A passage has as many sentences of a paragraph as fit into 300 characters. Passages of their own are: lines that end
without a period and were not wrapped, items, rows of tables with their columns' names, and keys of the front matter.
A short block of code belongs to the passage before it.
"""
import html
import re
from collections.abc import Iterator
from itertools import zip_longest
from textwrap import dedent
from typing import Any

import yaml

from nanochat.data.sentences import sentence_ends
from nanochat.library.markup import named_cells
from nanochat.library.retrieval import RECORD
from nanochat.library.words import UNSPACED

LONGEST = 300  # characters of a passage, and of its code: longer code is left out
LIST = 200     # characters of a passage that a list's items join
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

# ---- Blocks
FRONT = re.compile(r"(?m)\A--- *\n([\s\S]*?)^(?:---|\.\.\.) *$")
YAML = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # values stay as they are written: dates, "no", 0664
NAMES = re.compile(r"(?i)title|alias(?:es)?|tags?")  # keys whose values are names of the note
# What is hidden, and tables; neither in code. ~~~~ is no code, but underlines a heading of reStructuredText.
SOURCE = re.compile(r"""(?mx)
    (?P<code>^[ \t]*(?P<fence>`{3,}+(?=[^`\n]*$)|~~~(?!~))[\s\S]*?(?:^[ \t]*(?P=fence)|\Z) | `[^`\n]*`)
    | <!--[\s\S]*?(?:-->|\Z)
    | ^[ \t]*(?:[*+-][ \t]+)?%%[\s\S]*?(?:%%|\Z)                 # Obsidian's private text: blocks,
    | (?<!\S)%%(?:.|\n(?![ \t]*\n))*?%%                          # within a paragraph
    | ^(?P<table>(?=.*\|).*\n(?=.*\|)(?=.*-)[ \t|:+-]+(?:\n(?=.*\|).*)*)$
    """)
BLOCK = re.compile(r"""(?mx)
    ^[ ]{0,3}(?P<marks>\#+)[ \t]+(?P<heading>.*)
    | ^(?![*+•-][ \t])(?P<underlined>\S.*)\n(?P<underline>[=~^-])(?P=underline){2,}[ \t]*$
    | ^(?:(?P<paragraph>(?:
        # Neither a blank line or a rule, nor a heading, nor code.
        (?![ \t\xa0\u3000*_+|:=~^-]*$ | [ ]{0,3}\#+[ \t] | [ \t]*(?:`{3,}+(?=[^`\n]*$)|~~~(?!~)))
        .+(?:\n|\Z))++)(?:[ \t]*\n){0,3})?
      (?:[ \t]*(?P<fence>`{3,}+(?=[^`\n]*$)|~~~)(?P<language>.*)\n(?P<code>[\s\S]*?)(?:^[ \t]*(?P=fence)|\Z))?
    """)
QUERIES = re.compile(r"\s*(?:dataview|tasks|query|mermaid)")  # code that Obsidian shows the result of
LEVELS = " =-~^"  # what underlines a heading of level 1, 2, …

# ---- Lines
QUOTE = re.compile(r"(?m)^(?: {0,3}>(?: |$))+")
ITEM = re.compile(r"\A[ \t]*(?:(?:[*+•|-][ \t]+)+|(?=\d{1,3}[.)][ \t]))")  # a number stays: "14. März" is a date
# What begins a line of its own if the line before began so, too: a key or speaker, or in logs and chats a time or date.
KEY = re.compile(r"[*_]*\w[^:/\n]{0,30}:[:*_]*(?:\s|$)|\s*\[?(?:\d\d?:\d\d|\d{1,4}([./-])\d\d?\1(?:\d{2,4})?)\b")
# A text that goes on in the next line, however long it is: a callout's title, and what ends with these marks.
GOES_ON = re.compile(r"""\A\[!|[.!?…:,;।。！？、，][*_"'”’»)\]」』]*$""")
NARROW = 36  # columns; narrower lines are not wrapped text, but lists, addresses, poems
BROAD = 60  # columns; a paragraph with a line of so many may be wrapped, else a second one must be nearly as long
WIDE = re.compile(f"[{UNSPACED}]")  # characters of two columns

# Marks, and as their last group what stays of them.
MARK = re.compile(r"""(?msx)(?=[\[!*_=~<&^`\\\s:])(?:
    (?<!`)(?P<ticks>`{1,5})(?!`)(?P<code>.{1,500}?)(?<!`)(?P=ticks)(?!`)
    | \\(?P<escaped>[!-/:-@\[\]^-`{-~])
    | (?P<entity>&(?:\#\w{1,7}|\w{2,31});)
    | (?P<gap></?(?:blockquote|br|center|details|div|h[1-6]|hr|img|li|ol|p|picture|pre|section|source|summary|table
        |tbody|td|th|thead|tr|ul|video)(?=[\s/>])[^<>]{0,500}>)
    | </?(?:a|abbr|b|code|del|em|font|i|ins|kbd|mark|s|small|span|strong|sub|sup|u)(?:\s[^<>=]{1,99}=[^<>]{1,500})?>
    | (?:^|(?<=\d[.)][ ]))\[(?:[ xX/-]|![\w|-]+)\][+-]?(?:[ \t]+|$)          # a task's box, a callout's kind
    | !\[\[[^\[\]]{1,300}\]\]                                               # an embedded file
    | \[\[(?![ \[])(?:[^\[\]|]{1,300}\|)?([^\[\]|]{1,300})\]\]              # a link between notes
    | \[\[[^\[\]]{1,500}\]\[([^\[\]]{1,300})\]\]                            # Org's link
    | \[\^\w{1,40}\]:?                                                      # a footnote's mark
    | !?\[((?:[^\[\]]|\[[^\[\]]{0,100}\]){0,200})\]\([^()]{0,500}(?:\([^()]{0,200}\)[^()]{0,200})?\)
    | (?<![A-Za-z0-9_\])])\[([^\[\]]{1,200})\]\[[^\[\]]{0,200}\]
    | ~~(?=[^\s~])[^~]{1,300}~~                                             # what is struck out holds no more
    | (?<![\d*])(?P<bold>\*{2,3})(?=[^\s*])(.{1,300}?)(?<=\S)(?P=bold)(?![\d*])
    | (?<![A-Za-z0-9*])\*(?=[^\s*.])([^*]{1,300})(?<!\s)\*(?![A-Za-z0-9*])  # not *.py
    | (?<![A-Za-z0-9=])==(?=[^\s=])(.{1,300}?)(?<=[^\s=])==(?![A-Za-z0-9=])
    | (?<!\w)_(?=[^\s_])([^_]{1,300})(?<!\s)_(?!\w)                         # not snake_case, not __init__
    | (?<!\w)__(?=[^\s_])([^_]{1,300}\s[^_]{1,300})__(?!\w)
    | [ \t]\#+[ \t]*$ | ^\#+[ \t]+                                         # at a heading's end; of one in a quotation
    | (?:^|[ \t])\^[\w-]{4,}[ \t]*$                                         # a block's name
    | (?<=\w:):(?=[ \t])                                                    # Dataview's key:: value
    )""")


def text_passages(
    text: str, title: str, line_end: str = "\n", has_marks: bool = True,
) -> Iterator[tuple[str, str, int, str]]:
    """
    (title, passage, line, context) of a text; those of its front matter come last, as a note's first passage should say
    what it is about. The title is the heading above, or else the file's; the context is what else a passage is found
    by: all headings above, the items that one belongs to, and the names of the note. has_marks: Markdown's.
    """
    names, facts, text = front_matter(CONTROL.sub(" ", text.replace("\r\n", "\n")), title)
    heading = title
    headings: list[str] = []
    above: list[tuple[int, str]] = []  # (indent, text): the items that the next belongs to, what a colon introduces
    if has_marks:
        text = SOURCE.sub(visible, text)
    passages: list[list[Any]] = []
    line = 1
    position = 0
    for block in BLOCK.finditer(text):
        line += text.count("\n", position, block.start())
        position = block.start()
        if block["marks"] or block["underline"]:
            heading = plain(block["heading"] or block["underlined"])[:200] or heading
            level = len(block["marks"] or "") or LEVELS.index(block["underline"])
            headings += [""] * level
            headings[level - 1 :] = [heading]
            above = []
            continue
        at = line
        for part in unwrapped(block["paragraph"] or ""):
            item = ITEM.sub("", part)
            indent = len(part) - len(part.lstrip()) if ITEM.match(part) else -1
            item = plain(item) if has_marks else spaced(item)
            item = item.replace("\n", line_end)
            above = [one for one in above if one[0] < indent]
            context = " ".join([names, *headings, *(text for _, text in above)])
            # The first items of a list belong to the line that introduces it: "Bring: a tent; two lamps".
            lead = above[-1][1] if above else ""
            begun = passages[-1][1] if lead.endswith(":") and not part.lstrip().startswith("|") else ""
            if begun.startswith(lead) and 0 < len(begun) < LIST - len(item):
                passages[-1][1] += f" {item}" if begun[-1] in ":.,;!?" else f"; {item}"
            else:
                passages += [[heading, passage, at, context] for passage, at in split_paragraph(item, at)]
            if indent >= 0 or item.endswith(":"):
                above.append((indent, item))
            at += 1 + part.count("\n")
        code = dedent(block["code"] or "").strip("\n")
        if code and len(code) <= LONGEST and not QUERIES.match(block["language"]):
            if not block["paragraph"] or not passages:
                passages.append([heading, heading, line, " ".join([names, *headings])])
            passages[-1][1] += f"\n```\n{code}\n```"
    yield from map(tuple, passages)
    for passage, at in facts:
        yield title, passage, at, names


# ---- Blocks

def front_matter(text: str, names: str) -> tuple[str, list[tuple[str, int]], str]:
    """The note's names, its other keys as [("key: value", line)], and the text with empty lines in their place."""
    facts = []
    front = FRONT.match(text)
    if front:
        try:
            if re.search(r"(?m)(?:^|[:,\[-])\s*&\w", front[1]):
                raise ValueError("references, which can make it endless")
            for key, value in yaml.load(front[1], YAML).items():
                value = flat(value)
                if NAMES.fullmatch(key):
                    names += f" {value}"
                elif value:
                    # A key in quotation marks is not found: its line is the first.
                    line = 1 + front[0].count("\n", 0, 1 + front[0].find(f"\n{key}"))
                    facts += split_paragraph(f"{key}: {value}", line)
            text = "\n" * front[0].count("\n") + text[front.end():]
        except (yaml.YAMLError, ValueError, AttributeError, RecursionError):
            # It is broken, or only text between two rules.
            pass
    return names, facts, text


def flat(value: Any) -> str:
    """A value of the front matter on one line."""
    if isinstance(value, dict):
        value = [f"{key}: {flat(inner)}" for key, inner in value.items()]
    if isinstance(value, list):
        return ", ".join(map(flat, value))
    return " ".join(plain(str(value)).split())


def visible(found: re.Match[str]) -> str:
    """Code as it is, a table with an item for each row, and nothing of what is hidden; with as many lines."""
    if found["code"]:
        return found[0]
    if not found["table"]:
        return "\n" * found[0].count("\n")
    columns, _, *rows = [re.split(r"\s*(?<!\\)\|\s*", row.strip().removeprefix("|")) for row in found[0].split("\n")]
    lines = ["", ""]
    for row in rows:
        named = named_cells(zip_longest(columns, row, fillvalue=""))
        lines.append(f"| {named.rstrip('.')}." if named else "")
    return "\n".join(lines)


# ---- Lines

def unwrapped(paragraph: str) -> list[str]:
    """A paragraph's lines, without the marks of quotations; lines that were only wrapped are one text."""
    lines = QUOTE.sub("", paragraph).removesuffix("\n").split("\n")
    *_, second, widest = 0, *sorted(map(width, lines))
    if widest < BROAD and second < 0.8 * widest:
        widest = 0
    texts = [lines[0]]
    for line in lines[1:]:
        if is_wrapped(texts[-1], line, widest):
            texts[-1] += f"\n{line}"
        else:
            texts.append(line)
    return texts


def is_wrapped(text: str, line: str, widest: int) -> bool:
    """Whether a text goes on in the next line, as its last line had no room for that line's first word."""
    last, words = text.rpartition("\n")[2], line.split()
    if not words or ITEM.match(line) or RECORD.match(text) or KEY.match(text) and KEY.match(line):
        return False
    if GOES_ON.search(last) or words[0][0].islower() or ITEM.match(text) and line[0].isspace():
        return True
    return widest >= NARROW and width(last) + width(words[0]) > 0.8 * widest


def width(line: str) -> int:
    """Columns on a screen."""
    return len(line) + len(WIDE.findall(line))


def plain(text: str) -> str:
    """The text without marks; its lines stay."""
    return spaced(MARK.sub(unmarked, text))


def spaced(text: str) -> str:
    """The text with single blanks and without empty lines."""
    return re.sub(r" ?\n[ \n]*", "\n", re.sub(r"[^\S\n]+", " ", text)).strip()


def unmarked(mark: re.Match[str]) -> str:
    """What stays of a mark; marks within it go too, except in code."""
    if mark["gap"]:
        return " "
    if mark["entity"]:
        return html.unescape(mark[0])
    verbatim = mark["code"] or mark["escaped"]
    if verbatim or not mark.lastindex:
        return verbatim or ""
    return MARK.sub(unmarked, mark[mark.lastindex])


def split_paragraph(paragraph: str, line: int) -> Iterator[tuple[str, int]]:
    """(passage, line): the rest of a paragraph if that is short, else whole sentences, words, characters."""
    start = 0
    while start < len(paragraph):
        # Two characters more show whether a sentence ends there.
        text = paragraph[start : start + LONGEST + 2]
        ends = [end for end in sentence_ends(text) if end <= LONGEST]
        end = max(ends, default=0) or max(0, text.rfind(" ", 0, LONGEST + 1)) or LONGEST
        yield text[:end], line
        line += text.count("\n", 0, end + 1)
        start += end + text[end : end + 1].isspace()
