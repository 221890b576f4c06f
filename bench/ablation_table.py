"""What pairs of runs say: the change against a baseline, its standard error, and the change at equal time."""
import math
import statistics
from typing import NamedTuple

Pairs = dict[str, list[tuple[float, float]]]  # of each corpus: (baseline, candidate) of each seed


class Change(NamedTuple):
    mean: float   # candidate − baseline
    error: float  # standard error of the mean; NaN from a single seed


def change(pairs: Pairs) -> Change:
    """
    Mean over the corpora of the mean paired difference over seeds. The corpora are a choice, not a sample: only the
    spread over seeds within each counts as error.
    """
    means, squares = [], []
    for of_corpus in pairs.values():
        differences = [candidate - baseline for baseline, candidate in of_corpus]
        means.append(statistics.fmean(differences))
        several = len(differences) > 1
        squares.append(statistics.variance(differences) / len(differences) if several else math.nan)
    return Change(statistics.fmean(means), math.sqrt(sum(squares)) / len(squares))


def slope(lengths: Pairs, part: float) -> float:
    """d bits per byte / d ln(tokens) of a baseline, from (bits per byte at that part of the tokens, at all of them)."""
    return change(lengths).mean / -math.log(part)


def at_equal_time(change: Change, slope: float, ratio: float) -> Change:
    """
    Computed, not trained: in the baseline's time a candidate whose steps take `ratio` times as long sees 1/ratio of the
    tokens, and the baseline's slope says what these are worth. The slope's own error is left out.
    """
    return Change(change.mean - slope * math.log(ratio), change.error)


def verdict(change: Change) -> str:
    """The rule for adoption: a difference counts outside two standard errors."""
    if math.isnan(change.error):
        return "one seed"
    return "no difference" if abs(change.mean) <= 2 * change.error else "better" if change.mean < 0 else "worse"


def shown(change: Change) -> str:
    error = "?" if math.isnan(change.error) else f"{change.error:.4f}"
    return f"{change.mean:+.4f} ± {error}"
