"""
Mid-training: teach the base model what a conversation is, on a mixture of tasks, once through.

    python -m scripts.mid_train
    torchrun --nproc_per_node=8 -m scripts.mid_train --tasks="smoltalk, mmlu, gsm8k*2, spellingbee, arithmetic"

Rows are packed with whole conversations; only what the assistant writes is learnt.
"""
import math
from typing import Literal

from configurator import configure

import torch

from nanochat.checkpoint import discard_after
from nanochat.distributed import set_up
from nanochat.conversation_loader import RenderedConversations, conversation_loader, order, pack
from nanochat.distributed import StopRequest, compute_cleanup, expect_short_waits, from_rank0, print0
from nanochat.errors import UserError, require_positive
from nanochat.finetuning import begin_stage, require_same_data, row_length
from nanochat.flops import peak_flops
from nanochat.loss_eval import evaluate_bpb
from nanochat.metrics import Metrics, require_wandb
from nanochat.report import settings_table, write_section
from nanochat.saving import CheckpointWriter
from nanochat.schedule import apply_schedule, lr_multiplier
from nanochat.tasks import make_mixture, without_parts

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
source: Literal["base"] = "base"  # stage of the model to begin with
model_tag: str | None = None  # folder of its checkpoints, and of those made here; None: the only one there is
step: int | None = None     # of the checkpoint to begin with; None: the newest valid one
# ---- Data
tasks = "tinyworld, arithmetic, spellingbee"  # the mixture; *k: k times over, [:n]: its first n
max_seq_len = -1            # tokens per row; -1: those of the model
num_iterations = -1         # optimizer steps; -1: the mixture once through
# ---- Batch
device_batch_size = 32      # rows per rank and micro-step; halve it when memory runs out
total_batch_size = 524288   # tokens per optimizer step, over all ranks
# ---- Sharding over the ranks
zero_stage: Literal[0, 1, 2, 3] = 2  # each rank keeps its share of 1: optimizer state, 2: and gradients, 3: and parameters
shard_size = -1             # ranks that share one copy; the groups of so many ranks are replicas; -1: all ranks
reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # of gradients on their way between ranks
# ---- Optimizers
embedding_lr = 0.2          # AdamW, for a model 768 wide
unembedding_lr = 0.004      # AdamW, for a model 768 wide
matrix_lr = 0.02            # Muon
init_lr_frac = 1.0          # part of these rates to begin with
weight_decay = 0.0          # of Muon's matrices, falling linearly to zero
grad_clip = 0.0             # largest norm of the averaged gradient; 0: no limit
warmdown_ratio = 0.8        # part of the run, at its end, in which the learning rate falls
final_lr_frac = 0.0         # what is left of it at the end
max_bad_steps = 10          # stop after so many steps in a row without a finite loss and gradient
# ---- Looking
eval_every = 150            # steps between validations, which also open and end the run; -1: never
eval_tokens = 10485760      # tokens of a validation, at most one pass over the held-out conversations
# ---- Checkpoints
save_every = -1             # steps between checkpoints, which also end the run; -1: by time only
save_minutes = 30.0         # minutes between checkpoints, of which the newest two are kept; -1: by steps only
keep_last = -1              # checkpoints kept; -1: all
resume: Literal["", "auto"] = ""  # auto: continue from the newest valid checkpoint, or start if there is none
resume_from_step = -1       # continue from this step's checkpoint; -1: do not
config = configure(globals())

# ---- Setup
require_positive(config, "eval_tokens", "total_batch_size")
require_wandb(run)
rank, world_size, device, model_dtype, compiling = set_up(device_type, dtype, compile)
train_tasks, val_tasks = make_mixture(tasks, "train", seed), make_mixture(without_parts(tasks), "test", seed=0)

# ---- The base model, or an interrupted run of this script; from here on `step` is the next optimizer step
model, tokenizer, sharding, optimizers, checkpoints, origin, data, step, meta = begin_stage("mid", config, device, model_dtype, compiling)
max_seq_len = row_length(max_seq_len, model)

# ---- Data: every rank packs all rows, and so knows where the run ends
conversations = RenderedConversations(train_tasks, tokenizer, max_seq_len + 1)
packed = pack(conversations.lengths.tolist(), order(len(conversations), seed, epoch=0), max_seq_len + 1)
rows_per_step, rest = divmod(total_batch_size, max_seq_len)
if rest or not rows_per_step:
    raise UserError(f"total_batch_size={total_batch_size} must be a multiple of max_seq_len={max_seq_len}: rows are whole")
device_batch_size = min(device_batch_size, math.ceil(rows_per_step / world_size))  # no place that no row could fill
grad_accum_steps = math.ceil(rows_per_step / (device_batch_size * world_size))  # rows that are missing stay empty
steps_of_all = math.ceil(len(packed) / rows_per_step)
num_iterations = steps_of_all if num_iterations == -1 else min(num_iterations, steps_of_all)
data_state = {"origin": origin, "conversations": conversations.fingerprint, "seed": seed, "max_seq_len": max_seq_len, "rows_per_step": rows_per_step}
require_same_data(meta, data_state)
filled = len(conversations.ids) / (len(packed) * (max_seq_len + 1))
print0(f"{len(packed):,} rows, {filled:.1%} filled; {num_iterations:,} steps of {rows_per_step} rows = {grad_accum_steps} micro-step(s) "
       f"x {world_size} rank(s) x {device_batch_size}")

shape = dict(device_batch_size=device_batch_size, max_seq_len=max_seq_len, rank=rank, world_size=world_size, device=device, pad=False)
held_out = RenderedConversations(val_tasks, tokenizer, max_seq_len + 1)
held_out_rows = pack(held_out.lengths.tolist(), order(len(held_out), seed=0, epoch=0), max_seq_len + 1)[: max(eval_tokens // max_seq_len, 1)]
rows_at_once = device_batch_size * world_size

peak = peak_flops(device, model_dtype)
start_step = step
saver = CheckpointWriter(checkpoints, sharding, optimizers, tokenizer, keep_last, save_minutes)
if overwrite:  # only now, when nothing can be wrong with the settings any more
    from_rank0(discard_after, checkpoints, step)
metrics = Metrics(checkpoints, run, config, step, num_iterations, total_batch_size, model.estimate_flops(), peak,
                  meta["metrics_state"] if meta else None)
loader = conversation_loader(conversations, packed, rows_per_step, start_step=step, **shape)
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
    if last_step:
        break
    metrics.resume()

    # --- one optimizer step. Micro-batches differ in how many targets they have: their losses and gradients are sums,
    # and the one collective of the step, which counts the targets of all of them, makes the mean.
    step_loss, step_targets = torch.zeros((), device=device), torch.zeros((), device=device)
    for micro_step in range(grad_accum_steps):
        with sharding.accumulate(last=micro_step == grad_accum_steps - 1):
            loss = model(inputs, targets, reduction="sum")  # without a single target: zero, and so is its gradient
            loss.backward()
        step_loss += loss.detach()
        step_targets += (targets >= 0).sum()
        inputs, targets = next(loader)

    stats = sharding.reduce_and_clip(step_loss, step_targets, grad_clip, stop.asked, saver.time_is_up())
    lrm = lr_multiplier(step, num_iterations, 0, warmdown_ratio, final_lr_frac)  # without a warmup
    apply_schedule(optimizers, step, num_iterations, lrm)
    saver.begin_update()
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()
    metrics.log_step(step, stats, lrm)  # read one step late: no wait for the device
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
    write_section("mid_train", "Mid-training", settings_table(config), metrics=metrics.path, results={"mid": {
        "training minutes": metrics.state["elapsed"] / 60, "best validation bits per byte": metrics.state["min_val_bpb"] or "-",
    }}, data=data, model_tag=checkpoints.name)
compute_cleanup()
