"""
Import a folder of scripts.export_hf or of Hugging Face's NanoChatForCausalLM, or a published nanochat checkpoint.

    python -m scripts.import_hf --input=their-model --source=base --model_tag=theirs
"""
from typing import Literal

from configurator import configure

# ---- From
input = ""                  # the folder
# ---- To
source: Literal["base", "mid", "sft", "rl"] = "base"  # stage of the model; the next stage can start from it
model_tag: str | None = None  # folder of its checkpoints; None: the input's name
config = configure(globals())

# Published checkpoints have model_NNNNNN.pt, meta_NNNNNN.json, tokenizer.pkl. No code in those files is run.
# A model that would not be the same here is refused.
from pathlib import Path

from nanochat.hf import classic
from nanochat.hf import model_files as hf
from nanochat.runtime.errors import UserError
from nanochat.training.checkpoint import checkpoint_dir, list_steps
from nanochat.training.saving import save_weights

if not input:
    raise UserError("say which folder to import, such as --input=their-model")
folder = Path(input).expanduser().resolve()
if not folder.is_dir():
    raise UserError(f"there is no folder {folder}")
checkpoints = checkpoint_dir(source, model_tag or folder.name)
if list_steps(checkpoints):
    raise UserError(f"{checkpoints} has checkpoints; choose another --model_tag, or remove them")

if classic.list_models(folder):
    there = classic.read_folder(folder)
else:
    there = hf.read_folder(folder)
weights = hf.fit(there, folder)
saved = save_weights(checkpoints, there.step, weights, there.tokenizer, there.config, {"config": config})
parameters = sum(tensor.numel() for tensor in weights.values())
print(f"imported {parameters:,} parameters, vocabulary padded: {saved}")
print(f"talk to it: python -m scripts.chat_cli --source={source} --model_tag={checkpoints.name}")
