"""
Reading published nanochat checkpoints of the classic layout: model_NNNNNN.pt, meta_NNNNNN.json and tokenizer.pkl.

These are files from strangers, so nothing in them is run. Weights are loaded with `weights_only`; the tokenizer is a
pickle that may hold one class only, read as an inert record.
"""
import io
import pickle
from pathlib import Path

import torch
from torch import Tensor

from nanochat.data.tokenizer import Tokenizer
from nanochat.hf.model_files import Imported, read_json, to_config
from nanochat.hf.tokenizer_files import from_ranks
from nanochat.runtime.errors import UserError, first_line


def list_models(folder: Path) -> list[int]:
    """The steps of the model files in a folder."""
    numbers = [path.stem.removeprefix("model_") for path in folder.glob("model_*.pt")]
    return [int(number) for number in numbers if number.isdecimal()]


def read_folder(folder: Path) -> Imported:
    """The newest checkpoint. UserError for anything that would not be the same model here."""
    # By number: 1000000 is newer than 999999.
    step = max(list_models(folder))
    path = folder / f"meta_{step:06d}.json"
    # These files leave out the softcap and the rotary base: GPTConfig's defaults are the classic layout's.
    config = to_config(read_json(path).get("model_config", {}), path)
    tokenizer = folder / "tokenizer.pkl"
    if not tokenizer.is_file():
        raise UserError(f"there is no {tokenizer}; copy the model's tokenizer there")
    return Imported(config, read_weights(folder / f"model_{step:06d}.pt"), read_tokenizer(tokenizer), step)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a state_dict, without the prefix that compiling leaves."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {name.removeprefix("_orig_mod."): tensor.detach() for name, tensor in state.items()}
    except Exception as error:  # damaged files can raise anything; UnpicklingError if there is more than tensors
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error


class Record:
    """Stands for a tiktoken.Encoding: it takes any state, and does nothing."""

    def __setstate__(self, state: object) -> None:
        self.state = state


class Reader(pickle.Unpickler):
    """Builds plain data and Records. A pickle runs nothing but what `find_class` gives it."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return Record
        raise pickle.UnpicklingError(f"it needs {module}.{name}; expected nothing but tiktoken.core.Encoding")


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.pkl, a pickled tiktoken.Encoding. UserError for anything else; it runs nothing."""
    try:
        state = Reader(io.BytesIO(path.read_bytes())).load().state
        fields = state["mergeable_ranks"], state["pat_str"], state["special_tokens"]
    except Exception as error:  # damaged opcodes can raise anything
        raise UserError(f"{path} is no pickle of a tokenizer: {type(error).__name__}: {error}") from error
    return from_ranks(*fields, path)
