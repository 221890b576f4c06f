r"""
Pretrain a base model.

    python -m scripts.base_train --depth=4                          # this machine, one process
    torchrun --nproc_per_node=8 -m scripts.base_train --depth=20    # one node, eight GPUs
"""
from typing import Literal

from configurator import configure

# ---- Run
run = ""                    # name of the wandb run; empty: no wandb
model_tag = ""              # folder of the checkpoints; empty: d<depth>
overwrite = False           # remove old checkpoints: all, or when resuming, those of later steps
seed = 0                    # [0..] decides the weights and the data order
# ---- Device
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best available
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # parameters and activations; auto: bfloat16 where it is fast
compile = True              # compile the blocks and the loss
fp8: bool | Literal["auto"] = "auto"  # 8-bit matrix products; auto: for depth 22 and more on H100, H200, B200
activation_checkpointing = False  # recompute each block in the backward pass: less memory, a third more work
# ---- Data
data = "tinyworld"          # data set made by scripts.dataset, or several by shares: climbmix*0.9, notes*0.1
max_seq_len = -1            # [-1, 1..] tokens per row; -1: 2,048 on a CUDA GPU, else 512
# ---- Model: new, or one to train further, which gives the tokenizer and all settings that are left out here
depth = -1                  # [-1, 1..] layers; the width is about 64 per layer; -1: 20 on a CUDA GPU, else 4
arch = ""                   # architecture: classic, modern (empty), or one with changes: modern,smear=False
begin_from = ""             # model_tag of a base model to train further; it may be an imported one
source_step: int | None = None  # step of its checkpoint to start from; None: the newest valid one
# ---- Horizon: the first positive one counts
num_iterations = -1         # [-1, 1..] optimizer steps
target_flops = -1.0         # FLOPs of the whole run
target_param_data_ratio = 8.0  # training tokens per parameter of matrices and head
# ---- Batch
device_batch_size = -1      # [-1, 1..] rows per rank and micro-batch; -1: up to 16 on a CUDA GPU, else up to 8
total_batch_size = -1       # [-1, 1..] tokens per optimizer step, over all ranks; -1: chosen, and rates scaled to it
# ---- Sharding over the ranks
zero_stage: Literal[0, 1, 2, 3] = 2  # sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters
shard_size = -1             # [-1, 1..] ranks that share one copy; groups of this size are replicas; -1: all ranks
pipeline_stages = 1         # [1..] groups of ranks, each with its own layers; micro-batches go from one to the next
# ---- Optimizers: -1 is chosen from steps and layers; see Recipe in nanochat/optim/recipe.py
embedding_lr = -1.0         # [-1, 0..] AdamW, for a model 768 wide
unembedding_lr = -1.0       # [-1, 0..] AdamW, for a model 768 wide
matrix_lr = 0.02            # [0..] Muon
weight_decay = -1.0         # [-1, 0..] for Muon's matrices; falls to zero
grad_clip = 0.0             # [-1, 0..] largest norm of the averaged gradient; 0 or -1: no limit
warmup_steps = -1           # [-1, 0..] steps over which the learning rate rises; at most a tenth of the run
warmdown_ratio = -1.0       # [-1, 0..1] share of the run, at its end, over which the learning rates fall
# ---- Evaluation and logging
eval_every = 250            # [-1..] steps between validations, also before the first step and after the last; -1: never
eval_tokens = -1            # [-1, 1..] tokens per validation, up to one pass; -1: 10,485,760 on a CUDA GPU, else 65,536
sample_every = 2000         # [-1..] steps between samples, also before the first step and after the last; -1: never
# ---- Checkpoints
save_every = -1             # [-1..] steps between checkpoints, besides one each half hour and at the end; -1: no others
keep_last = -1              # [-1, 1..] checkpoints to keep; -1: all, but only the newest two half-hourly ones
resume: Literal["", "auto"] = ""  # auto: continue from the newest valid checkpoint, or start if there is none
resume_from_step = -1       # continue from this step's checkpoint; -1: do not
config = configure(globals())

import math
from functools import partial

import torch

from nanochat.data.batch_shape import BatchShape
from nanochat.data.dataloader import document_loader
from nanochat.data.embedded import ensure_dataset, ensure_tokenizer, entropy_floor, sample_prompts
from nanochat.data.shard_reader import data_shares
from nanochat.eval.loss_eval import evaluate_split, print_samples
from nanochat.model.fp8 import fp8_pays, use_fp8
from nanochat.model.gpt import model_without_memory
from nanochat.model.gpt_config import config_from_depth
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.pipeline import Pipeline
from nanochat.optim.recipe import accumulation_steps, choose, rows_at_a_time
from nanochat.optim.schedule import is_due, set_rates
from nanochat.optim.zero import shard_model
from nanochat.runtime.collectives import from_rank0
from nanochat.runtime.compiling import eagerly
from nanochat.runtime.console import print0
from nanochat.runtime.distributed import set_up
from nanochat.training.checkpoint import changed_settings, require_same_model
from nanochat.training.resharding import load_training_state, stored_weights
from nanochat.training.session import Session
from nanochat.training.starting import continued_model, find_start

# ---- Setup: the ranks join each other; rank 0 makes missing files (the embedded data, its tokenizer)
rank, world_size, device, model_dtype = set_up(device_type, dtype)
data_sets = list(data_shares(data))  # the first one's validation score is the run's
from_rank0(ensure_dataset, data)

# ---- Sizes that are not set: for this device. A model that is trained further keeps its own (below)
large = device.type == "cuda"
if depth == -1:
    depth = 20 if large else 4
if max_seq_len == -1:
    max_seq_len = 2048 if large else 512
if eval_tokens == -1:
    eval_tokens = 10_485_760 if large else 65_536

# ---- Where to start: the folder of checkpoints; the checkpoint to resume, or to read weights from, if there is one
start = find_start("base", "base", config, default_tag=f"d{depth}")

# ---- Model: first its shapes, without memory, so that wrong settings fail at once
if start.origin:
    model_config, tokenizer = continued_model(start, config)
else:
    arch = arch or "modern"
    tokenizer = from_rank0(ensure_tokenizer, data_sets[0])
    bos = tokenizer.get_bos_token_id()
    model_config = config_from_depth(depth, tokenizer.get_vocab_size(), max_seq_len, arch, bos)
meta = start.resumed
if meta:
    require_same_model(start.weights, meta, model_config, tokenizer, data_sets[0])
depth, max_seq_len = model_config.n_layer, model_config.sequence_len
model = model_without_memory(model_config)
flops_per_token = model.estimate_flops()
parameters = sum(p.numel() for p in model.parameters())
print0(f"model: depth {depth}, width {model_config.n_embd}, {model_config.n_head} heads, "
       f"vocabulary {model_config.vocab_size:,}, {parameters:,} parameters")

# ---- Horizon, batch, recipe. A resumed run keeps its batch, recipe and rate factors; the horizon is this call's
# A chosen batch is a multiple of these rows. 1, 2, 4, 8 and 16 ranks share one default: they get the same loss curve.
rows_at_once = math.lcm(16, world_size) if device_batch_size == -1 else device_batch_size * world_size
total_batch_size, num_iterations, recipe, rate_factor, decay_factor = choose(
    config, model, rows_at_once * max_seq_len, meta)

# ---- Micro-steps. In a pipeline a micro-step has several micro-batches in flight; otherwise it has one
pipeline = Pipeline(model_config, pipeline_stages, zero_stage, rank, world_size)
model.keep_layers(pipeline.layers)  # removes the layers of other pipeline stages
if device_batch_size == -1:
    device_batch_size = rows_at_a_time(total_batch_size // max_seq_len, pipeline.dp_ranks, 16 if large else 8,
                                       pipeline_stages)
micro_steps = accumulation_steps(total_batch_size, device_batch_size, max_seq_len, pipeline.dp_ranks, pipeline_stages)
micro_batches, grad_accum_steps = (1, micro_steps) if pipeline_stages == 1 else (micro_steps, 1)
# The share of a step's micro-batches that have rows, the same on all ranks; the others, if the ranks do not divide the
# batch, have a loss of 0
loss_weight = total_batch_size / (
    grad_accum_steps * micro_batches * device_batch_size * max_seq_len * pipeline.dp_ranks)
print0(f"batch: {total_batch_size:,} tokens = {device_batch_size} rows x {max_seq_len} x {pipeline.dp_ranks} rank(s) "
       f"x {micro_steps} micro-step(s){pipeline.describe()}")
if loss_weight < 1:
    print0(f"{pipeline.dp_ranks} rank(s) do not divide the batch: {1 - loss_weight:.0%} of the micro-batches are empty")
total_tokens = num_iterations * total_batch_size
print0(f"run: {num_iterations:,} steps, {total_tokens:,} tokens, {total_tokens * flops_per_token:.2e} FLOPs")

# ---- Weights: drawn in float32, or read from a checkpoint; the same on every rank. One unit (embedding, block, head)
# at a time is drawn, and each rank keeps its part, as zero_stage says. The model is never drawn as a whole
if fp8 == "auto":
    fp8 = compile and fp8_pays(device, model_config.n_embd, device_batch_size * max_seq_len)
if fp8:
    use_fp8(model, device, device_batch_size * max_seq_len)
    print0("fp8: products in 8 bits, but not in evaluations")
model.activation_checkpointing = activation_checkpointing
weights = stored_weights(start.weights) if start.weights else partial(model.draw, seed=seed)
sharding = shard_model(model, model.units(), device, model_dtype, zero_stage, shard_size, pipeline_stages, weights)
del weights  # closes the checkpoint's file
optimizers = setup_optimizers(model, sharding, recipe.unembedding_lr, recipe.embedding_lr, matrix_lr,
                              recipe.weight_decay * decay_factor, rate_factor, recipe.ema_nesterov)

# ---- Exact resume: masters and moments here; the place in the data and (in Session) the smoothed loss below
config |= recipe._asdict()  # checkpoints and the report show what was chosen
config |= {"depth": depth, "max_seq_len": max_seq_len, "arch": arch, "eval_tokens": eval_tokens, "fp8": fp8,
           "device_batch_size": device_batch_size}
if meta:
    load_training_state(start.weights, sharding, optimizers)
    print0(f"resuming from {start.weights}{changed_settings(meta, config)}")

# ---- Data: the rows of a step depend on its number, the seed and the batch, not on the number of ranks
shape = BatchShape(micro_batches * device_batch_size, max_seq_len, pipeline.dp_rank, pipeline.dp_ranks, device)
train_loader = document_loader(data, "train", tokenizer, shape, rows_per_step=total_batch_size // max_seq_len,
                               seed=seed, state=meta["data_state"] if meta else None)
floor = entropy_floor(data_sets[0])  # of the held-out text; None if it is unknown
inputs, targets, cu_seqlens, data_state = next(train_loader)  # data_state: where their step begins in the data

session = Session(start, config, sharding, optimizers, tokenizer, num_iterations, total_batch_size,
                  rate_scales=(rate_factor, decay_factor), data=data, origin=start.origin)
metrics = session.metrics
pipeline.connect(model, sharding, micro_batches, device_batch_size)
while True:
    step = session.step

    # --- checkpoint of the parameters before this step, if one is due
    session.save_if_due(data_state=data_state)
    if metrics.stop_requested:  # some rank got SIGTERM, SIGINT or SIGHUP; all ranks know, on a GPU a step later
        break

    # --- evaluation of the same parameters
    validate = is_due(step, num_iterations, eval_every)
    show_samples = is_due(step, num_iterations, sample_every)
    if validate or show_samples:
        with session.evaluation():
            evaluated = pipeline.whole_model(model, sharding)
            if validate:
                for name in data_sets:
                    bpb = evaluate_split(evaluated, name, "val", tokenizer, eval_tokens, device_batch_size, max_seq_len)
                    if name == data_sets[0]:
                        metrics.log_validation(step, bpb, floor)
                    else:
                        metrics.log(step, {f"val/bpb of {name}": bpb}, f"validation of {name} {bpb:.4f} bits per byte")
            if show_samples:
                if step == 0 and not start.weights:
                    print0("the model is untrained, so it writes noise:")
                with eagerly():
                    samples = print_samples(evaluated, tokenizer, sample_prompts(data_sets[0]), max_tokens=24)
                metrics.log(step, {"sample": samples})
    if metrics.stop_requested:  # on some rank, during the evaluation: the top of the loop saves and stops
        continue
    if step >= num_iterations:
        break

    # --- one optimizer step, on zero_stage 2. N ranks share one copy (N = shard_size; groups of N are replicas). Rank r
    # of N holds all weights in model_dtype. Of every unit (embedding, block, head) it holds 1/N of the float32 masters
    # and moments. (NorMuon's second moments are not cut: r holds them for the matrices that it orthogonalizes.)
    #   forward   before a unit runs, r waits for its weights; their all-gather began after the last update
    #   backward  in every micro-step (stage 1: the last), a unit whose gradients are complete is reduce-scattered in
    #             float32: r receives the sum of its 1/N over the ranks, adds it to its own sum, and has freed its
    #             whole gradients. At most two units travel at once; the last two go on during the next forward pass,
    #             in the last micro-step r waits for them. Then replicas all-reduce their sums, unit by unit
    #   reduce    one all-reduce of six numbers over all ranks: loss, its weight (0 in a pipeline's earlier stages),
    #             squared norm, three flags: not finite, stop, save. r divides loss and gradients by the summed weight
    #             and clips
    #   update    AdamW: r updates its 1/N. Muon: an all-to-all for each shape brings each matrix's gradient, mixed with
    #             its momentum, to one rank, which orthogonalizes it; a second one brings the parts back; r updates its
    #             1/N. EMA-Nesterov, if the recipe has it: r keeps the mean of its 1/N; in mid-run r also moves its 1/N
    #             further in the mean direction of its moves; after the last step r blends it with the mean
    #   gather    r's 1/N of the new weights is all-gathered, unit by unit, while the next step begins; r frees its
    #             sum of gradients, so there is no zero_grad
    step_loss = torch.zeros((), device=device)
    for micro_step in range(grad_accum_steps):
        with sharding.accumulate(last=micro_step == grad_accum_steps - 1):
            if pipeline_stages > 1:
                loss = pipeline.step(inputs, targets, cu_seqlens)  # both passes of all micro-batches, interleaved
            else:
                # Its share of the step's mean over all targets.
                loss = model(inputs, targets, cu_seqlens=cu_seqlens) / grad_accum_steps
                loss.backward()
        step_loss += loss.detach()
        inputs, targets, cu_seqlens, data_state = next(train_loader)  # read ahead by a thread: the host does not wait

    # In a pipeline only the last stage has a loss.
    stats = sharding.reduce_and_clip(step_loss, loss_weight if pipeline.is_last else 0.0, grad_clip,
                                     session.requests())
    rates = recipe.at(step, num_iterations)  # this step's: warmup, constant, warmdown
    set_rates(optimizers, rates)
    for optimizer in optimizers:
        optimizer.step(stats)  # changes nothing on any rank if any rank's loss or gradient is not finite
    if recipe.ema_nesterov and step + 1 == num_iterations:
        optimizers[-1].end_run(recipe.final_average, model.roles())
    sharding.all_gather_params()
    session.end_step(stats, rates.muon)  # session.step += 1; on a GPU the host reads the numbers of the step before

# ---- End
train_loader.close()
session.end()  # a run that was stopped exits here
results = {"parameters": f"{parameters:,}", "tokens trained on": f"{total_tokens:,}"} | metrics.results()
session.report("Base model: pretraining", results)
