"""
Talk with a model in the terminal.

    python -m scripts.chat_cli                        # /new begins again, /quit or Ctrl-D ends, Ctrl-C stops an answer
    python -m scripts.chat_cli -p "What is 12 * 3?"   # one answer, and out

What the model has the calculator compute is shown in brackets: [12*3 = 36].
"""
import contextlib
import sys
from typing import Literal

from configurator import configure
from nanochat.checkpoint import load_model
from nanochat.conversation import render_prompt
from nanochat.distributed import compute_dtype, compute_init, print0
from nanochat.engine import Engine
from nanochat.errors import UserError
from nanochat.pieces import Piece, parts_of
from nanochat.sampling import Sampling

# ---- Model
source: Literal["base", "mid", "sft", "rl"] = "sft"  # stage of the model
model_tag: str | None = None  # folder of its checkpoints; None: the only one there is
step: int | None = None     # of the checkpoint; None: the newest valid one
device_type = ""            # cuda | mps | cpu; empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of weights and cache; auto: bfloat16 where it is fast
# ---- Answers
p: str | None = None        # a prompt: print the answer to it and end
temperature = 0.6           # 0: always the most probable token
top_k = 50                  # only the k most probable tokens; 0: all
max_new_tokens = 256        # of an answer
seed: int | None = None     # None: another answer every time
config = configure(globals())

sampling = Sampling(max_new_tokens, temperature, top_k, seed=seed)
sampling.check()
*_, device = compute_init(device_type)
model, tokenizer, meta = load_model(source, device, "eval", model_tag, step)
engine = Engine(model.to(compute_dtype(dtype, device)), tokenizer, max_batch=1)
room = min(max_new_tokens, engine.context // 4)  # tokens that an answer should find free
DIM, PLAIN = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")


def show(pieces: list[Piece], piece: Piece | None) -> None:
    """Print the next piece of an answer, or what ends it (None); the tool's part in brackets and dim."""
    before, now = pieces[-1].type if pieces else "text", piece.type if piece else "text"
    if before != now:
        print({"text": "]" + PLAIN + " " * bool(piece), "python_output": " = "}.get(now, DIM + "[" if before == "text" else "; "), end="")
    print(piece.text if piece else "", end="", flush=True)


def answer(messages: list[dict]) -> None:
    """Print the answer to the last message and append it. The oldest turns go where the context is too short for all."""
    dropped = 0
    while len(prompt := render_prompt(tokenizer, {"messages": messages})) + room > engine.context and len(messages) > 1:
        del messages[:2]  # what the user said, and the answer
        dropped += 1
    if dropped:
        print(f"{DIM}({dropped} of the oldest turns forgotten: the context has {engine.context} tokens){PLAIN}")
    pieces: list[Piece] = []
    try:
        for piece in engine.stream(prompt, sampling):
            show(pieces, piece)
            pieces.append(piece)
    except KeyboardInterrupt:
        if p is not None:
            raise
    finally:
        show(pieces, None)
        print()
    messages.append({"role": "assistant", "content": parts_of(pieces)})


if p is not None:
    answer([{"role": "user", "content": p}])
    raise SystemExit

with contextlib.suppress(ImportError):  # not on Windows
    import readline  # noqa: F401  the arrow keys work in input() from here on

print0(f"{source} model of step {meta['step']}; /new begins again, /quit ends, Ctrl-C stops an answer")
messages: list[dict] = []
while True:
    try:
        text = input("> ").strip()
    except EOFError:
        break
    except KeyboardInterrupt:
        print()
        continue
    if text == "/quit":
        break
    if text == "/new":
        messages = []
        continue
    if not text:
        continue
    messages.append({"role": "user", "content": text})
    try:
        answer(messages)
    except UserError as error:  # a message that is longer than the context, even alone
        print(f"{error}")
        messages.pop()
