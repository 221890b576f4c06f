"""
What a pretraining run decides before its first step: horizon, batch, recipe, rates, micro-steps. Its checkpoints keep
batch, recipe and rates for a resumed run; the number of steps is computed again from the settings of the call.
"""
import math
from typing import NamedTuple

from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import LARGE_DEPTH
from nanochat.optim.schedule import Rates, lr_multiplier, warmdown_left
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError

# The batch grows as tokens^0.383 with the tokens to train on: half a million tokens for 1.2 billion (a depth-12 model
# on ten tokens per parameter). Exponent: Bergsma et al. 2025, arXiv:2505.13738. The scripts' rates are for that
# point.
REFERENCE_BATCH = 2**19
REFERENCE_TOKENS = 1.2e9
BATCH_EXPONENT = 0.383
# The largest batch that is known to pay: with 2^21, which the rule gives from depth 32 on, a model of depth 34 needed
# four to six times the tokens of one of depth 24 for the same loss (nanochat, pull request 851).
LARGEST_BATCH = 2**20


class Recipe(NamedTuple):
    """
    Values of pretraining that depend on its steps and layers; the defaults are a short run's. Some are settings of
    scripts/base_train.py; the others are changed here.
    """

    embedding_lr: float = 0.2
    unembedding_lr: float = 0.004
    muon_momentum: float = 0.95         # after its rise
    final_muon_momentum: float = 0.95   # at the end of the warmdown
    momentum_steps: int = 300           # over which it rises from 0.85
    weight_decay: float = 0.0
    warmup_steps: int = 0
    warmdown_ratio: float = 0.8
    adamw_warmdown_ratio: float = 0.4   # the same for AdamW's rates alone
    final_lr_frac: float = 0.0          # learning rate at the end, as a share of the highest
    ema_nesterov: float = 0.0           # in mid-run, each step adds this factor times the mean update; 0: none
    final_average: float = 0.0          # share of EMA-Nesterov's average in the weights after the last step

    def at(self, step: int, num_iterations: int, scale: float = 1.0) -> Rates:
        """The rates of a step. scale: multiplies both learning rates."""
        muon, adamw = (scale * lr_multiplier(step, num_iterations, ratio, self.warmup_steps, self.final_lr_frac)
                       for ratio in (self.warmdown_ratio, self.adamw_warmdown_ratio))
        done = step / num_iterations
        # EMA-Nesterov moves the weights ahead in mid-run only: early moves say little about later ones, and in the
        # warmdown the weights come to rest. Steps 500 to 2,400 of 3,150 in modded-nanogpt's pull request 308, 300 to
        # 1,950 of 2,900 in 309.
        ahead = muon if 0.15 <= done < 0.75 else 0.0
        # Muon's momentum rises: early gradients turn too fast to be averaged for long. In the warmdown it falls: late
        # steps are small beside the average.
        peak, final = self.muon_momentum, self.final_muon_momentum
        rise = 0.85 + (peak - 0.85) * min(step / self.momentum_steps, 1.0)
        fall = final + (peak - final) * warmdown_left(step, num_iterations, self.warmdown_ratio)
        # Its weight decay falls to zero on a cosine.
        decay = (1 + math.cos(math.pi * min(done, 1.0))) / 2
        return Rates(muon, adamw, ahead, min(rise, fall), decay)


# A long run of a large model has nanochat's recipe of 2026, for GPUs. Its decay of 0.28 is for 0.88 billion tokens; at
# REFERENCE_TOKENS 0.205 is as strong. Other runs have values tuned on a CPU: in fewer than about 1,000 steps the
# warmdown would begin before momentum has risen, and with 4 layers the head's rate was too high.
LONG = 1000  # steps
LONG_RUN = Recipe(
    embedding_lr=0.3, unembedding_lr=0.008, muon_momentum=0.97, final_muon_momentum=0.9, momentum_steps=400,
    weight_decay=0.205, warmup_steps=40, warmdown_ratio=0.65, adamw_warmdown_ratio=0.65, final_lr_frac=0.05,
    ema_nesterov=0.3, final_average=0.5)


def choose_recipe(settings: dict, depth: int, num_iterations: int, before: dict | None = None) -> Recipe:
    """
    The settings that are not -1. The others come from the run that is resumed (`before`), or are chosen for this number
    of steps and layers.
    """
    recipe = Recipe()
    if num_iterations >= LONG and depth >= LARGE_DEPTH:
        recipe = LONG_RUN
    if settings["begin_from"] and depth >= LARGE_DEPTH:
        # AdamW restarts from zero, and its first steps disturb trained stream scales, which large models have.
        recipe = recipe._replace(warmup_steps=LONG_RUN.warmup_steps)
    if before:
        # Older runs had one warmdown, or EMA-Nesterov under another name; version 0.1.0 had none. None was blended.
        older = {"adamw_warmdown_ratio": before["warmdown_ratio"], "ema_nesterov": before.get("look_ahead", 0.0),
                 "final_average": 0.0}
        recipe = Recipe(**{name: (older | before)[name] for name in Recipe._fields})
    given = {name: settings[name] for name in Recipe._fields if settings.get(name, -1) != -1}
    if "warmdown_ratio" in given:  # for AdamW as well
        given["adamw_warmdown_ratio"] = given["warmdown_ratio"]
    return recipe._replace(**given)


def choose(
    settings: dict, model: GPT, tokens_at_once: int, meta: dict | None
) -> tuple[int, int, Recipe, float, float]:
    """
    Decide for a run with these settings of scripts/base_train.py, and print what the settings leave open. Returns
    tokens of an optimizer step over all ranks, optimizer steps, recipe, the factor of all learning rates, the factor of
    Muon's weight decay.

    tokens_at_once: tokens of a micro-step over all ranks; a chosen batch is a multiple of it.
    meta: of the checkpoint to resume from. Its decisions stay, unless a setting says otherwise.
    """
    # 1. Horizon: tokens to train on, unless num_iterations gives the steps. Eight tokens a parameter is less than the
    #    twenty of Hoffmann et al. 2022, arXiv:2203.15556: nanochat found 8 to 12 best with Muon, over the parameters of
    #    matrices and head, as here. Not measured here on a GPU.
    horizon = settings["target_param_data_ratio"] * model.count_parameters("matrix", "head")
    if settings["target_flops"] > 0:
        horizon = settings["target_flops"] / model.estimate_flops()
    num_iterations = settings["num_iterations"]

    # 2. Batch: by the rule above, unless it is given.
    total_batch_size = settings["total_batch_size"]
    is_chosen = total_batch_size == -1
    if is_chosen:
        total_batch_size = choose_batch_size(num_iterations, horizon, tokens_at_once)
        if meta:
            total_batch_size = meta["total_batch_size"]

    # 3. Steps: horizon and batch give their number, which gives the recipe.
    if num_iterations == -1:
        num_iterations = round(horizon / total_batch_size)
    if num_iterations < 1:
        raise UserError(f"the horizon is less than one step of total_batch_size={total_batch_size} tokens; lower that, "
                        "or set num_iterations, target_flops or target_param_data_ratio")
    recipe = choose_recipe(settings, model.config.n_layer, num_iterations, meta and meta["config"])
    print0("recipe: " + ", ".join(f"{name} {value:g}" for name, value in recipe._asdict().items()))

    # 4. Rates: a chosen batch scales all rates; batch and horizon scale the decay. A given batch leaves the rates as
    #    they are set.
    rate_factor, decay_factor = 1.0, 1.0
    if meta:
        rate_factor, decay_factor = meta["rate_scales"]
    else:
        if is_chosen:
            rate_factor = rate_scale(total_batch_size)
        if recipe.weight_decay and (is_chosen or settings["weight_decay"] == -1):
            decay_factor = decay_scale(rate_factor, num_iterations)
    if rate_factor != 1 or decay_factor != 1:
        print0(f"rates: all x {rate_factor:.4g} for this batch; "
               f"weight decay x {decay_factor:.4g} for batch and horizon")
    return total_batch_size, num_iterations, recipe, rate_factor, decay_factor


def rate_scale(batch: int) -> float:
    """
    The factor of learning rates for a batch. It grows as √batch, but is at least one half: runs on small batches are
    short, and learn little at small rates.
    """
    return max((batch / REFERENCE_BATCH) ** 0.5, 0.5)


def decay_scale(lr_scale: float, num_iterations: int) -> float:
    """
    The factor of weight decay. Decay · rate · steps, which determines how much of early weights is left, stays as at
    the reference: Wang & Aitchison 2024, arXiv:2405.13698.
    """
    return REFERENCE_TOKENS / REFERENCE_BATCH / (lr_scale * num_iterations)


def choose_batch_size(num_iterations: int, horizon: float, tokens_at_once: int) -> int:
    """
    Tokens per optimizer step for a horizon in steps or, if that is not positive, in tokens: the power of two nearest to
    the rule above, at most LARGEST_BATCH, but at least one micro-batch on every rank (tokens_at_once) and a multiple of
    it.
    """
    # Tokens are steps · batch: solve batch = reference · (steps · batch / reference tokens)^e for batch.
    if num_iterations > 0:
        batch = (REFERENCE_BATCH * (num_iterations / REFERENCE_TOKENS) ** BATCH_EXPONENT) ** (1 / (1 - BATCH_EXPONENT))
    else:
        batch = REFERENCE_BATCH * (max(horizon, 1) / REFERENCE_TOKENS) ** BATCH_EXPONENT
    batch = min(2 ** round(math.log2(batch)), LARGEST_BATCH)
    return max(round(batch / tokens_at_once), 1) * tokens_at_once


# ---- Micro-steps


def rows_at_a_time(rows: int, ranks: int, most: int, pipeline_stages: int = 1) -> int:
    """
    Rows per rank and micro-step, at most `most`, for steps of `rows`. To keep micro-steps large, up to a tenth of a
    step's places may stay empty if the ranks do not divide it. A pipeline has no empty places, and at least as many
    micro-batches as stages. ranks: pipelines, if there are several stages.
    """
    for size in range(most, 1, -1):
        micro_steps = math.ceil(rows / (ranks * size))
        places = ranks * size * micro_steps
        if pipeline_stages > 1:
            if rows == places and micro_steps >= pipeline_stages:
                return size
        elif rows % size == 0 and rows >= 0.9 * places:
            return size
    return 1


def accumulation_steps(
    total_batch_size: int, device_batch_size: int, max_seq_len: int, ranks: int, pipeline_stages: int = 1
) -> int:
    """
    Micro-steps per optimizer step on each rank. If the ranks do not divide the micro-batches, some ranks have no rows
    in the last micro-step; not so in a pipeline, which needs a micro-batch for each stage. UserError for a batch that
    does not divide, or is too small. ranks: pipelines, if there are several stages.
    """
    pipelines = ranks if pipeline_stages > 1 else 1
    unit = device_batch_size * max_seq_len * pipelines
    least = pipeline_stages * unit
    if total_batch_size >= least and total_batch_size % unit == 0:
        return math.ceil(total_batch_size / (device_batch_size * max_seq_len * ranks))
    nearest = max(total_batch_size // unit * unit, least)
    raise UserError(f"total_batch_size={total_batch_size} is not a multiple of {unit} = device_batch_size "
                    f"{device_batch_size} x max_seq_len {max_seq_len} x {pipelines} pipeline(s), from {least} on; try "
                    f"total_batch_size={nearest} or a smaller device_batch_size")
