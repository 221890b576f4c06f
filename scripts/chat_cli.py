"""
Talk with a model in the terminal; a base model continues the text.

    python -m scripts.chat_cli                        # /help lists what can be typed besides messages
    python -m scripts.chat_cli -p "What is 12 * 3?"   # one answer, then exit
"""
from typing import Literal

from configurator import configure

# ---- Model
source: Literal["auto", "base", "mid", "sft", "rl"] = "auto"  # stage of the model; auto: the last one trained
model_tag: str | None = None  # folder of its checkpoints; None: the only one there is
step: int | None = None     # the checkpoint's step; None: the newest valid one
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best available
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # weights and KV cache; auto: bfloat16 where it is fast
# ---- Answers
p: str | None = None        # a prompt: print the answer to it and exit
temperature = 0.6           # [0..] 0: always the most probable token
top_k = 50                  # [0..] only the k most probable tokens; 0: all
max_new_tokens = 512        # [1..] tokens of an answer
seed: int | None = None     # None: a different answer every time
library: str | None = None  # name of a library to look things up in; None: Python's, if there is one
copying = True              # copy calls and quotations exactly (nanochat/inference/copying.py)
configure(globals())

# Tool calls are shown in brackets: [12*3 = 36]. A passage comes with its place, and with the question's words that it
# lacks: [… (notes/wine.md:14, without "Belgrade")].
import re
import sys

from nanochat.data.conversation import recent, render_prompt, render_text
from nanochat.data.task import never_looks_up
from nanochat.inference.detokenizer import Delta, parts_of
from nanochat.inference.engine import Engine
from nanochat.inference.fresh_tools import open_library
from nanochat.inference.sampling import SamplingParams
from nanochat.runtime.console import print0
from nanochat.runtime.devices import compute_dtype
from nanochat.runtime.distributed import compute_init
from nanochat.runtime.errors import UserError
from nanochat.training.checkpoint import find_model, load_checkpoint, tasks_of
from nanochat.training.records import stage_of

HELP = """\
/clear    begin a new conversation
/quit     end (or Ctrl-D)
/help     show this
Ctrl-C    stop an answer"""
# Printed before a part of this type.
BEFORE = {"python": "[", "python_output": " = ", "text": "] "}

device = compute_init(device_type)
checkpoint = find_model(source, model_tag, step)
stage = stage_of(checkpoint)
model, tokenizer, meta = load_checkpoint(checkpoint, device)
if warning := never_looks_up(tasks_of(stage, checkpoint.parent.name), library):
    # With -p, standard output has only the answer.
    print(warning, file=sys.stderr)
sampling = SamplingParams(max_new_tokens, temperature, top_k, seed=seed, tools=stage != "base")
render = render_text if stage == "base" else render_prompt
engine = Engine(model.to(compute_dtype(dtype, device)), tokenizer, 1, tools=open_library(library, copying))
# Tokens of the context that are reserved for an answer.
room = min(max_new_tokens, engine.context // 2)


def answer(messages: list[dict]) -> None:
    """Print the answer to the last message and append it. If the context is too short, the oldest turns are dropped."""
    kept = recent(messages, lambda some: len(render(tokenizer, {"messages": some})), engine.context - room)
    # May raise, so it comes before turns are dropped.
    prompt = engine.fit(render(tokenizer, {"messages": kept}), sampling)
    if dropped := (len(messages) - len(kept)) // 2:
        print(f"({dropped} of the oldest turns forgotten: the context has {engine.context} tokens)")
    messages[:] = kept
    deltas: list[Delta] = []
    type = "text"
    try:
        engine.tools.refresh()
        for delta in engine.stream(prompt, sampling):
            if delta.type != type:
                closing = "] " if (type, delta.type) == ("python_output", "python") else ""
                print(place_of(deltas) + closing + BEFORE[delta.type], end="")
            print(delta.text, end="", flush=True)
            deltas.append(delta)
            type = delta.type
    except KeyboardInterrupt:
        if p is not None:
            raise
    finally:
        print("" if type == "text" else f"{place_of(deltas)}]")
    messages.append({"role": "assistant", "content": parts_of(deltas)})


def place_of(deltas: list[Delta]) -> str:
    """If the last part is a passage: its file and line, and what it lacks, in parentheses; else ""."""
    passage = engine.tools.source(parts_of(deltas))
    without = f', without "{passage.missing}"' if passage and passage.missing else ""
    return f" ({passage.place}{without})" if passage else ""


about = f"{stage} model of step {meta['step']}"
if stage == "base":
    about += " (it continues a text, and does not chat)"
if p is not None:
    answer([{"role": "user", "content": p}])
    raise SystemExit

# Makes the arrow keys work in input().
import readline  # noqa: E402, F401

print0(f"{about}; /help lists the commands")
messages: list[dict] = []
while True:
    try:
        text = input("> ").strip()
    except EOFError:
        print()
        break
    except KeyboardInterrupt:
        print()
        continue
    if text == "/quit":
        break
    if text == "/clear":
        messages = []
    elif re.fullmatch(r"/\w*", text):
        print(HELP)
    elif text:
        messages.append({"role": "user", "content": text})
        try:
            answer(messages)
        except UserError as error:
            # The message alone is longer than the context.
            print(error)
            messages.pop()
