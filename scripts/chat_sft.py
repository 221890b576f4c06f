"""
Supervised fine-tuning: each conversation stands alone, as in a chat.

    python -m scripts.chat_sft --tasks=json:/path/to/mine.jsonl --replay=1    # yours, and as many earlier ones
    torchrun --nproc_per_node=8 -m scripts.chat_sft --tasks="arc:ARC-Easy, gsm8k, smoltalk[:10000], spellingbee[:300]"
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
source: Literal["base", "mid"] = "mid"  # stage of the model to start from
model_tag: str | None = None  # folder of its checkpoints, and of those made here; None: the only one there is
source_step: int | None = None  # step of its checkpoint to start from; None: the newest valid one
# ---- Data
tasks = "tinyworld, arithmetic, spellingbee"  # the mixture; *k: k times over; [:n]: the first n
replay = 0.0                # [0..] conversations of the previous stage to repeat for each new one, against forgetting
max_seq_len = -1            # [-1, 1..] longest conversation in tokens; longer ones are split; -1: as in the model
num_epochs = -1             # [-1, 1..] how often each conversation is seen; -1: hundreds several times, thousands once
num_iterations = -1         # [-1, 1..] optimizer steps; -1: as many as the epochs take
# ---- Batch
device_batch_size = 4       # [1..] conversations per rank and micro-step; halve it when memory runs out
target_examples_per_step = 32  # [1..] conversations, or parts of long ones, per optimizer step, over all ranks
# ---- Sharding over the ranks
zero_stage: Literal[0, 1, 2, 3] = 2  # sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters
# ---- Optimizers
embedding_lr = 0.2          # [0..] AdamW, for a model 768 wide
unembedding_lr = 0.004      # [0..] AdamW, for a model 768 wide
matrix_lr = 0.02            # [0..] Muon
init_lr_frac = -1.0         # [-1, 0..1] factor of these rates at the start; -1: smaller for more conversations
warmdown_ratio = 1.0        # [0..1] share of the run, at its end, over which the learning rate falls
# ---- Evaluation and logging
eval_every = 100            # [-1..] steps between validations, also before the first step and after the last; -1: never
# ---- Checkpoints
save_every = -1             # [-1..] steps between checkpoints, besides one each half hour and at the end; -1: no others
keep_last = -1              # [-1, 1..] checkpoints to keep; -1: all, but only the newest two half-hourly ones
resume: Literal["", "auto"] = ""  # auto: continue from the newest valid checkpoint, or start if there is none
config = configure(globals())

# ---- Tasks: a mistyped one, or a file that is missing, is answered here, before torch is imported
from nanochat.data.task import task_names
from nanochat.tasks import describe_validation, make_mixture, without_parts

train_mixture = make_mixture(tasks, "train", seed)
val_mixture = make_mixture(without_parts(tasks), "test", seed=0)  # the same for every seed

import math

import torch

from nanochat.data.batch_shape import BatchShape, chunks
from nanochat.data.conversation_loader import RenderedConversations, balance, conversation_loader, epoch_order
from nanochat.data.tokenizer import Tokenizer
from nanochat.eval.loss_eval import evaluate_bpb
from nanochat.eval.task_eval import sample_answers
from nanochat.optim.recipe import Recipe
from nanochat.optim.schedule import is_due, set_rates
from nanochat.runtime.collectives import from_rank0
from nanochat.runtime.compiling import eagerly
from nanochat.runtime.console import print0
from nanochat.runtime.distributed import set_up
from nanochat.runtime.errors import UserError
from nanochat.tasks.common import Mixture
from nanochat.training.checkpoint import tasks_of
from nanochat.training.finetuning import choose_epochs_and_rate, load_training, plan_steps, row_length
from nanochat.training.session import Session
from nanochat.training.starting import find_start

EVAL_STEPS = 100  # steps' worth of conversations in a validation

# ---- Setup: the model of the previous stage, or an interrupted run of this script
rank, world_size, device, model_dtype = set_up(device_type, dtype)
start = find_start("sft", source, config)
tokenizer = Tokenizer.load(start.weights)
max_seq_len = row_length(max_seq_len, start.meta)

# ---- Conversations, how often each is seen, and the learning rates
conversations = RenderedConversations(train_mixture, tokenizer, max_seq_len + 1)
num_epochs, init_lr_frac = choose_epochs_and_rate(len(conversations), num_epochs, init_lr_frac)
config |= {"num_epochs": num_epochs, "init_lr_frac": init_lr_frac}
print0(f"each {num_epochs} x, beginning with {init_lr_frac:.3g} of the learning rates "
       "(--num_epochs and --init_lr_frac, if not set, are chosen from the number of conversations and their parts)")

# ---- Earlier tasks: repeat some, or they are forgotten
earlier = from_rank0(tasks_of, source, start.checkpoints.name)
if replay:
    if not earlier:
        raise UserError(f"replay={replay}: the tasks that {start.origin} was trained on are not known; "
                        "name them in --tasks")
    replayed = make_mixture(earlier, "train", seed)[: round(replay * num_epochs * len(train_mixture))]
    print0(f"with {len(replayed):,} conversations of {earlier}")
    train_mixture = Mixture([train_mixture] * num_epochs + [replayed], seed)
    num_epochs = 1  # the mixture repeats each conversation already
    conversations = RenderedConversations(train_mixture, tokenizer, max_seq_len + 1, "training on both")
elif earlier and not task_names(earlier) & task_names(tasks):
    print0(f"none of the model's earlier tasks ({earlier}) is repeated, so it will forget much of them; --replay=1 "
           "mixes in as many earlier conversations")
model, tokenizer, sharding, optimizers = load_training(start, config, device, model_dtype)
recipe = Recipe(warmdown_ratio=warmdown_ratio, adamw_warmdown_ratio=warmdown_ratio)

# ---- Data: a row is one padded conversation, or several if the model keeps documents apart. Only what the assistant
# writes is learned. Every rank knows all rows, so every rank knows where the run ends
numbers = [number for epoch in range(num_epochs) for number in epoch_order(len(conversations), seed, epoch)]
rows_at_once = min(device_batch_size, math.ceil(target_examples_per_step / world_size))
shape = BatchShape(rows_at_once, max_seq_len, rank, world_size, device)
steps = []  # the rows of each step
for examples in chunks(numbers, target_examples_per_step):
    if model.config.document_token >= 0:
        steps.append(balance(conversations.lengths, examples, shape.rows_per_micro_step, max_seq_len + 1))
    else:
        steps.append([[number] for number in examples])
num_iterations, data_state = plan_steps(start, config, conversations, steps, target_examples_per_step, max_seq_len)
held_out = RenderedConversations(val_mixture, tokenizer, max_seq_len + 1, describe_validation(val_mixture))
held_out_numbers = epoch_order(len(held_out), seed=0, epoch=0)[: EVAL_STEPS * target_examples_per_step]
held_out_steps = shape.micro_steps([[number] for number in held_out_numbers])

session = Session(start, config, sharding, optimizers, tokenizer, num_iterations,
                  data=start.meta.get("data"), data_state=data_state)
metrics = session.metrics
loader = conversation_loader(conversations, steps, shape, pad=True, start_step=session.step)
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
            validation = conversation_loader(held_out, held_out_steps, shape, pad=True)
            with eagerly():  # no gradients: a GPU would compile every length again
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
    step_tokens = 0
    grad_accum_steps = len(shape.micro_steps(steps[step]))
    for micro_step in range(grad_accum_steps):
        with sharding.accumulate(last=micro_step == grad_accum_steps - 1):
            # with no target at all, the loss and its gradient are zero
            loss = model(inputs, targets, reduction="sum", cu_seqlens=cu_seqlens)
            loss.backward()
        step_loss += loss.detach()
        step_targets += (targets >= 0).sum()
        step_tokens += targets.numel() * world_size  # padding counts: all ranks pad their rows to one length
        inputs, targets, cu_seqlens = next(loader)

    stats = sharding.reduce_and_clip(step_loss, step_targets, requests=session.requests())
    rates = recipe.at(step, num_iterations)
    set_rates(optimizers, rates)
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()  # also frees the gradients: there is no zero_grad
    session.end_step(stats, rates.muon, step_tokens)

# ---- End
session.end()
session.report("Supervised fine-tuning", metrics.results())
