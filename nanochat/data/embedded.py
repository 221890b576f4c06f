"""
The embedded data sets, `tinyworld` and `python`: a run that finds one missing, or its tokenizer, makes it with the
command that a user would give. The command is a process of its own, so training imports nothing of what makes data.
What `tinyworld` knows of itself is in its manifest.
"""
import subprocess
import sys
from itertools import islice

from nanochat.data.shard_reader import OFFLINE, data_shares, dataset_dir, iter_texts, load_manifest
from nanochat.data.tokenizer import FILE_NAME, Tokenizer, get_tokenizer, tokenizer_dir
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError

VOCAB_SIZE = 8192  # of a tokenizer that is made because there is none


def ensure_dataset(data: str) -> None:
    """
    Make `tinyworld` or `python` if it is not there; any other data set must be there, see `load_manifest`. data: as
    `data_shares` takes it.
    """
    for name in data_shares(data):
        if name in OFFLINE and not (dataset_dir(name) / "manifest.json").exists():
            run_command("scripts.dataset", f"--source={name}")
        load_manifest(name)


def ensure_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a data set; for an embedded one it is trained now if it is not there yet."""
    if name in OFFLINE and not (tokenizer_dir(name) / FILE_NAME).is_file():
        run_command("scripts.tok_train", f"--data={name}", f"--vocab_size={VOCAB_SIZE}")
    return get_tokenizer(name)


def run_command(module: str, *settings: str) -> None:
    """Run one of our commands to its end. UserError if it fails; it has printed why."""
    command = ["-m", module, *settings]
    print("making what is missing: python", *command, flush=True)
    if subprocess.run([sys.executable, *command]).returncode != 0:
        raise UserError(f"python {' '.join(command)} failed; the reason is above")


def entropy_floor(data: str) -> float | None:
    """
    Bits per byte of a data set's validation documents under the process that made them, which no model can beat on
    average. None if it is unknown, as for all data but tinyworld's.
    """
    manifest = load_manifest(data)
    if manifest["source"] == "tinyworld" and "floor" not in manifest:
        print0(f"the entropy of {data} is unknown, because an older version made it; scripts.dataset makes the same "
               f"texts with it, from these settings: {manifest['settings']}")
    return manifest.get("floor")


def sample_prompts(data: str) -> list[str]:
    """Prompts for a model's samples: the data set's own, or beginnings of its validation documents."""
    if prompts := load_manifest(data).get("prompts"):
        return prompts
    # Whole words, or ten characters of a script without blanks.
    texts = (" ".join(text[:200].split())[:40] for text in iter_texts(data, "val"))
    return [text.rpartition(" ")[0] or text[:10] for text in islice(filter(None, texts), 6)]
