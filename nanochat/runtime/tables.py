"""Markdown tables for reports, the planner and measurements."""
from collections.abc import Sequence


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]], words: Sequence[int] = (0,)) -> str:
    """words: indices of the columns with text, aligned left; all others have numbers, aligned right."""
    rules = ["---" if i in words else "---:" for i in range(len(columns))]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [columns, rules, *rows])


def cell(value: float | int | str) -> str:
    """A value as a table shows it: four significant digits of a float, and no exponent where digits can be read."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{float(f'{value:.4g}'):,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
    one_line = " ".join(str(value).split())
    return one_line.replace("|", "\\|")
