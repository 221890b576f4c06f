"""
What copying costs a trained assistant: milliseconds a token, many answers at once, with it and without in turns.

    python -m bench.copying --model_tag=assistant-d2
"""
from configurator import configure

source = "rl"               # stage of the model: mid, sft or rl
model_tag: str | None = None  # folder of its checkpoints; None: the only one there is
task = "lookup"             # held-out problems to answer
problems = 200              # [1..] how many of them
batch_size = 64             # [1..] answers written together
temperature = 0.0           # [0..] 0: greedy
repeats = 7                 # [1..] rounds
configure(globals())

import time
from statistics import median

from nanochat.eval.task_eval import generate_answers
from nanochat.inference.sampling import SamplingParams
from nanochat.runtime.distributed import compute_init
from nanochat.tasks import make_task
from nanochat.training.checkpoint import find_model, load_checkpoint

*_, device = compute_init("")
model, tokenizer, _ = load_checkpoint(find_model(source, model_tag, None), device)
asked = make_task(task, "test")
sampling = SamplingParams(128, temperature=temperature, seed=1)
took: dict[bool, list[float]] = {True: [], False: []}
for _ in range(repeats):
    for copying, times in took.items():
        begun = time.perf_counter()
        answers = generate_answers(
            asked, range(problems), model, tokenizer, sampling, 1, batch_size, copying)
        times.append(1000 * (time.perf_counter() - begun) / sum(len(answer.tokens) for answer, in answers))
for name, times in ("with", took[True]), ("without", took[False]):
    print(f"{name} copying: fastest {min(times):.3f} ms a token, median {median(times):.3f}")
print(f"ratio {min(took[True]) / min(took[False]):.2f}, of medians {median(took[True]) / median(took[False]):.2f}")
