"""
A pipeline's bubble, from steps that 2 and 4 ranks really take: the table of docs/pipeline.md.

    python -m bench.pipeline --write    # without --write it is only printed

Each rank notes its passes and their processor time. From these a schedule is computed: a pass begins when its rank is
free and its input exists. So the bubble is that of one core per rank and free links, even on a busy machine.
"""
from configurator import configure

write = False               # put the table into docs/pipeline.md
configure(globals())

import statistics
import time
from functools import cache, partial

import torch
from torch.distributed.pipelining import PipelineStage

from bench.harness import PageBlock, on_ranks, random_tokens
from nanochat.data.batch_shape import document_offsets
from nanochat.model.gpt import model_without_memory
from nanochat.model.gpt_config import GPTConfig
from nanochat.optim.pipeline import Pipeline
from nanochat.optim.zero import shard_model
from nanochat.runtime.collectives import gather_objects
from nanochat.runtime.tables import markdown_table

block = PageBlock("pipeline.md", "bench.pipeline", write)

CONFIG = GPTConfig(sequence_len=128, vocab_size=256, n_layer=8, n_embd=256, n_head=2, n_kv_head=2)
STEPS = 4                   # the first one allocates and does not count


def timed_steps(rank: int, ranks: int, micro_batches: int) -> list[list[dict]]:
    """For each step and rank {(forward?, micro-batch): seconds}, in the order of the passes."""
    passes = {}

    def timed(is_forward: bool, function):
        def run(stage, micro_batch: int, *args, **settings):
            began = time.thread_time()
            result = function(stage, micro_batch, *args, **settings)
            passes[is_forward, micro_batch] = time.thread_time() - began
            return result
        return run

    PipelineStage.forward_one_chunk = timed(True, PipelineStage.forward_one_chunk)
    PipelineStage.backward_one_chunk = timed(False, PipelineStage.backward_one_chunk)
    model = model_without_memory(CONFIG)
    pipeline = Pipeline(CONFIG, ranks, 0, rank, ranks)
    model.keep_layers(pipeline.layers)
    sharding = shard_model(model, model.units(), torch.device("cpu"), torch.float32, 0, pipeline_stages=ranks,
                           weights=partial(model.draw, seed=0))
    pipeline.connect(model, sharding, micro_batches, rows=1)
    tokens = random_tokens(CONFIG.vocab_size, micro_batches, CONFIG.sequence_len + 1)
    found = []
    for _ in range(STEPS):
        passes.clear()
        with sharding.accumulate(last=True):
            pipeline.step(tokens[:, :-1], tokens[:, 1:], document_offsets([], micro_batches, CONFIG.sequence_len))
        sharding.collect_gradients()
        found.append(gather_objects(passes))
    return found[1:]


def bubble(of_ranks: list[dict]) -> float:
    """The share of a step's time in which a stage computes nothing, on average over stages."""
    stages = range(len(of_ranks))

    @cache
    def end(stage: int, name: tuple) -> float:
        if stage not in stages:
            return 0.0
        names = list(of_ranks[stage])
        i = names.index(name)
        free = end(stage, names[i - 1]) if i else 0.0
        source = stage - 1 if name[0] else stage + 1
        return max(free, end(source, name)) + of_ranks[stage][name]

    busy = sum(sum(passes.values()) for passes in of_ranks)
    return 1 - busy / (len(stages) * max(end(stage, list(of_ranks[stage])[-1]) for stage in stages))


lines = []
for stages in (2, 4):
    for micro_batches in (4, 8, 16):
        measured = statistics.median(map(bubble, on_ranks(stages, timed_steps, micro_batches)))
        lines.append([stages, micro_batches, f"{(stages - 1) / (micro_batches + stages - 1):.1%}", f"{measured:.1%}"])
block.show(markdown_table(["stages", "micro-batches", "bubble (P − 1)/(m + P − 1)", "measured"], lines, (0, 1)))
