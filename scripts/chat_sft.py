"""
Supervised fine-tuning: conversations one by one, as they will be met in a chat.

    python -m scripts.chat_sft
    torchrun --nproc_per_node=8 -m scripts.chat_sft --tasks="arc:ARC-Easy, arc:ARC-Challenge, gsm8k, smoltalk[:10000], spellingbee[:300]"

A row is one conversation, padded; only what the assistant writes is learnt. The loss of a step is its sum over all
target tokens divided by their number, however the conversations fall into micro-batches and onto ranks.
"""
import math
from typing import Literal

from configurator import configure

import torch

from nanochat.checkpoint import discard_after
from nanochat.distributed import set_up
from nanochat.conversation_loader import RenderedConversations, conversation_loader, order
from nanochat.distributed import StopRequest, compute_cleanup, expect_short_waits, from_rank0, print0
from nanochat.errors import UserError, require_positive
from nanochat.finetuning import begin_stage, require_same_data, row_length
from nanochat.flops import peak_flops
from nanochat.loss_eval import evaluate_bpb
from nanochat.metrics import Metrics, require_wandb
from nanochat.report import settings_table, write_section
from nanochat.saving import CheckpointWriter
from nanochat.schedule import apply_schedule, lr_multiplier
from nanochat.task_eval import accuracy, evaluate_task
from nanochat.tasks import make_mixture, make_tasks, without_parts

# ---- Run
run = ""                    # name of the wandb run; empty: no wandb
overwrite = False           # remove the checkpoints that stand in the way of this run
seed = 0                    # of the data order
# ---- Device
device_type = ""            # cuda | mps | cpu; empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of parameters and activations; auto: bfloat16 where it is fast
compile = True              # compile the blocks and the loss
activation_checkpointing = False  # recompute each block in the backward pass: less memory, a third more work
# ---- Model
source: Literal["base", "mid"] = "mid"  # stage of the model to begin with
model_tag: str | None = None  # folder of its checkpoints, and of those made here; None: the only one there is
step: int | None = None     # of the checkpoint to begin with; None: the newest valid one
# ---- Data
tasks = "tinyworld, arithmetic, spellingbee"  # the mixture; *k: k times over, [:n]: its first n
max_seq_len = -1            # longest conversation, in tokens; -1: that of the model
num_epochs = 1              # how often each conversation is seen
num_iterations = -1         # optimizer steps; -1: as many as the epochs have
# ---- Batch
device_batch_size = 4       # conversations per rank and micro-step; halve it when memory runs out
target_examples_per_step = 32  # conversations per optimizer step, over all ranks
# ---- Sharding over the ranks
zero_stage: Literal[0, 1, 2, 3] = 2  # each rank keeps its share of 1: optimizer state, 2: and gradients, 3: and parameters
shard_size = -1             # ranks that share one copy; the groups of so many ranks are replicas; -1: all ranks
reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # of gradients on their way between ranks
# ---- Optimizers
embedding_lr = 0.2          # AdamW, for a model 768 wide
unembedding_lr = 0.004      # AdamW, for a model 768 wide
matrix_lr = 0.02            # Muon
init_lr_frac = 0.02         # part of these rates to begin with
weight_decay = 0.0          # of Muon's matrices, falling linearly to zero
grad_clip = 0.0             # largest norm of the averaged gradient; 0: no limit
warmdown_ratio = 1.0        # part of the run, at its end, in which the learning rate falls
final_lr_frac = 0.0         # what is left of it at the end
max_bad_steps = 10          # stop after so many steps in a row without a finite loss and gradient
# ---- Looking
eval_every = 100            # steps between validations, which also open and end the run; -1: never
eval_steps = 100            # steps' worth of conversations in a validation, at most one pass over the held-out ones
eval_metrics_every = 200    # steps between evaluations of the tasks, which also end the run; -1: never
eval_metrics_max_problems = 256  # held-out problems of each task; -1: all
# ---- Checkpoints
save_every = -1             # steps between checkpoints, which also end the run; -1: by time only
save_minutes = 30.0         # minutes between checkpoints, of which the newest two are kept; -1: by steps only
keep_last = -1              # checkpoints kept; -1: all
resume: Literal["", "auto"] = ""  # auto: continue from the newest valid checkpoint, or start if there is none
resume_from_step = -1       # continue from this step's checkpoint; -1: do not
config = configure(globals())

# ---- Setup
require_positive(config, "target_examples_per_step", "num_epochs", "eval_steps")
if eval_metrics_max_problems == 0:
    raise UserError("eval_metrics_max_problems=0 measures nothing; set the problems of each task, or -1 for all")
require_wandb(run)
rank, world_size, device, model_dtype, compiling = set_up(device_type, dtype, compile)
train_tasks, val_tasks = make_mixture(tasks, "train", seed), make_mixture(without_parts(tasks), "test", seed=0)
measured = [task for task in make_tasks(without_parts(tasks), "test") if task.eval_type]

# ---- The model of the stage before, or an interrupted run of this script; from here on `step` is the next optimizer step
model, tokenizer, sharding, optimizers, checkpoints, origin, data, step, meta = begin_stage("sft", config, device, model_dtype, compiling)
max_seq_len = row_length(max_seq_len, model)

# ---- Data: every rank knows all rows, and so where the run ends
conversations = RenderedConversations(train_tasks, tokenizer, max_seq_len + 1)
rows = [[index] for epoch in range(num_epochs) for index in order(len(conversations), seed, epoch)]
device_batch_size = min(device_batch_size, math.ceil(target_examples_per_step / world_size))  # no place that no row could fill
grad_accum_steps = math.ceil(target_examples_per_step / (device_batch_size * world_size))  # rows that are missing stay empty
steps_of_all = math.ceil(len(rows) / target_examples_per_step)
num_iterations = steps_of_all if num_iterations == -1 else min(num_iterations, steps_of_all)
data_state = {"origin": origin, "conversations": conversations.fingerprint, "seed": seed, "max_seq_len": max_seq_len, "rows_per_step": target_examples_per_step}
require_same_data(meta, data_state)
print0(f"{num_iterations:,} steps of {target_examples_per_step} conversations = {grad_accum_steps} micro-step(s) x {world_size} rank(s) x {device_batch_size}")

shape = dict(device_batch_size=device_batch_size, max_seq_len=max_seq_len, rank=rank, world_size=world_size, device=device, pad=True)
rows_at_once = device_batch_size * world_size
held_out = RenderedConversations(val_tasks, tokenizer, max_seq_len + 1)
held_out_rows = [[index] for index in order(len(held_out), seed=0, epoch=0)][: eval_steps * target_examples_per_step]

peak = peak_flops(device, model_dtype)
start_step = step
saver = CheckpointWriter(checkpoints, sharding, optimizers, tokenizer, keep_last, save_minutes)
if overwrite:  # only now, when nothing can be wrong with the settings any more
    from_rank0(discard_after, checkpoints, step)
metrics = Metrics(checkpoints, run, config, step, num_iterations, target_examples_per_step * max_seq_len, model.estimate_flops(), peak,
                  meta["metrics_state"] if meta else None)
loader = conversation_loader(conversations, rows, target_examples_per_step, start_step=step, **shape)
inputs, targets = next(loader)
stop = StopRequest()

while True:
    last_step = step >= num_iterations
    stopping = metrics.stop_requested  # agreed on by all ranks: one was sent SIGTERM, SIGINT or SIGHUP

    # --- look: checkpoint first, so that no evaluation can cost a run; each looks at the parameters before this step
    due = last_step or stopping or save_every > 0 and step % save_every == 0
    saver.between_steps(step, metrics, due, dict(config=config, num_iterations=num_iterations,
                        tokenizer=tokenizer.fingerprint, data=data, data_state=data_state))
    if stopping:
        break
    if eval_every > 0 and (last_step or step % eval_every == 0):
        metrics.pause()
        validation = conversation_loader(held_out, held_out_rows, rows_at_once, **shape)
        bpb = evaluate_bpb(model, validation, math.ceil(len(held_out_rows) / rows_at_once), tokenizer.token_bytes())
        metrics.log_validation(step, bpb)
    if eval_metrics_every > 0 and (last_step or step > 0 and step % eval_metrics_every == 0):
        metrics.pause()
        whole_model = sharding.whole_model(everywhere=True)  # on stage 3 its parameters are gathered for this
        solved = {task.name: accuracy(evaluate_task(task, whole_model, tokenizer, device_batch_size, eval_metrics_max_problems)) for task in measured}
        metrics.log(step, {f"tasks/{name}": value for name, value in solved.items()})
        print0(f"step {step:05d}/{num_iterations:05d} | " + ", ".join(f"{name} {value:.1%}" for name, value in solved.items()))
        del whole_model
    if last_step:
        break
    metrics.resume()

    # --- one optimizer step. Micro-batches differ in how many targets they have: their losses and gradients are sums,
    # and the one collective of the step, which counts the targets of all of them, makes the mean.
    step_loss, step_targets, step_tokens = torch.zeros((), device=device), torch.zeros((), device=device), 0
    for micro_step in range(grad_accum_steps):
        with sharding.accumulate(last=micro_step == grad_accum_steps - 1):
            loss = model(inputs, targets, reduction="sum")  # without a single target: zero, and so is its gradient
            loss.backward()
        step_loss += loss.detach()
        step_targets += (targets >= 0).sum()
        step_tokens += targets.numel() * world_size  # padding included: every rank's rows are padded to one length
        inputs, targets = next(loader)

    stats = sharding.reduce_and_clip(step_loss, step_targets, grad_clip, saver.asks(stop.asked))
    lrm = lr_multiplier(step, num_iterations, 0, warmdown_ratio, final_lr_frac)  # without a warmup
    apply_schedule(optimizers, step, num_iterations, lrm)
    saver.begin_update()
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()
    metrics.log_step(step, stats, lrm, step_tokens)  # read one step late: no wait for the device
    if step == start_step:
        expect_short_waits(sharding.shard_group, sharding.replica_group)  # all have compiled by now: who is silent has hung
    step += 1
    saver.give_up_after(max_bad_steps, metrics.bad_in_a_row, step)

# ---- End
saver.wait()
metrics.close()
if stopping:
    print0(f"stopped after step {step}; --resume=auto continues")
else:
    write_section("chat_sft", "Supervised fine-tuning", settings_table(config), metrics=metrics.path, results={"sft": {
        "training minutes": metrics.state["elapsed"] / 60, "best validation bits per byte": metrics.state["min_val_bpb"] or "-",
    }}, data=data, model_tag=checkpoints.name)
compute_cleanup()
