"""
Pretrain a base model.

    python -m scripts.base_train --depth=4 --max_seq_len=512 --device_batch_size=1 --total_batch_size=512 --num_iterations=20
    torchrun --nproc_per_node=8 -m scripts.base_train --depth=20

The outer loop is one optimizer step, the inner loop accumulates the gradient of total_batch_size tokens in micro-steps.
"""
import math
from typing import Literal

from configurator import configure

import torch

from nanochat.optimizers import setup_optimizers
from nanochat.checkpoint import changed_settings, checkpoint_dir, choose_start, discard_after, read_meta
from nanochat.compiling import eagerly
from nanochat.distributed import set_up
from nanochat.core_eval import bundle_dir, core_name, evaluate_core, load_tasks
from nanochat.corpus.eval_bundle import why_no_bundle
from nanochat.dataloader import count_tokens, tokenizing_distributed_data_loader
from nanochat.corpus.make_dataset import ensure_dataset
from nanochat.distributed import StopRequest, compute_cleanup, expect_short_waits, from_rank0, print0, rank0_first
from nanochat.errors import UserError, require_fraction, require_positive
from nanochat.flops import peak_flops
from nanochat.gpt import GPT, config_from_depth
from nanochat.loss_eval import evaluate_bpb, sample
from nanochat.corpus.tinyworld import entropy_floor
from nanochat.metrics import Metrics, minutes, require_wandb
from nanochat.report import settings_table, write_section
from nanochat.resharding import load_training_state
from nanochat.saving import CheckpointWriter
from nanochat.schedule import accumulation_steps, apply_schedule, choose_batch_size, choose_num_iterations, lr_multiplier
from nanochat.corpus.tinyworld import PROMPTS
from nanochat.corpus.learn_tokenizer import ensure_tokenizer
from nanochat.zero import Sharding

# ---- Run
run = ""                    # name of the wandb run; empty: no wandb
model_tag = ""              # folder of the checkpoints; empty: d<depth>
overwrite = False           # remove the checkpoints that stand in the way of this run
seed = 0                    # of weights and data order
# ---- Device
device_type = ""            # cuda | mps | cpu; empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of parameters and activations; auto: bfloat16 where it is fast
compile = True              # compile the blocks and the loss
activation_checkpointing = False  # recompute each block in the backward pass: less memory, a third more work
# ---- Data
data = "tinyworld"          # name of a data set made by nanochat.dataset
max_seq_len = 2048          # tokens per row
# ---- Model
depth = 20                  # layers; the width (64 per layer) and the heads follow from it
kv_group = 1                # query heads per key head; above 1: grouped-query attention
softcap = 15.0              # limit of the logits, at most 64; 0: none
# ---- Horizon: the first of these that is positive
num_iterations = -1         # optimizer steps
target_flops = -1.0         # FLOPs of the whole run
target_param_data_ratio = 20.0  # tokens per parameter; 20 is Chinchilla
# ---- Batch
device_batch_size = 32      # rows per rank and micro-step; halve it when memory runs out
total_batch_size = 524288   # tokens per optimizer step, over all ranks; -1: chosen from the horizon
# ---- Sharding over the ranks
zero_stage: Literal[0, 1, 2, 3] = 2  # each rank keeps its share of 1: optimizer state, 2: and gradients, 3: and parameters
shard_size = -1             # ranks that share one copy; the groups of so many ranks are replicas; -1: all ranks
reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # of gradients on their way between ranks
# ---- Optimizers
embedding_lr = 0.2          # AdamW, for a model 768 wide
unembedding_lr = 0.004      # AdamW, for a model 768 wide
matrix_lr = 0.02            # Muon
weight_decay = 0.0          # of Muon's matrices, falling linearly to zero
grad_clip = 0.0             # largest norm of the averaged gradient; 0: no limit
warmup_ratio = 0.0          # part of the run in which the learning rate rises
warmdown_ratio = 0.4        # part of the run in which it falls
final_lr_frac = 0.0         # what is left of it at the end
max_bad_steps = 10          # stop after so many steps in a row without a finite loss and gradient
# ---- Looking
eval_every = 250            # steps between validations, which also open and end the run; -1: never
eval_tokens = 10485760      # tokens of a validation, at most one pass over the split
core_metric_every = -1      # steps between CORE evaluations, which also end the run; -1: never
core_metric_max_per_task = 500  # items of each task of CORE; -1: all
sample_every = 2000         # steps between samples, which also end the run; -1: never
# ---- Checkpoints
save_every = -1             # steps between checkpoints, which also end the run; -1: by time only
save_minutes = 30.0         # minutes between checkpoints, of which the newest two are kept; -1: by steps only
keep_last = -1              # checkpoints kept; -1: all
resume: Literal["", "auto"] = ""  # auto: continue from the newest valid checkpoint, or start if there is none
resume_from_step = -1       # continue from this step's checkpoint; -1: do not
config = configure(globals())

# ---- Setup: who we are, and what we compute on
if core_metric_max_per_task == 0:
    raise UserError("core_metric_max_per_task=0 measures nothing; set the items of each task, or -1 for all")
if seed < 0:
    raise UserError(f"seed={seed} must be at least 0")
if num_iterations == 0:
    raise UserError("num_iterations=0 trains nothing; set the steps, or -1 for the other horizons")
require_fraction(config, "warmup_ratio", "warmdown_ratio", "final_lr_frac")
require_positive(config, "depth", "kv_group", "max_seq_len", "device_batch_size", "eval_tokens", "max_bad_steps")
require_wandb(run)
rank, world_size, device, model_dtype, compiling = set_up(device_type, dtype, compile)

# ---- Data and tokenizer: the embedded ones are made when they are not there
rank0_first(ensure_dataset, data)
tokenizer = rank0_first(ensure_tokenizer, data)
token_bytes = tokenizer.token_bytes()
if core_metric_every > 0 and (reason := from_rank0(why_no_bundle)):
    raise UserError(f"core_metric_every={core_metric_every}, but there is {reason}")
core_tasks = load_tasks(bundle_dir()) if core_metric_every > 0 else []

# ---- Model: its shapes first, without memory, so that wrong settings are found at once
model_config = config_from_depth(depth, tokenizer.get_vocab_size(), max_seq_len, kv_group, softcap)
with torch.device("meta"):
    model = GPT(model_config)
parameters, flops_per_token = sum(p.numel() for p in model.parameters()), model.estimate_flops()

# ---- Where to start: rank 0 decides, so that no rank can see other files than another
checkpoints = checkpoint_dir("base", model_tag or f"d{depth}")
checkpoint = choose_start(checkpoints, resume, resume_from_step, overwrite)
meta = read_meta(checkpoint) if checkpoint else None
if meta and meta["tokenizer"] != tokenizer.fingerprint:
    raise UserError(f"{checkpoint} was trained with another tokenizer than the one of data {data!r}; use that one, or another --model_tag")

# ---- Batch and horizon
if total_batch_size == -1 and meta:
    total_batch_size = meta["total_batch_size"]
if total_batch_size == -1:
    horizon = target_flops / flops_per_token if target_flops > 0 else target_param_data_ratio * parameters
    unit = device_batch_size * max_seq_len * world_size
    total_batch_size = choose_batch_size(None if num_iterations > 0 else horizon, num_iterations, unit)  # from tokens, or from steps
grad_accum_steps = accumulation_steps(total_batch_size, device_batch_size, max_seq_len, world_size)
num_iterations = choose_num_iterations(
    num_iterations, target_flops, target_param_data_ratio, flops_per_token, parameters, total_batch_size
)
peak = peak_flops(device, model_dtype)
print0(f"model: depth {depth}, width {model_config.n_embd}, {model_config.n_head} heads, vocabulary {model_config.vocab_size:,}, {parameters:,} parameters")
print0(
    f"batch: {total_batch_size:,} tokens = {device_batch_size} rows x {max_seq_len} x {world_size} rank(s) x {grad_accum_steps} "
    f"micro-step(s); {num_iterations:,} steps, {num_iterations * total_batch_size:,} tokens, {num_iterations * total_batch_size * flops_per_token:.2e} FLOPs"
)
print0(
    f"mfu: of {peak.flops / 1e12:,.2f} TFLOP/s per rank ({peak.source}); at that rate the run would take "
    f"{minutes(num_iterations * total_batch_size * flops_per_token / (peak.flops * world_size))}"
)

# ---- Weights: drawn in float32 on every rank alike; then each rank keeps of them what its stage asks for
model.to_empty(device=device)
model.init_weights(seed)
model.activation_checkpointing = activation_checkpointing
sharding = Sharding(model, model.units(), device, model_dtype, zero_stage, shard_size, getattr(torch, reduce_dtype))
optimizers = setup_optimizers(model, sharding, unembedding_lr, embedding_lr, matrix_lr, weight_decay)
if compiling:
    model.compile_blocks()

# ---- Resume, exactly: weights, masters, moments, random states, place in the data, smoothed loss
step, data_state, metrics_state = 0, None, None
if meta:
    load_training_state(checkpoint, sharding, optimizers)
    step, data_state, metrics_state = meta["step"], meta["data_state"], meta["metrics_state"]
    print0(f"resuming from {checkpoint}{changed_settings(meta['config'], config)}")
elif resume == "auto":
    print0(f"nothing to resume in {checkpoints}: starting from step 0")
start_step = step
saver = CheckpointWriter(checkpoints, sharding, optimizers, tokenizer, keep_last, save_minutes)
if overwrite:  # only now, when nothing can be wrong with the settings any more
    from_rank0(discard_after, checkpoints, start_step)
metrics = Metrics(checkpoints, run, config, start_step, num_iterations, total_batch_size, flops_per_token, peak, metrics_state)
shape = dict(device_batch_size=device_batch_size, max_seq_len=max_seq_len, rank=rank, world_size=world_size, device=device)
train_loader = tokenizing_distributed_data_loader(data, "train", tokenizer, grad_accum_steps=grad_accum_steps, seed=seed, state=data_state, **shape)
eval_rows = max(min(eval_tokens, from_rank0(count_tokens, data, "val", tokenizer)) // max_seq_len, 1)
eval_steps = math.ceil(eval_rows / (device_batch_size * world_size))
inputs, targets, data_state = next(train_loader)  # data_state: where the step of these rows begins
stop = StopRequest()

while True:
    last_step = step >= num_iterations
    stopping = metrics.stop_requested  # agreed on by all ranks: one was sent SIGTERM, SIGINT or SIGHUP

    # --- look: checkpoint first, so that no evaluation can cost a run; each looks at the parameters before this step
    due = last_step or stopping or save_every > 0 and step % save_every == 0
    saver.between_steps(step, metrics, due, dict(config=config, total_batch_size=total_batch_size,
                        num_iterations=num_iterations, tokenizer=tokenizer.fingerprint, data=data, data_state=data_state))
    if stopping:
        break
    if eval_every > 0 and (last_step or step % eval_every == 0):
        metrics.pause()
        # The same rows in every run, whatever its seed, batch and ranks.
        validation = tokenizing_distributed_data_loader(data, "val", tokenizer, num_rows=eval_rows, **shape)
        metrics.log_validation(step, evaluate_bpb(model, validation, eval_steps, token_bytes))
        validation.close()
    if core_metric_every > 0 and (last_step or step > 0 and step % core_metric_every == 0):
        metrics.pause()
        core, scores = evaluate_core(model, tokenizer, core_tasks, core_metric_max_per_task, device_batch_size * max_seq_len)
        metrics.log(step, {f"core/{core_name(scores)}": core} | {f"core/{score.label}": score.centered for score in scores})
        print0(f"step {step:05d}/{num_iterations:05d} | {core_name(scores)} {core:.4f}")
    if sample_every > 0 and (last_step or step > 0 and step % sample_every == 0):
        metrics.pause()
        whole_model = sharding.gather_model()  # on rank 0; on stage 3 its parameters are gathered for this
        with eagerly():
            for prompt, _ in PROMPTS if rank == 0 else ():
                print0(f"  {prompt}{sample(whole_model, tokenizer, prompt, max_tokens=24)}")
        del whole_model
    if last_step:
        break
    metrics.resume()

    # --- one optimizer step: accumulate the gradient of total_batch_size tokens, then apply it
    step_loss = torch.zeros((), device=device)
    for micro_step in range(grad_accum_steps):
        with sharding.accumulate(last=micro_step == grad_accum_steps - 1):  # the last lets gradients travel as they appear
            loss = model(inputs, targets)  # mean over this micro-batch; every micro-batch has equally many targets
            (loss / grad_accum_steps).backward()
        step_loss += loss.detach() / grad_accum_steps
        inputs, targets, data_state = next(train_loader)  # the copy overlaps the backward pass

    # One small collective: mean loss, norm of the averaged gradient, whether all is finite, whether to stop.
    stats = sharding.reduce_and_clip(step_loss, grad_clip=grad_clip, stop=stop.asked, save=saver.time_is_up())
    lrm = lr_multiplier(step, num_iterations, warmup_ratio, warmdown_ratio, final_lr_frac)
    apply_schedule(optimizers, step, num_iterations, lrm)
    saver.begin_update()
    for optimizer in optimizers:
        optimizer.step(stats)  # of this rank's slices; changes nothing on any rank if any saw a NaN
    sharding.all_gather_params()  # the updated slices are on their way while the next forward pass begins
    metrics.log_step(step, stats, lrm)  # read one step late: no wait for the device
    if step == start_step:
        expect_short_waits(sharding.shard_group, sharding.replica_group)  # all have compiled by now: who is silent has hung
    step += 1
    saver.give_up_after(max_bad_steps, metrics.bad_in_a_row, step)

# ---- End
train_loader.close()
saver.wait()
metrics.close()
if stopping:
    print0(f"stopped after step {step}; --resume=auto continues")
elif rank == 0:
    state = metrics.state
    write_section("base_train", "Base model: pretraining", settings_table(config), metrics=metrics.path, floor=entropy_floor(data), results={"base": {
        "parameters": f"{parameters:,}", "tokens trained on": f"{num_iterations * total_batch_size:,}",
        "training minutes": state["elapsed"] / 60, "best validation bits per byte": state["min_val_bpb"] or "-",
    }}, data=data, model_tag=checkpoints.name)
compute_cleanup()
