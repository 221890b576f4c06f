"""reStructuredText, Org and HTML as Markdown, and tables as text, for a library."""
import re
from collections.abc import Iterable
from typing import Any

INLINE = "a|abbr|b|code|del|em|font|i|ins|kbd|mark|s|small|span|strong|sub|sup|td|th"  # passages.py knows these
# What is found, and what it becomes, in this order.
RULES: dict[str, dict[str, Any]] = {
    "rst": {
        # A comment, but no directive, target or footnote; with its lines.
        r"^\.\.(?![ \t]*(?:[\w:-]+::|_|\[|\|)).*(?:\n[ \t]+\S.*)*": lambda comment: "\n" * comment[0].count("\n"),
    },
    "org": {
        r"(?i)^[ \t]*#\+(?:begin|end)_comment.*": "%%",
        r"^[ \t]*# .*": "",
        r"(?i)^#\+title:": "#",
        r"^\*+(?= )": lambda stars: "#" + "#" * len(stars[0]),
        r"(?i)^[ \t]*#\+(?:begin|end)_(?:src|example).*": "```",
        r"(?i)^[ \t]*(?:#\+|:(?:properties|logbook|end):).*": "",
        r"^[ \t]*:([\w-]+):[ \t]+": r"\1: ",    # a property
    },
    "html": {
        r"\s+": " ",
        r"(?i)<head\b.*?(?:<title[^>]*>(.*?)</title>.*?)?</head>": r"\n# \1\n",
        r"(?i)<(nav|script|style|svg)\b.*?</\1>": " ",
        r"(?i)</th> ?</tr>": " |\n|-|-|",
        r"(?i)</tr>|</?t(?:body|foot|head)\b[^>]*>": "",
        r"(?i)</t[dh]>": " |",
        r"(?i)<tr\b[^>]*>": "\n|",
        r"(?i)<li\b[^>]*>": "\n- ",
        r"(?i)<h([1-6])\b[^>]*>": lambda heading: "\n\n#" + "#" * int(heading[1]) + " ",
        rf"(?i)<[/!]?(?!(?:{INLINE})\b)[a-z][^<>]*>": "\n\n",
    },
}


def markdown(text: str, kind: str) -> str:
    """The text of a file of this kind as Markdown. Lines stay where they are, except those of HTML."""
    for pattern, replacement in RULES.get(kind, {}).items():
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def named_cells(cells: Iterable[tuple[str, str]]) -> str:
    """A table's row with its columns' names: "name: Paolo, role: plumber"; empty cells are left out."""
    return ", ".join(f"{name}: {cell}" if name else cell for name, cell in cells if cell)
