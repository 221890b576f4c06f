"""
Reinforcement learning: the model answers, right answers are made likelier.

    python -m scripts.chat_rl --task=arithmetic:hard
    torchrun --nproc_per_node=8 -m scripts.chat_rl --task=gsm8k

Policy gradient in the simplest form that works, GRPO (Shao et al. 2024, arXiv:2402.03300) with less around it: several
samples of each problem; the advantage of a sample is its reward minus the mean of its problem's samples; one update
for each batch of samples, so they are always the model's own and nothing needs to be clipped; every sampled token
counts the same (Yu et al. 2025, arXiv:2503.14476).
"""
import math
from functools import partial
from typing import Literal

from configurator import configure  # first: it checks the command line before torch is imported

import torch

from nanochat.data.conversation_loader import order
from nanochat.data.padding import padded_batch, padded_length
from nanochat.eval.task_eval import evaluate_task, pass_at, seed_with
from nanochat.inference.sampling import SamplingParams
from nanochat.optim.schedule import apply_schedule, is_due, lr_multiplier, momentum_at
from nanochat.runtime.distributed import StopRequest, after_first_step, compute_cleanup, gather_objects, print0, set_up
from nanochat.runtime.errors import UserError
from nanochat.runtime.flops import peak_flops
from nanochat.tasks import make_task, without_parts
from nanochat.training.checkpoint import say_how_to_talk, step_dir
from nanochat.training.finetuning import begin_stage, require_same_data
from nanochat.training.metrics import Metrics, peak_memory, require_wandb
from nanochat.training.report import settings_table, write_section
from nanochat.training.rollouts import Rollout, describe_change, rollout_stats, sample_rollouts
from nanochat.training.saving import CheckpointWriter

# ---- Run
run = ""                    # name of the wandb run; empty: no wandb
overwrite = False           # remove the checkpoints that stand in the way of this run
seed = 0                    # [0..] of the order of problems, and of the samples
dry_run = False             # roll out the first step's problems, show samples and rewards, and end without training
# ---- Device
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of parameters and activations; auto: bfloat16 where it is fast
compile = True              # compile the blocks and the loss
deterministic = False       # the same bits each time on a GPU, too; slower
activation_checkpointing = False  # recompute each block in the backward pass: less memory, a third more work
# ---- Model
source: Literal["base", "mid", "sft"] = "sft"  # stage of the model to begin with
model_tag: str | None = None  # folder of its checkpoints, and of those made here; None: the only one there is
source_step: int | None = None  # of the checkpoint to begin with; None: the newest valid one
# ---- Problems
task = "arithmetic:hard"    # what is practised: a task whose answers can be checked, such as gsm8k
num_epochs = 1              # [1..] how often each problem is practised
num_iterations = -1         # [-1, 1..] optimizer steps; -1: as many as the epochs have
examples_per_step = 16      # [1..] problems per optimizer step, over all ranks
num_samples = 16            # [2..] samples of each problem; they are compared with each other
max_new_tokens = 256        # [1..] tokens of a sample
temperature = 1.0           # [>0] of the samples; with anything but 1 they come from another policy than is trained
top_k = 0                   # [0..] sample from the k likeliest tokens only; with anything but 0, all, likewise
# ---- Batch
device_batch_size = 8       # [1..] samples per rank and micro-step; halve it when memory runs out
sampling_batch_size = 64    # [1..] samples that a rank generates at a time
# ---- Sharding over the ranks
zero_stage: Literal[0, 1, 2, 3] = 2  # a rank keeps 1/N of 1: optimizer state, 2: and gradients, 3: and parameters
shard_size = -1             # [-1, 1..] ranks N that share one copy; groups of so many are replicas; -1: all ranks
# ---- Optimizers
embedding_lr = 0.2          # [0..] AdamW, for a model 768 wide
unembedding_lr = 0.004      # [0..] AdamW, for a model 768 wide
matrix_lr = 0.02            # [0..] Muon
init_lr_frac = 0.05         # [0..1] part of these rates to begin with
weight_decay = 0.0          # [0..] of Muon's matrices; falls linearly to zero
grad_clip = 0.0             # [-1, 0..] largest norm of the averaged gradient; 0 or -1: no limit
warmdown_ratio = 1.0        # [0..1] part of the run, at its end, in which the learning rate falls
final_lr_frac = 0.0         # [0..1] what is left of it at the end
max_bad_steps = 10          # [1..] stop after so many steps in a row without a finite loss and gradient
# ---- Evaluation and logging
eval_every = 60             # [-1..] steps between evaluations, also before the first step and after the last; -1: never
eval_examples = 400         # [1..] held-out problems of an evaluation
eval_samples = 8            # [1..] samples of each: pass@1 is their mean, pass@k whether one of them is right
# ---- Checkpoints
save_every = 60             # [-1..] steps between checkpoints, also after the last step; -1: only then, and by time
save_minutes = 30.0         # [-1..] minutes between further checkpoints, of which the newest two are kept; -1: none
keep_last = -1              # [-1, 1..] checkpoints kept; -1: all
resume: Literal["", "auto"] = ""  # auto: continue from the newest valid checkpoint, or start if there is none
resume_from_step = -1       # continue from this step's checkpoint; -1: do not
config = configure(globals())

# ---- Setup
require_wandb(run)
rank, world_size, device, model_dtype, compiling = set_up(device_type, dtype, compile, deterministic)
problems, held_out = make_task(task, "train"), make_task(without_parts(task), "test")
if problems.eval_type != "generative":
    raise UserError(f"task={task} is not answered by writing; expected one such as gsm8k, arithmetic or spellingbee")

# ---- The model of the stage before, or an interrupted run of this script
model, tokenizer, sharding, optimizers, start = begin_stage("rl", config, device, model_dtype, compiling)
checkpoints, origin, data, start_step, meta = start  # meta: of the interrupted run that goes on, or None

# ---- Problems: which ones each step takes
schedule = [index for epoch in range(num_epochs) for index in order(len(problems), seed, epoch)]
all_steps = math.ceil(len(schedule) / examples_per_step)
num_iterations = all_steps if num_iterations == -1 else min(num_iterations, all_steps)
data_state = {"origin": origin, "task": task, "problems": len(problems), "seed": seed,
              "examples_per_step": examples_per_step, "eval_examples": eval_examples, "eval_samples": eval_samples}
require_same_data(meta, data_state)
print0(f"{num_iterations:,} steps of {examples_per_step} problems x {num_samples} samples, on {world_size} rank(s)")
rows_per_micro_step = device_batch_size * world_size

sampling = SamplingParams(max_new_tokens, temperature, top_k, seed=seed)


def rollouts_of(step: int) -> list[Rollout]:
    """This rank's answers to its problems of a step."""
    of_step = schedule[step * examples_per_step : (step + 1) * examples_per_step]
    whole_model = sharding.gather_model()  # on stage 3 its parameters are gathered for this
    return sample_rollouts(problems, of_step[rank::world_size], whole_model, tokenizer, num_samples,
                           seed_with(sampling, step), sampling_batch_size)


if dry_run:
    for rollout in rollouts_of(step=0):
        text = tokenizer.decode(rollout.ids)
        print0(f"--- reward {rollout.reward:g}, advantage {rollout.advantage:+.2f}\n{text}")
    compute_cleanup()
    raise SystemExit

before = meta["before"] if meta else None  # which held-out samples were right when the run began
saver = CheckpointWriter(checkpoints, sharding, optimizers, tokenizer, start_step, keep_last, save_minutes, overwrite)
metrics = Metrics(checkpoints, run, config, start_step, num_iterations, 0, model.estimate_flops(),
                  peak_flops(device, model_dtype), meta["metrics_state"] if meta else None)

step, stop = start_step, StopRequest()
while True:
    last_step, due = step >= num_iterations, partial(is_due, step, num_iterations)  # due(every): every so many steps
    stopping = metrics.stop_requested  # all ranks have read the same sum: some rank was sent SIGTERM, SIGINT or SIGHUP
    if metrics.bad_steps >= max_bad_steps:
        saver.give_up(f"loss or gradient not finite in {max_bad_steps} steps in a row, up to step {step}")

    # --- checkpoint of the parameters before this step; first, so that no evaluation can cost a run
    saver.stand_by(step, metrics, dict(config=config, num_iterations=num_iterations, tokenizer=tokenizer.fingerprint,
                                       data=data, data_state=data_state, before=before))
    saver.checkpoint(asked_for=last_step or stopping or due(save_every))  # or since save_minutes are over
    if stopping:
        break
    if due(eval_every):
        with metrics.paused(), metrics.stoppable():
            whole_model = sharding.gather_model()
            correct = evaluate_task(held_out, whole_model, tokenizer, sampling_batch_size, eval_examples, sampling,
                                    eval_samples)
            del whole_model
            before = correct if step == 0 else before
            passed = {f"pass@{k}": pass_at(correct, k) for k in sorted({1, eval_samples})}
            metrics.log(step, {f"eval/{name}": value for name, value in passed.items()})
            print0(f"step {step:05d}/{num_iterations:05d} | held-out {held_out.name}: "
                   + ", ".join(f"{name} {value:.1%}" for name, value in passed.items()))
    if metrics.stop_requested:  # in an evaluation, which all ranks have left
        continue
    if last_step:
        break

    # --- samples: each rank answers its problems of this step, and gets the answers of all. Where a problem's answers
    # are rewarded alike there is no advantage, so no gradient: only the others are trained on. They are dealt out anew,
    # the longest first: little padding, and no rank waits for another.
    with metrics.stoppable():
        rollouts = [rollout for of_rank in gather_objects(rollouts_of(step)) for rollout in of_rank]
    if metrics.stop_requested:
        continue
    trained_on = sorted((r for r in rollouts if r.advantage), key=lambda r: len(r.ids), reverse=True)
    micro_steps = max(math.ceil(len(trained_on) / rows_per_micro_step), 1)  # a pass of empty rows, if there are none

    # --- one optimizer step, as in base_train: -sum of advantage * log p over the sampled tokens of all ranks, which
    # reduce_and_clip divides by their number
    step_loss = torch.zeros((), device=device)
    for micro_step in range(micro_steps):
        of_ranks = trained_on[micro_step * rows_per_micro_step :][:rows_per_micro_step]
        batch = [(r.ids, r.weights()) for r in of_ranks[rank * device_batch_size :][:device_batch_size]]
        batch += [([], [])] * (device_batch_size - len(batch))
        length = padded_length(len(of_ranks[0].ids) if of_ranks else 0, model.config.sequence_len, device)
        inputs, targets, weights = padded_batch(batch, length, device)
        with sharding.accumulate(last=micro_step == micro_steps - 1):
            loss = model(inputs, targets, reduction="sum", weights=weights)
            loss.backward()
        step_loss += loss.detach()

    sampled_tokens = sum(sum(r.sampled) for r in rollouts) / world_size  # whose sum over the ranks is that of all
    stats = sharding.reduce_and_clip(step_loss, sampled_tokens, grad_clip, stop.asked, saver.time_is_up())
    metrics.flush()  # reads the numbers of the step before
    lrm = lr_multiplier(step, num_iterations, 0, warmdown_ratio, final_lr_frac)  # without a warmup
    apply_schedule(optimizers, step, num_iterations, lrm, momentum_at(step))
    saver.begin_update()  # from here to `stand_by` no parameters can be saved: they are half updated
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()  # frees the gradients, too: there is no zero_grad
    rewards = rollout_stats(rollouts)
    metrics.log_step(step, stats, lrm, sum(len(r.ids) for r in trained_on))  # its time is that of sampling and training
    metrics.log(step, rewards)
    print0(f"step {step:05d}/{num_iterations:05d} | reward {rewards['rl/reward']:.3f} | "
           f"{rewards['rl/tokens']:.1f} tokens an answer | {rewards['rl/trained_on']:.0%} trained on")
    if step == start_step:
        after_first_step(*sharding.groups())  # all have compiled: shorter timeouts from here
    step += 1

# ---- End
saver.wait()
metrics.close()
if stopping:
    stop.end(step)
else:
    body = settings_table(config)
    results = {"training minutes": metrics.state["elapsed"] / 60, "peak memory, GiB": peak_memory()}
    if eval_every > 0 and before:
        change = describe_change(before, correct)
        print0(f"held-out {held_out.name}: {change}")
        body = f"Held-out {held_out.name}: {change}.\n\n{body}"
        results |= {f"pass@1 of {held_out.name}, {when}": f"{pass_at(found, 1):.1%}"
                    for when, found in (("before", before), ("after", correct))}
    write_section("chat_rl", "Reinforcement learning", body, {"rl": results}, metrics.path, data=data,
                  model_tag=checkpoints.name, checkpoint=step_dir(checkpoints, step))
    say_how_to_talk(checkpoints)
compute_cleanup(stop)
