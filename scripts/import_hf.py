"""
Import a model from a folder of Hugging Face's NanoChatForCausalLM, or a published nanochat checkpoint of the classic
layout (model_NNNNNN.pt, meta_NNNNNN.json, tokenizer.pkl), as a checkpoint here.

    python -m scripts.import_hf --input=their-model --source=base --model_tag=theirs
    python -m scripts.mid_train --model_tag=theirs

Nothing in those files is run. A model that would not be the same one here is refused.
"""
import shutil
from pathlib import Path
from typing import Literal

from configurator import configure
from nanochat.hf import classic, model as hf
from nanochat.checkpoint import checkpoint_dir, list_steps, step_dir
from nanochat.errors import UserError
from nanochat.saving import save_weights

# ---- From
input = ""                  # the folder
tokenizer = ""              # its tokenizer.pkl or tokenizer.json, where that lies elsewhere
step: int | None = None     # of a classic folder's checkpoints; None: the newest
# ---- To
source: Literal["base", "mid", "sft", "rl"] = "base"  # stage the model is at: the next one can begin with it
model_tag: str | None = None  # folder of its checkpoints; None: named like the input
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the weights; auto: as they are there, float32 where they are mixed
overwrite = False           # remove the checkpoints that are there
config = configure(globals())

if not input:
    raise UserError("say which folder to import, such as --input=their-model")
folder = Path(input).expanduser().resolve()
if not folder.is_dir():
    raise UserError(f"there is no folder {folder}")
if tokenizer and not Path(tokenizer).expanduser().is_file():
    raise UserError(f"there is no file {tokenizer}; --tokenizer takes a tokenizer.pkl or tokenizer.json")
checkpoints = checkpoint_dir(source, model_tag or folder.name)
before = list_steps(checkpoints)
if before and not overwrite:
    raise UserError(f"{checkpoints} has checkpoints; choose another --model_tag, or --overwrite")

tokenizer_path = Path(tokenizer).expanduser().resolve() if tokenizer else None
is_classic = bool(classic.list_models(folder))
if step is not None and not is_classic:
    raise UserError(f"step={step} chooses among the checkpoints of a classic folder, and {folder} is none; leave it out")
there = classic.read_folder(folder, tokenizer_path, step) if is_classic else hf.read_folder(folder, tokenizer_path)
weights = hf.fit(there, dtype, folder)
for note in there.notes:
    print(f"note: {note}")
meta = {"config": config, "imported": "classic" if is_classic else "hf"}
saved = save_weights(checkpoints, there.step, weights, there.tokenizer, there.config, meta)
for old in before:
    if step_dir(checkpoints, old) != saved:
        shutil.rmtree(step_dir(checkpoints, old))
dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
print(f"imported {sum(tensor.numel() for tensor in weights.values()):,} parameters, vocabulary padded, in {dtypes.pop()}: {saved}")
print(f"talk to it: python -m scripts.chat_cli --source={source} --model_tag={checkpoints.name}")
