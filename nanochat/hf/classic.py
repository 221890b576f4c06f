"""
Reading published nanochat checkpoints of the classic layout: model_NNNNNN.pt, meta_NNNNNN.json and tokenizer.pkl.

Files from strangers: nothing in them is run. Weights are loaded with `weights_only`; the tokenizer is a pickle, of which
only one class is known, and that as an inert record.
"""
import io
import pickle
import pickletools
import re
from pathlib import Path

import torch
from torch import Tensor

from nanochat.errors import UserError
from nanochat.gpt import LOGIT_SOFTCAP, ROPE_THETA
from nanochat.hf.model import Imported, read_json, to_config
from nanochat.hf.tokenizer import from_hf, from_ranks
from nanochat.tokenizer import Tokenizer


def list_models(folder: Path) -> dict[int, Path]:
    """The model files of a folder by their step, rising."""
    names = ((re.fullmatch(r"model_(\d+)\.pt", path.name), path) for path in folder.glob("model_*.pt"))
    return dict(sorted((int(match[1]), path) for match, path in names if match))  # as numbers: 1000000 is newer than 999999


def read_folder(folder: Path, tokenizer_path: Path | None = None, step: int | None = None) -> Imported:
    """The checkpoint of a step, None for the newest. tokenizer_path: a tokenizer.pkl or tokenizer.json that lies elsewhere."""
    models = list_models(folder)
    step = max(models) if step is None else step
    if step not in models:
        raise UserError(f"there is no model of step {step} in {folder} (steps there: {', '.join(map(str, models))})")
    meta_path = models[step].with_name(models[step].name.replace("model_", "meta_", 1)).with_suffix(".json")
    meta = read_json(meta_path)
    if not isinstance(meta.get("model_config"), dict):
        raise UserError(f"{meta_path} has no model_config")
    config = to_config(meta["model_config"], meta_path, {})
    paths = [tokenizer_path] if tokenizer_path else [folder / "tokenizer.pkl", folder / "tokenizer.json"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UserError(f"there is no {' or '.join(path.name for path in paths)} in {paths[0].parent}; say where with --tokenizer=PATH")
    tokenizer = from_hf(path) if path.suffix == ".json" else read_tokenizer(path)
    notes = [f"such files do not tell the softcap and the rotary base: {LOGIT_SOFTCAP:g} and {ROPE_THETA:g}, those of the classic layout, are taken"]
    return Imported(config, read_weights(models[step]), {}, tokenizer, step, notes)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a state_dict, without the prefix that compiling leaves."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = "it holds more than tensors" if isinstance(error, pickle.UnpicklingError) else str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()):
        raise UserError(f"{path} holds more than tensors by name")
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}


class Record:
    """What stands for a tiktoken.Encoding: takes whatever state it is given, and does nothing."""

    def __setstate__(self, state: object) -> None:
        self.state = state


class Reader(pickle.Unpickler):
    """Builds plain data and Records. A pickle runs nothing but what `find_class` gives it."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return Record
        raise UserError(f"it asks for {module}.{name}; expected nothing but tiktoken.core.Encoding")


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.pkl, a pickled tiktoken.Encoding. UserError for anything else; nothing in it is run."""
    try:
        pickled = path.read_bytes()
        for opcode, argument, _ in pickletools.genops(pickled):  # a list of instructions: nothing is run
            if "PUT" in opcode.name and argument > len(pickled):  # memory is reserved up to the largest place
                raise UserError(f"it puts something into place {argument:,}, beyond its own size")
        state = getattr(Reader(io.BytesIO(pickled)).load(), "state", None)
    except UserError as error:
        raise UserError(f"{path} is not read: {error}") from None
    except Exception as error:  # whatever damaged opcodes make of the stack
        raise UserError(f"{path} is no pickle of a tokenizer: {type(error).__name__}: {error}") from error
    fields = state if isinstance(state, dict) else {}
    ranks, pattern, specials = (fields.get(name) for name in ("mergeable_ranks", "pat_str", "special_tokens"))
    plain = isinstance(ranks, dict) and isinstance(specials, dict) and type(pattern) is str and all(
        type(token) is kind and type(rank) is int for table, kind in ((ranks, bytes), (specials, str)) for token, rank in table.items()
    )
    if not plain:
        raise UserError(f"{path} holds no vocabulary of a tiktoken.Encoding")
    return from_ranks(ranks, pattern, specials, path)
