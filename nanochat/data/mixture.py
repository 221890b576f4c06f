"""A run's data sets and their shares of its tokens, from `--data`: "notes", or "climbmix*0.9, notes*0.1"."""
import math

from nanochat.runtime.errors import UserError


def data_shares(data: str) -> dict[str, float]:
    """
    {data set: its share of the tokens} in the order of the setting; the shares add up to 1. Weights are relative; a
    missing weight is 1. UserError for an invalid setting.
    """
    weights: dict[str, float] = {}
    for part in data.split(","):
        name, star, weight = (piece.strip() for piece in part.partition("*"))
        try:
            number = float(weight) if star else 1.0
        except ValueError:
            number = math.nan
        if not name or name in weights or not 0 < number < math.inf:
            raise UserError(f"data={data!r}: {part.strip()!r} is not expected there; expected data sets, each once, "
                            'with positive weights: "climbmix*0.9, notes*0.1"')
        weights[name] = number
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def main_data(data: str) -> str:
    """The first data set: the run uses its tokenizer and its validation split."""
    return next(iter(data_shares(data)))
