"""
Mid-training: teach the base model what a conversation is, in one pass over a mixture of tasks.

    torchrun --nproc_per_node=8 -m scripts.mid_train --tasks="smoltalk, mmlu, gsm8k*2, spellingbee, arithmetic"
"""
from typing import Literal

from configurator import configure

# ---- Run
run = ""                    # name of the wandb run; empty: no wandb
overwrite = False           # remove old checkpoints: all, or when resuming, those of later steps
seed = 0                    # [0..] decides the data order
# ---- Device
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best available
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # parameters and activations; auto: bfloat16 where it is fast
compile = True              # compile the blocks and the loss
activation_checkpointing = False  # recompute each block in the backward pass: less memory, a third more work
# ---- Model
model_tag: str | None = None  # folder of its checkpoints, and of those made here; None: the only one there is
source_step: int | None = None  # step of its checkpoint to start from; None: the newest valid one
# ---- Data
tasks = "tinyworld, arithmetic, spellingbee"  # the mixture; *k: k times over; [:n]: the first n
max_seq_len = -1            # [-1, 1..] tokens per row; -1: as in the model
num_iterations = -1         # [-1, 1..] optimizer steps; -1: one pass over the mixture
# ---- Batch
device_batch_size = 16      # [1..] rows per rank and micro-step; halve it when memory runs out
total_batch_size = -1       # [-1, 1..] tokens per optimizer step, over all ranks; -1: as in pretraining, at most 2^19
# ---- Sharding over the ranks
zero_stage: Literal[0, 1, 2, 3] = 2  # sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters
# ---- Optimizers
embedding_lr = 0.2          # [0..] AdamW, for a model 768 wide
unembedding_lr = 0.004      # [0..] AdamW, for a model 768 wide
matrix_lr = 0.02            # [0..] Muon
init_lr_frac = 1.0          # [0..1] factor of these rates at the start
warmdown_ratio = 0.2        # [0..1] share of the run, at its end, over which the learning rate falls
# ---- Evaluation and logging
eval_every = 150            # [-1..] steps between validations, also before the first step and after the last; -1: never
eval_tokens = 10485760      # [1..] tokens per validation, up to one pass over the held-out conversations
# ---- Checkpoints
save_every = -1             # [-1..] steps between checkpoints, besides one each half hour and at the end; -1: no others
keep_last = -1              # [-1, 1..] checkpoints to keep; -1: all, but only the newest two half-hourly ones
resume: Literal["", "auto"] = ""  # auto: continue from the newest valid checkpoint, or start if there is none
config = configure(globals())

# ---- Tasks: a mistyped one, or a file that is missing, is answered here, before torch is imported
from nanochat.tasks import describe_validation, make_mixture, without_parts

train_mixture = make_mixture(tasks, "train", seed)
val_mixture = make_mixture(without_parts(tasks), "test", seed=0)  # the same for every seed

import math

import torch

from nanochat.data.batch_shape import BatchShape, chunks
from nanochat.data.conversation_loader import RenderedConversations, conversation_loader, epoch_order, pack
from nanochat.eval.loss_eval import evaluate_bpb
from nanochat.eval.task_eval import sample_answers
from nanochat.optim.recipe import Recipe
from nanochat.optim.schedule import is_due, set_rates
from nanochat.runtime.distributed import set_up
from nanochat.training.finetuning import load_training, plan_steps, row_length
from nanochat.training.session import Session
from nanochat.training.starting import find_start

# ---- Setup: the base model, or an interrupted run of this script
rank, world_size, device, model_dtype = set_up(device_type, dtype)
start = find_start("mid", "base", config)
model, tokenizer, sharding, optimizers = load_training(start, config, device, model_dtype)
max_seq_len = row_length(max_seq_len, start.meta)
# AdamW restarts: without a warmup its first step would move a stream's scale by 0.4
recipe = Recipe(warmdown_ratio=warmdown_ratio, adamw_warmdown_ratio=warmdown_ratio,
                warmup_steps=40 if model.config.stream_scales else 0)

# ---- Data: rows are packed with whole conversations; longer ones are split. Only what the assistant writes is learned.
# Every rank packs all rows, so every rank knows where the run ends
if total_batch_size == -1:
    total_batch_size = min(start.meta.get("total_batch_size", 2**19), 2**19)
rows_per_step = max(total_batch_size // max_seq_len, 1)  # a step takes whole rows
total_batch_size = config["total_batch_size"] = rows_per_step * max_seq_len
rows_at_once = min(device_batch_size, math.ceil(rows_per_step / world_size))
shape = BatchShape(rows_at_once, max_seq_len, rank, world_size, device)
conversations = RenderedConversations(train_mixture, tokenizer, max_seq_len + 1)
rows = pack(conversations.lengths.tolist(), epoch_order(len(conversations), seed, epoch=0), max_seq_len + 1)
steps = chunks(rows, rows_per_step)
num_iterations, data_state = plan_steps(start, config, conversations, steps, rows_per_step, max_seq_len)
# A conversation has more than seven tokens, so these hold eval_tokens; the rest need not be rendered.
val_conversations = val_mixture[: max(eval_tokens // 7, 1)]
held_out = RenderedConversations(val_conversations, tokenizer, max_seq_len + 1, describe_validation(val_mixture))
held_out_rows = pack(held_out.lengths.tolist(), epoch_order(len(held_out), seed=0, epoch=0), max_seq_len + 1)
held_out_steps = shape.micro_steps(held_out_rows[: max(eval_tokens // max_seq_len, 1)])

session = Session(start, config, sharding, optimizers, tokenizer, num_iterations,
                  total_batch_size, data=start.meta.get("data"), data_state=data_state)
metrics = session.metrics
loader = conversation_loader(conversations, steps, shape, pad=False, start_step=session.step)
inputs, targets, cu_seqlens = next(loader)

while True:
    step = session.step

    # --- checkpoint of the parameters before this step; first, because an evaluation may fail
    session.save_if_due()
    if metrics.stop_requested:  # some rank got SIGTERM, SIGINT or SIGHUP; all ranks know
        break

    # --- evaluation of the same parameters
    if is_due(step, num_iterations, eval_every):
        with session.evaluation():
            validation = conversation_loader(held_out, held_out_steps, shape, pad=False)
            bpb = evaluate_bpb(model, validation, len(held_out_steps), tokenizer.token_bytes())
            metrics.log_validation(step, bpb)
            if zero_stage < 3:  # stage 3 would need the memory of a whole model
                metrics.log(step, {"sample": sample_answers(val_mixture, sharding.gather_model(), tokenizer)})
    if metrics.stop_requested:  # during the evaluation; all ranks have left it
        continue
    if step >= num_iterations:
        break

    # --- one optimizer step, as in base_train, but micro-batches have different numbers of targets: losses and
    # gradients are sums, and reduce_and_clip divides them by all targets of the step.
    step_loss = torch.zeros((), device=device)
    step_targets = torch.zeros((), device=device)  # counted on the device: the host does not wait
    grad_accum_steps = len(shape.micro_steps(steps[step]))
    for micro_step in range(grad_accum_steps):
        with sharding.accumulate(last=micro_step == grad_accum_steps - 1):
            # with no target at all, the loss and its gradient are zero
            loss = model(inputs, targets, reduction="sum", cu_seqlens=cu_seqlens)
            loss.backward()
        step_loss += loss.detach()
        step_targets += (targets >= 0).sum()
        inputs, targets, cu_seqlens = next(loader)

    stats = sharding.reduce_and_clip(step_loss, step_targets, requests=session.requests())
    rates = recipe.at(step, num_iterations)
    set_rates(optimizers, rates)
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()  # also frees the gradients: there is no zero_grad
    session.end_step(stats, rates.muon)

# ---- End
session.end()
session.report("Mid-training", metrics.results())
