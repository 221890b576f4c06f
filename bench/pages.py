"""The measured part of a page of docs/: Markdown tables, put where the page says that a command makes them."""
from pathlib import Path

from nanochat.errors import UserError
from nanochat.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
END = "<!-- end of what it made -->"


def put_into_page(page: str, command: str, text: str) -> None:
    """
    Replace what stands in docs/<page> between `<!-- made by: <command> -->` and the end mark that follows it.
    UserError when the page has no such marks.
    """
    path, begin = DOCS / page, f"<!-- made by: {command} -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise UserError(f"{path} has no {begin} with {END} after it; put both where the tables shall stand")
    write_text(path, f"{before}{begin}\n\n{text}\n\n{END}{after}")
