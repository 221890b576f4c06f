"""Schedules as pictures of their shape, and batch arithmetic by hand."""
from types import SimpleNamespace

import pytest

from nanochat.optim.recipe import (
    LONG_RUN,
    Recipe,
    accumulation_steps,
    choose_batch_size,
    choose_recipe,
    decay_scale,
    rate_scale,
    rows_at_a_time,
)
from nanochat.optim.schedule import Rates, lr_multiplier, set_rates
from nanochat.runtime.errors import UserError


def test_learning_rate():
    lrm = [lr_multiplier(step, 100, 0.4, 10, 0.05) for step in range(130)]
    assert lrm[0] == pytest.approx(0.1) and lrm[9] == 1 and lrm[60] == 1
    assert lrm[80] == pytest.approx(0.05 + 0.95 / 2) and lrm[99] == pytest.approx(0.05 + 0.95 / 40)
    assert lrm[100:] == [0.05] * 30, "past the end it stays, it does not turn negative"
    short = [lr_multiplier(step, 40, 0.4, 40, 0.0) for step in range(5)]
    assert short == [0.25, 0.5, 0.75, 1, 1], "a short run's warmup"


def test_momentum_weight_decay_and_ema_nesterov():
    recipe = Recipe(muon_momentum=0.97, final_muon_momentum=0.9, warmdown_ratio=0.4)
    for step, momentum in ((0, 0.85), (150, 0.91), (600, 0.97), (800, 0.935), (1100, 0.9)):
        assert recipe.at(step, 1000).momentum == pytest.approx(momentum)
    assert recipe._replace(momentum_steps=400).at(100, 1000).momentum == pytest.approx(0.88)
    assert [recipe.at(step, 10).decay for step in (0, 5, 11)] == pytest.approx([1, 0.5, 0])
    distances = [recipe.at(step, 10, scale=0.5).ema_nesterov for step in (0, 2, 7, 8, 11)]
    assert distances == pytest.approx([0, 0.5, 0.375, 0, 0]), "it falls with the rate, and is there in mid-run only"


def test_rates_of_each_optimizer():
    groups = {kind: {"initial_lr": 2.0, "initial_weight_decay": 0.2} for kind in ("muon", "adamw", "ema_nesterov")}
    optimizers = [SimpleNamespace(kind=kind, param_groups=[group]) for kind, group in groups.items()]
    set_rates(optimizers, Rates(muon=0.5, adamw=0.25, ema_nesterov=0.3, momentum=0.9, decay=0.1))
    assert [group["lr"] for group in groups.values()] == [1, 0.5, 0.6]
    assert groups["muon"]["momentum"] == 0.9 and groups["muon"]["weight_decay"] == pytest.approx(0.02)


def test_a_recipe_has_two_warmdowns():
    recipe = Recipe(warmup_steps=10, warmdown_ratio=0.8, adamw_warmdown_ratio=0.4, final_lr_frac=0.2)
    for step, rates in {0: (0.1, 0.1), 200: (1, 1), 800: (0.4, 0.6)}.items():
        assert recipe.at(step, 1000)[:2] == pytest.approx(rates)
        assert recipe.at(step, 1000, scale=0.5)[:2] == pytest.approx([rate / 2 for rate in rates])


def test_recipe_follows_the_length_of_the_run_and_stays_when_it_is_resumed():
    unset = {"embedding_lr": -1, "unembedding_lr": -1, "weight_decay": -1, "warmup_steps": -1, "warmdown_ratio": -1,
             "begin_from": ""}
    assert choose_recipe(unset, 12, 999) == Recipe() == choose_recipe(unset, 11, 5000)
    assert choose_recipe(unset, 12, 1000) == LONG_RUN
    chosen = choose_recipe(unset | {"warmup_steps": 0}, 12, 5000)
    assert chosen == LONG_RUN._replace(warmup_steps=0), "0 is a setting"
    resumed = choose_recipe(unset | {"warmdown_ratio": 0.4}, 12, 400, chosen._asdict())
    assert resumed == chosen._replace(warmdown_ratio=0.4, adamw_warmdown_ratio=0.4), "one ratio is for all rates"


def test_recipe_of_an_older_checkpoint():
    unset = {"begin_from": ""}
    old = LONG_RUN._asdict()
    old["look_ahead"] = old.pop("ema_nesterov")
    assert choose_recipe(unset, 12, 5000, old) == LONG_RUN
    del old["look_ahead"], old["adamw_warmdown_ratio"], old["final_average"]
    expected = LONG_RUN._replace(ema_nesterov=0.0, final_average=0.0, adamw_warmdown_ratio=LONG_RUN.warmdown_ratio)
    assert choose_recipe(unset, 12, 5000, old) == expected, "version 0.1.0 had one warmdown, and did not look ahead"


def test_rates_follow_the_batch_and_decay_keeps_what_it_leaves_of_early_weights():
    reference = 1.2e9 / 2**19  # steps
    assert rate_scale(2**19) == 1 and decay_scale(1, reference) == 1, "the settings are for this point"
    assert [rate_scale(2**n) for n in (21, 17, 13)] == pytest.approx([2, 1 / 2, 1 / 2])
    assert decay_scale(1 / 2, 8 * reference) == pytest.approx(1 / 4), "rate times decay times steps stay"


def test_accumulation_steps():
    assert [accumulation_steps(524288, 16, 2048, ranks) for ranks in (1, 3, 4, 24)] == [16, 6, 4, 1]
    with pytest.raises(UserError, match="=5000 is not a multiple of 2048.* try total_batch_size=4096 "):
        accumulation_steps(5000, 4, 512, 2)


def test_rows_at_a_time():
    assert [rows_at_a_time(256, ranks, 16) for ranks in (1, 8, 32, 7, 6, 5, 3, 300)] == [16, 16, 8, 8, 4, 8, 8, 1]
    assert [rows_at_a_time(rows, 2, 8) for rows in (2, 6, 40)] == [1, 3, 5]


def test_batch_from_the_horizon():
    assert choose_batch_size(-1, 1.2e9, 2048) == 2**19
    beyond = [choose_batch_size(-1, 1.2e9 * 2 ** (n / 0.383), unit) for n, unit in ((1, 64), (2, 64), (2, 2**21))]
    assert beyond == [2**20, 2**20, 2**21], "at most 2^20, unless every rank has a micro-batch already"
    assert choose_batch_size(-1, 1e3, 4096 * 3) == 4096 * 3
    assert choose_batch_size(round(1.2e9 / 2**19), -5.0, 2048) == 2**19, "the same point reached by steps"
