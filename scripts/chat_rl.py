"""
Reinforcement learning: sample answers and reinforce the right ones.

    torchrun --nproc_per_node=8 -m scripts.chat_rl --task=gsm8k
"""
from typing import Literal

from configurator import configure

# ---- Run
run = ""                    # name of the wandb run; empty: no wandb
overwrite = False           # remove old checkpoints: all, or when resuming, those of later steps
seed = 0                    # [0..] decides the order of problems and the samples
# ---- Device
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best available
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # parameters and activations; auto: bfloat16 where it is fast
compile = True              # compile the blocks and the loss
activation_checkpointing = False  # recompute each block in the backward pass: less memory, a third more work
# ---- Model
source: Literal["base", "mid", "sft"] = "sft"  # stage of the model to start from
model_tag: str | None = None  # folder of its checkpoints, and of those made here; None: the only one there is
source_step: int | None = None  # step of its checkpoint to start from; None: the newest valid one
# ---- Problems
task = "arithmetic:hard"    # a task whose answers can be checked, such as gsm8k
num_epochs = 1              # [1..] how often each problem is practised
num_iterations = -1         # [-1, 1..] optimizer steps; -1: as many as the epochs take
examples_per_step = 16      # [1..] problems per optimizer step, over all ranks
num_samples = 16            # [2..] samples of each problem; they are compared with each other
max_new_tokens = 512        # [1..] tokens of a sample
# ---- Batch
sampling_batch_size = 64    # [1..] samples that a rank generates at a time; halve it when memory runs out
device_batch_size = 8       # [1..] samples per rank and micro-step; halve it when memory runs out
# ---- Sharding over the ranks
zero_stage: Literal[0, 1, 2, 3] = 2  # sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters
# ---- Optimizers
embedding_lr = 0.2          # [0..] AdamW, for a model 768 wide
unembedding_lr = 0.004      # [0..] AdamW, for a model 768 wide
matrix_lr = 0.02            # [0..] Muon
init_lr_frac = 0.05         # [0..1] factor of these rates at the start
warmdown_ratio = 1.0        # [0..1] share of the run, at its end, over which the learning rate falls
# ---- Evaluation and logging
eval_every = 60             # [-1..] steps between evaluations, also before the first step and after the last; -1: never
eval_examples = 400         # [1..] held-out problems per evaluation
eval_samples = 8            # [1..] samples of each: pass@1 is their mean; pass@k: is one of them right?
# ---- Checkpoints
save_every = 60             # [-1..] steps between checkpoints, besides one each half hour and at the end; -1: no others
keep_last = -1              # [-1, 1..] checkpoints to keep; -1: all, but only the newest two half-hourly ones
resume: Literal["", "auto"] = ""  # auto: continue from the newest valid checkpoint, or start if there is none
config = configure(globals())

# ---- Task: a mistyped one, or a file that is missing, is answered here, before torch is imported
from nanochat.runtime.errors import UserError
from nanochat.tasks import make_task, without_parts

problems = make_task(task, "train")
held_out = make_task(without_parts(task), "test")
if problems.eval_type != "generative":
    raise UserError(f"task={task} is not answered by writing; expected one such as gsm8k, arithmetic or spellingbee")

import itertools
import math

import torch

from nanochat.data.batch_shape import BatchShape, chunks
from nanochat.data.conversation_loader import epoch_order
from nanochat.data.padding import padded_batch, padded_length
from nanochat.eval.task_eval import evaluate_task, pass_at, sample_answers, seed_with
from nanochat.inference.sampling import SamplingParams
from nanochat.optim.recipe import Recipe
from nanochat.optim.schedule import is_due, set_rates
from nanochat.runtime.collectives import all_reduce_sum, gather_objects
from nanochat.runtime.console import print0
from nanochat.runtime.distributed import set_up
from nanochat.training.finetuning import load_training, require_same_data
from nanochat.training.records import read_metrics
from nanochat.training.rollouts import rollout_stats, sample_rollouts
from nanochat.training.session import Session
from nanochat.training.starting import find_start

# ---- Setup: the model of the previous stage, or an interrupted run of this script
rank, world_size, device, model_dtype = set_up(device_type, dtype)
start = find_start("rl", source, config)
model, tokenizer, sharding, optimizers = load_training(start, config, device, model_dtype)
recipe = Recipe(warmdown_ratio=warmdown_ratio, adamw_warmdown_ratio=warmdown_ratio)

# ---- Problems: which ones each step takes
numbers = [number for epoch in range(num_epochs) for number in epoch_order(len(problems), seed, epoch)]
steps = chunks(numbers, examples_per_step)
num_iterations = len(steps) if num_iterations == -1 else min(num_iterations, len(steps))
data_state = {"origin": start.origin, "task": task, "problems": len(problems), "seed": seed,
              "examples_per_step": examples_per_step, "eval_examples": eval_examples, "eval_samples": eval_samples}
require_same_data(start, data_state)
print0(f"{num_iterations:,} steps of {examples_per_step} problems x {num_samples} samples, on {world_size} rank(s)")
shape = BatchShape(device_batch_size, model.config.sequence_len, rank, world_size, device)

# At temperature 1, from all tokens: samples of any other policy would need importance weights
sampling = SamplingParams(max_new_tokens, temperature=1.0, top_k=0, seed=seed)

session = Session(start, config, sharding, optimizers, tokenizer, num_iterations,
                  data=start.meta.get("data"), data_state=data_state)
metrics = session.metrics

while True:
    step = session.step

    # --- checkpoint of the parameters before this step; first, because an evaluation may fail
    session.save_if_due(num_iterations=num_iterations)
    if metrics.stop_requested:  # some rank got SIGTERM, SIGINT or SIGHUP; all ranks know
        break

    # --- evaluation of the same parameters
    if is_due(step, num_iterations, eval_every):
        with session.evaluation():
            whole_model = sharding.gather_model()  # ZeRO's stage 3 gathers its parameters for this
            right, _ = evaluate_task(held_out, whole_model, tokenizer, sampling_batch_size, eval_examples, sampling,
                                     eval_samples)
            samples = sample_answers(held_out, whole_model, tokenizer)
            del whole_model
            passed = {f"pass@{k}": pass_at(right, k) for k in sorted({1, eval_samples})}
            metrics.log(step, {f"eval/{name}": value for name, value in passed.items()} | {"sample": samples},
                        f"held-out {held_out.name}: "
                        + ", ".join(f"{name} {value:.1%}" for name, value in passed.items()))
        # One step, which changes nothing if its problems are not solved either, so this stage has a checkpoint.
        if step == 0 and not any(map(any, right)):
            num_iterations = session.num_iterations = metrics.num_iterations = 1
            print0("no sample is right, so there is nothing to reinforce: the run ends after its first step")
    if metrics.stop_requested:  # during the evaluation; all ranks have left it
        continue
    if step >= num_iterations:
        break

    # --- samples: each rank answers its problems of this step, then gets all ranks' answers. If all answers to a
    # problem get the same reward, their advantages and gradients are zero, so they are not trained on
    with metrics.stoppable():
        whole_model = sharding.gather_model()
        answers = sample_rollouts(problems, steps[step][rank::world_size], whole_model, tokenizer, num_samples,
                                  seed_with(sampling, step), sampling_batch_size)
        del whole_model
        rollouts = list(itertools.chain.from_iterable(gather_objects(answers)))
    if metrics.stop_requested:
        continue
    trained_on = [rollout for rollout in rollouts if rollout.advantage != 0]
    # Distribute them again, longest first: little padding, and no rank waits for another.
    trained_on.sort(key=lambda rollout: len(rollout.ids), reverse=True)
    micro_steps = shape.micro_steps(trained_on)

    # --- one optimizer step, as in base_train: the simplest policy gradient that works, reduced GRPO (Shao et al. 2024,
    # arXiv:2402.03300). A sample's advantage is its reward minus the mean reward of its problem's samples. The loss is
    # -sum of advantage * log p over all ranks' sampled tokens; reduce_and_clip divides it by their number, so every
    # token counts the same (Yu et al. 2025, arXiv:2503.14476). Each batch of samples gets one update: it is on-policy,
    # so nothing is clipped
    step_loss = torch.zeros((), device=device)
    off = torch.zeros(2, device=device)  # sum of |trainer's log p - sampler's log p|, and number of tokens
    step_tokens = 0
    for number, of_all_ranks in enumerate(micro_steps, 1):
        own = shape.of_this_rank(of_all_ranks)
        rows = [(rollout.ids, rollout.weights()) for rollout in own]
        longest = len(of_all_ranks[0].ids) if of_all_ranks else 0
        length = padded_length(longest, shape.max_seq_len, device)
        inputs, targets, weights = padded_batch(rows, device_batch_size, length, device)
        sampler = [(rollout.ids, rollout.logprobs) for rollout in own]
        _, _, logprobs = padded_batch(sampler, device_batch_size, length, device)
        weights.requires_grad_()  # their gradients are the tokens' -log p
        with sharding.accumulate(last=number == len(micro_steps)):
            loss = model(inputs, targets, reduction="sum", weights=weights)
            loss.backward()
        step_loss += loss.detach()
        step_tokens += targets.numel() * world_size  # padding counts, as in chat_sft
        trained = weights.detach() != 0
        off += torch.stack([((weights.grad + logprobs).abs() * trained).sum(), trained.sum()])

    # Every rank knows all rollouts. Each gives 1/N of the count, so the sum over ranks is their number of tokens.
    sampled_tokens = sum(sum(rollout.sampled) for rollout in rollouts) / world_size
    stats = sharding.reduce_and_clip(step_loss, sampled_tokens, requests=session.requests())
    rewards = rollout_stats(rollouts)
    # Neither optimizer depends on the gradient's scale. Fewer answers make it noisier, so the rate is smaller.
    rates = recipe.at(step, num_iterations, scale=math.sqrt(rewards["rl/trained_on"]))
    set_rates(optimizers, rates)
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()  # also frees the gradients: there is no zero_grad
    session.end_step(stats, rates.muon, step_tokens)
    all_reduce_sum(off)
    rewards["rl/sampler_off"] = float(off[0] / off[1].clamp(min=1))
    metrics.log(step, rewards, f"reward {rewards['rl/reward']:.3f} | {rewards['rl/tokens']:.1f} tokens an answer | "
                f"{rewards['rl/trained_on']:.0%} trained on, {rewards['rl/cut']:.0%} cut | "
                f"sampler off by {rewards['rl/sampler_off']:.1e} nats a token")

# ---- End
session.end()
results = metrics.results()
evaluated = [record["eval/pass@1"] for record in read_metrics(metrics.path) if "eval/pass@1" in record]
if evaluated:  # of the whole run, also of processes before this one
    results[f"pass@1 of {held_out.name}, before"] = f"{evaluated[0]:.1%}"
    results[f"pass@1 of {held_out.name}, after"] = f"{evaluated[-1]:.1%}"
session.report("Reinforcement learning", results)
