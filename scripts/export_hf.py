"""
Export a model of any stage as a folder that Hugging Face's transformers loads as it is, for others to use.

    python -m scripts.export_hf --source=sft --output=my-model     # scripts.import_hf is the way back
"""
from typing import Literal

from configurator import configure

# ---- Model
source: Literal["base", "mid", "sft", "rl"] = "sft"  # stage of the model
model_tag: str | None = None  # folder of its checkpoints; None: the only one there is
step: int | None = None     # [0..] the checkpoint's step; None: the newest valid one
# ---- The folder
output = ""                 # its path
configure(globals())

# The folder has weights, configuration, tokenizer, chat template and model card; for a modern model also its code, for
# trust_remote_code=True. `hf upload NAME/MODEL my-model --private` uploads it to the hub.
from pathlib import Path

from nanochat.hf.card import model_card
from nanochat.hf.model_files import export
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import recover_folder, write_folder_aside, write_text
from nanochat.training.checkpoint import find_model, read_meta

if not output:
    raise UserError("say where the folder is to be, such as --output=my-model")
folder = Path(output).expanduser().resolve()
# A killed export may have left some files.
recover_folder(folder)
# Never removed: it may be somebody's work.
if folder.exists():
    raise UserError(f"{folder} exists; choose another --output, or remove it")

checkpoint = find_model(source, model_tag, step)
meta = read_meta(checkpoint)
print(f"exporting {checkpoint}")
with write_folder_aside(folder) as aside:
    parameters = export(checkpoint, meta, aside)
    write_text(aside / "README.md", model_card(source, checkpoint, parameters))
size = sum(path.stat().st_size for path in folder.iterdir())
print(f"wrote {folder}: {parameters:,} parameters, {size / 1e6:,.1f} MB; its README.md says how to use it")
