"""Schedules as pictures of their shape, and batch arithmetic by hand."""
from types import SimpleNamespace

import pytest

from nanochat.optim.recipe import choose_batch_size, choose_num_iterations, choose_recipe, decay_scale, rate_scale
from nanochat.optim.schedule import (
    accumulation_steps,
    apply_schedule,
    is_due,
    lr_multiplier,
    momentum_at,
    rows_at_a_time,
    warmdown_left,
)
from nanochat.runtime.errors import UserError


def test_learning_rate_rises_stays_falls_and_never_leaves_its_bounds():
    lrm = [lr_multiplier(step, 100, 0.4, 10, 0.05) for step in range(130)]
    assert lrm[0] == pytest.approx(0.1) and lrm[9] == 1 and lrm[60] == 1
    assert lrm[80] == pytest.approx(0.05 + 0.95 / 2) and lrm[99] == pytest.approx(0.05 + 0.95 / 40)
    assert all(a <= b for a, b in zip(lrm[:60], lrm[1:61])) and all(a >= b for a, b in zip(lrm[60:], lrm[61:]))
    assert lrm[100:] == [0.05] * 30, "past the end it stays, it does not turn negative"
    assert [lr_multiplier(step, 40, 0.4, 40) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1], "a short run's warmup"


def test_momentum_and_weight_decay():
    assert [momentum_at(step) for step in (0, 150, 10**6)] == pytest.approx([0.85, 0.9, 0.95])
    for step, left, momentum in ((0, 1, 0.85), (600, 1, 0.97), (800, 0.5, 0.935), (1100, 0, 0.9)):
        assert warmdown_left(step, 1000, 0.4) == pytest.approx(left)
        assert momentum_at(step, left, 0.97, 0.9) == pytest.approx(momentum)
    assert momentum_at(100, 1.0, 0.97, 0.9, 400) == pytest.approx(0.88)
    assert momentum_at(30, 0.5, 0.97, 0.9) == pytest.approx(0.862), "a short run falls only below where it has risen to"
    group = {"initial_lr": 2.0, "initial_weight_decay": 0.2, "momentum": 0.0}
    for step, decay in ((0, 0.2), (5, 0.1), (7.5, 0.1 * (1 - 0.5**0.5)), (11, 0)):  # a cosine
        apply_schedule([SimpleNamespace(kind="muon", param_groups=[group])], step, 10, 0.5, 0.9, 0.25)
        assert (group["lr"], group["weight_decay"], group["momentum"]) == (1, pytest.approx(decay), 0.9)
    group = {"initial_lr": 0.6, "window": (0.15, 0.75)}  # LookAhead's
    for step, distance in ((0, 0), (2, 0.3), (7, 0.3), (8, 0), (11, 0)):
        apply_schedule([SimpleNamespace(kind="look_ahead", param_groups=[group])], step, 10, 0.5, 0.9, 0.25)
        assert group["lr"] == distance
    group = {"initial_lr": 2.0}
    for adamw_lrm, lr in ((0.25, 0.5), (0.0, 0), (None, 1)):
        apply_schedule([SimpleNamespace(kind="adamw", param_groups=[group])], 0, 10, 0.5, 0.9, adamw_lrm)
        assert group["lr"] == lr


def test_settings_of_minus_one_follow_the_length_of_the_run_and_stay_when_it_is_resumed():
    names = ("embedding_lr", "unembedding_lr", "muon_momentum", "final_muon_momentum", "momentum_steps",
             "weight_decay", "warmup_steps", "warmdown_ratio", "adamw_warmdown_ratio", "final_lr_frac", "look_ahead")
    unset = dict.fromkeys(names, -1) | {"depth": 12}
    short = (0.2, 0.004, 0.95, 0.95, 300, 0, 0, 0.8, 0.4, 0, 0)
    long = (0.3, 0.008, 0.97, 0.9, 400, 0.205, 40, 0.65, 0.65, 0.05, 0.3)
    assert choose_recipe(unset, 999) == short and choose_recipe(unset, 1000) == long
    assert choose_recipe(unset | {"depth": 11}, 5000) == short
    chosen = choose_recipe(unset | {"warmup_steps": 0}, 5000)
    assert chosen == (*long[:6], 0, *long[7:]), "0 is a setting"
    for given, ratios in (({"warmdown_ratio": 0.4}, (0.4, 0.4)), ({"adamw_warmdown_ratio": 0.1}, (0.65, 0.1)),
                          ({"warmdown_ratio": 0.4, "adamw_warmdown_ratio": 0}, (0.4, 0))):
        resumed = choose_recipe(unset | given, 400, chosen._asdict())
        assert resumed == (*chosen[:7], *ratios, *chosen[9:]), "one ratio is for all rates"
    old = chosen._asdict() | {"warmdown_ratio": 0.5}
    del old["adamw_warmdown_ratio"]
    assert choose_recipe(unset, 5000, old) == (*chosen[:7], 0.5, 0.5, *chosen[9:]), "a run that began with one warmdown"
    del old["look_ahead"]
    assert choose_recipe(unset, 5000, old) == (*chosen[:7], 0.5, 0.5, 0.05, 0), "a run that began without it"


def test_rates_follow_the_batch_and_decay_keeps_what_it_leaves_of_early_weights():
    reference = 1.2e9 / 2**19  # steps
    assert rate_scale(2**19) == 1 and decay_scale(1, reference) == 1, "the settings are for this point"
    assert [rate_scale(2**n) for n in (21, 17, 13)] == pytest.approx([2, 1 / 2, 1 / 2])
    assert decay_scale(1 / 2, 8 * reference) == pytest.approx(1 / 4), "rate times decay times steps stay"


def test_what_is_due_every_so_many_steps_is_due_at_the_end():
    assert [step for step in range(8) if is_due(step, 7, 3)] == [0, 3, 6, 7]
    assert not any(is_due(step, 7, -1) for step in range(8))


def test_accumulation_divides_or_names_what_would():
    assert accumulation_steps(524288, 8, 2048, 1) == 32
    with pytest.raises(UserError, match=r"=5000 .* 4 \* 512 \* 2 = 4096; try total_batch_size=4096 or 8192"):
        accumulation_steps(5000, 4, 512, 2)
    with pytest.raises(UserError, match=r"try total_batch_size=8192, or device_batch_size=2"):
        accumulation_steps(2048, 8, 512, 2)
    assert [accumulation_steps(524288, 16, 2048, ranks, uneven=True) for ranks in (1, 3, 4, 24)] == [16, 6, 4, 1]


def test_ranks_that_do_not_divide_a_step_still_take_several_rows():
    assert [rows_at_a_time(256, ranks, 16) for ranks in (1, 8, 32, 7, 6, 5, 3, 300)] == [16, 16, 8, 8, 4, 8, 8, 1]
    assert [rows_at_a_time(rows, 2, 8) for rows in (2, 6, 40)] == [1, 3, 5]


def test_steps_from_the_horizon():
    assert choose_num_iterations(7, 1e6, 10) == 7
    assert choose_num_iterations(-1, 1_000_400, 1000) == 1000
    with pytest.raises(UserError, match="less than one step"):
        choose_num_iterations(-1, 1.0, 1000)


def test_batch_size_grows_with_the_horizon_and_is_always_valid():
    assert choose_batch_size(-1, 1.2e9, 2048) == 2**19
    beyond = [choose_batch_size(-1, 1.2e9 * 2 ** (n / 0.383), unit) for n, unit in ((1, 64), (2, 64), (2, 2**21))]
    assert beyond == [2**20, 2**20, 2**21], "at most 2^20, unless every rank has a micro-batch already"
    assert choose_batch_size(-1, 1e3, 4096 * 3) == 4096 * 3
    assert choose_batch_size(round(1.2e9 / 2**19), -5.0, 2048) == 2**19, "the same point reached by steps"
