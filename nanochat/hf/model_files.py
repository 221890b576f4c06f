"""
Our checkpoints as folders that Hugging Face's transformers loads, and the way back.

Models of their class NanoChatForCausalLM have the same mathematics under other names. The rows that pad our vocabulary
are cut off: no token uses them, and an import fills them with zeros.

A model with pieces that this class lacks is exported with its code: copies of this program's sources, beside
modeling_nanochat.py. An import neither runs nor compares these files: it reads config.json and weights.
"""
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nanochat.data.tokenizer import Tokenizer
from nanochat.hf.tokenizer_files import TABLES, from_hf, write_json, write_tokenizer
from nanochat.model.gpt import NORM_EPS, parameter_shapes
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.errors import UserError
from nanochat.training.checkpoint import MODEL_FILE
from nanochat.training.saving import write_tensors

MODELING = Path(__file__).with_name("modeling_nanochat.py")
OUR_IMPORT = re.compile(r"^from nanochat\.(\w+)\.(\w+) import", re.MULTILINE)
CONFIG = TABLES["config"]
MODERN = TABLES["modern"]
# The checkpoint's step in config.json, which an import restores.
STEP = "nanochat_step"
WITH_VOCABULARY = ("transformer.wte.weight", "lm_head.weight")
# All fields of a configuration, with the values of a classic model.
OURS = {f.name: f.default for f in fields(GPTConfig)}
# Fields beside CONFIG that a classic model can have: config.json has the base of the rotation, and the other two matter
# only when weights are initialised.
EXPRESSED = {"rope_theta", "embedding_std", "fc_scale"}


class Imported(NamedTuple):
    """A model read from a folder of any format, under our names; dtypes and rows of the vocabulary are the folder's."""

    config: GPTConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    step: int


def is_modern(config: GPTConfig) -> bool:
    """Whether a model has pieces that NanoChatForCausalLM does not have."""
    pieces = OURS.keys() - CONFIG.keys() - EXPRESSED
    return any(getattr(config, name) != OURS[name] for name in pieces)


def their_name(name: str, config: GPTConfig) -> str:
    """The name of one of our parameters in transformers."""
    if is_modern(config):
        return f"gpt.{name}"
    for ours, theirs in TABLES["parameters"].items():
        name = name.replace(ours, theirs)
    return name


def their_config(config: GPTConfig) -> dict:
    """The entries of config.json that describe the mathematics of a model."""
    if is_modern(config):
        return MODERN | {"gpt": vars(config)}
    same = {theirs: getattr(config, ours) for ours, theirs in CONFIG.items()}
    return same | TABLES["classic"] | {
        "final_logit_softcapping": config.softcap or None,
        "intermediate_size": 4 * config.n_embd,
        "head_dim": config.head_dim,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


# ---- Export

def export(checkpoint: Path, meta: dict, folder: Path) -> int:
    """Write everything but the model card into a folder; returns the number of parameters there."""
    config = GPTConfig(**meta["model_config"])
    tokenizer = Tokenizer.load(checkpoint)
    modern = is_modern(config)
    if modern:
        write_code(folder)
    weights = {}
    for name, tensor in load_file(checkpoint / MODEL_FILE).items():
        if name in WITH_VOCABULARY and not modern:
            # Copied: a view would be saved whole.
            tensor = tensor[: config.vocab_size].clone()
        weights[their_name(name, config)] = tensor
    write_tensors(folder / "model.safetensors", weights, {"format": "pt"})

    bos = tokenizer.get_bos_token_id()
    end = tokenizer.encode_special("<|assistant_end|>")
    ids = {"bos_token_id": bos, "eos_token_id": [end, bos], "pad_token_id": bos}
    head = weights[their_name("lm_head.weight", config)]
    described = {"architectures": ["NanoChatForCausalLM"]} | their_config(config) | ids
    described |= {"dtype": str(head.dtype).removeprefix("torch."), STEP: meta["step"]}
    write_json(folder / "config.json", described)
    # Without a mask, generate() hides padding tokens unless they end answers. <|bos|> begins every prompt, so it must
    # not be the padding here.
    write_json(folder / "generation_config.json", ids | {"pad_token_id": end})
    write_tokenizer(tokenizer, config.sequence_len, folder)
    return sum(tensor.numel() for tensor in weights.values())


def write_code(folder: Path) -> None:
    """Write the modelling file and, as nanochat_*.py, every module of this program that it needs."""
    texts = {MODELING.stem: MODELING.read_text(encoding="utf-8")}  # by the name of a file in the folder
    unread = [MODELING.stem]
    while unread:
        for room, module in OUR_IMPORT.findall(texts[unread.pop()]):
            name = f"nanochat_{module}"
            if name not in texts:
                texts[name] = (MODELING.parents[1] / room / f"{module}.py").read_text(encoding="utf-8")
                unread.append(name)
    # transformers 5.0 copies only the files that the modelling file itself imports.
    imports = [f"from .{name} import __name__ as _\n" for name in texts if name != MODELING.stem]
    texts[MODELING.stem] += "\n\n" + "".join(imports)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(OUR_IMPORT.sub(r"from .nanochat_\2 import", text), encoding="utf-8")


# ---- Import

def read_folder(folder: Path) -> Imported:
    """A folder of `export` or a NanoChatForCausalLM. UserError for a model that would not be the same here."""
    path = folder / "config.json"
    there = read_json(path)
    config = our_config(there, path)
    ours = {their_name(name, config): name for name in parameter_shapes(config)}
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise UserError(f"{file} is damaged: {error}") from error
        for name, tensor in tensors.items():
            # `fit` refuses unknown names.
            weights[ours.get(name, name)] = tensor
    return Imported(config, weights, from_hf(folder / "tokenizer.json"), there.get(STEP, 0))


def our_config(there: dict, path: Path) -> GPTConfig:
    """The way back from `their_config`. UserError for a model with other mathematics."""
    kind = there.get("model_type")
    if kind == MODERN["model_type"]:
        return to_config(there.get("gpt", {}), path)
    if kind != "nanochat":
        raise UserError(f"{path} has model_type={kind!r}; only a model with 'nanochat' can be imported, "
                        f"or {MODERN['model_type']!r}")
    # Softcap and rotary base may be left out: GPTConfig has the same defaults as NanoChatConfig.
    same = {ours: there[theirs] for ours, theirs in CONFIG.items() if theirs in there}
    rope = there.get("rope_parameters")
    if isinstance(rope, dict):
        same["rope_theta"] = rope.get("rope_theta")
    config = to_config(same, path)
    for name, expected in their_config(config).items():
        value = there.get(name, expected)
        # Published models have another eps; it changes logits in the fourth digit.
        is_published_eps = name == "rms_norm_eps" and value in (1e-5, 1e-6)
        if value != expected and not is_published_eps:
            raise UserError(f"{path} has {name}={value!r}; only a model with {expected!r} can be imported")
    return config


def read_json(path: Path) -> dict:
    """The object in a JSON file. UserError if it has none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:  # not there, not UTF-8, not JSON, no object
        raise UserError(f"{path} cannot be read: {error}; expected a folder that scripts.export_hf wrote, "
                        "or a published nanochat checkpoint") from error


def to_config(fields: dict, where: Path) -> GPTConfig:
    """The configuration with these fields of a file. UserError for unknown, missing and impossible ones."""
    try:
        return GPTConfig(**fields)
    except (UserError, TypeError) as error:  # TypeError: unknown, missing, or no number
        raise UserError(f"{where} describes no model of this program: {error}") from None


def fit(there: Imported, where: Path) -> dict[str, Tensor]:
    """
    The weights as our checkpoints hold them: every parameter, in bfloat16 if all of them are, else in float32, the
    vocabulary padded. UserError for unknown or missing weights, for other shapes, and for values that are not finite.
    """
    config = there.config
    tokens = there.tokenizer.get_vocab_size()
    if config.vocab_size != tokens:
        raise UserError(f"{where}: the model has {config.vocab_size:,} tokens, its tokenizer {tokens:,}")
    shapes = parameter_shapes(config)
    others = sorted(there.weights.keys() ^ shapes.keys())
    if others:
        raise UserError(f"{where} lacks weights of this program's models of {config.n_layer} layers, or has others: "
                        f"{', '.join(others[:6])}; it cannot be imported")
    dtype = torch.float32
    if all(tensor.dtype == torch.bfloat16 for tensor in there.weights.values()):
        dtype = torch.bfloat16
    weights = {}
    for name, shape in shapes.items():
        tensor = there.weights[name].to(dtype)
        if name in WITH_VOCABULARY and len(tensor) == config.vocab_size:
            # Add rows of zeros.
            tensor = F.pad(tensor, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
        if tensor.shape != shape:
            raise UserError(f"{where}: {name} is {tuple(tensor.shape)}, expected {tuple(shape)}")
        if not tensor.isfinite().all():
            raise UserError(f"{where}: {name} has values that are not finite; it cannot be imported")
        weights[name] = tensor.contiguous()
    return weights
