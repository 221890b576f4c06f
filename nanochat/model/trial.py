"""Temporary: candidates for the recipe, chosen by the environment variable TRIAL, a list with commas."""
import os

CANDIDATES = ("resid", "backout", "gates", "qk", "rope", "adam", "muon", "schedule", "ramp", "apart")
chosen = [name for name in os.environ.get("TRIAL", "").split(",") if name]
if "all" in chosen:
    left_out = os.environ.get("TRIAL_WITHOUT", "").split(",")
    chosen = [name for name in CANDIDATES if name not in left_out]
assert set(chosen) <= set(CANDIDATES), chosen


def on(name: str) -> bool:
    assert name in CANDIDATES
    return name in chosen


BOS = int(os.environ.get("TRIAL_BOS", 8183))  # id of <|bos|> in a vocabulary of 8,192
