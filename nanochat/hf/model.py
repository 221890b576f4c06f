"""
Our checkpoints as folders that Hugging Face's transformers loads (its class NanoChatForCausalLM), and the way back.

The mathematics is the same, the names are not. What that class cannot express is refused by name, never left out. Rows
of the vocabulary's padding, which no token uses, are cut off; they lie in a file of their own, so that the way back ends
at the same bits.
"""
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from nanochat.checkpoint import MODEL_FILE
from nanochat.errors import UserError
from nanochat.gpt import GPT, GPTConfig, NORM_EPS, ROPE_THETA
from nanochat.hf.tokenizer import CHAT_TEMPLATE, from_hf, to_hf, tokenizer_config
from nanochat.resharding import Part, index_of, overlaps
from nanochat.saving import write_tensors
from nanochat.tokenizer import Tokenizer

PADDING_FILE = "padding.nanochat"  # in safetensors' format; programs that load every *.safetensors of a folder must not see it
INDEX_FILE = "model.safetensors.index.json"
FOLDER = re.compile(  # every file of an exported folder
    rf"model(-\d+-of-\d+)?\.safetensors|{re.escape(INDEX_FILE)}|{re.escape(PADDING_FILE)}|config\.json|generation_config\.json|"
    r"tokenizer\.json|tokenizer_config\.json|chat_template\.jinja|README\.md"
)
STEP = "nanochat_step"  # of the checkpoint, in config.json
WITH_VOCABULARY = ("transformer.wte.weight", "lm_head.weight")
PARTS = {
    "attn.c_q": "self_attn.q_proj", "attn.c_k": "self_attn.k_proj", "attn.c_v": "self_attn.v_proj", "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
}
CONFIG = {  # whole numbers; and the softcap, which may also be null
    "sequence_len": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "n_embd": "hidden_size",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads",
}
ALWAYS = {  # what our models are, and that class need not be
    "model_type": "nanochat", "hidden_act": "relu2", "attention_bias": False, "tie_word_embeddings": False,
}


class Imported(NamedTuple):
    """What is read from a folder of any format: our names, dtypes and paddings as they are there."""

    config: GPTConfig
    weights: dict[str, Tensor]
    padding: dict[str, Tensor]  # rows that belong below `weights`; without them they are zeros
    tokenizer: Tokenizer
    step: int
    notes: list[str]            # what is not quite the same here


def their_name(name: str) -> str:
    """The name of one of our parameters in NanoChatForCausalLM. UserError for one that has no place there."""
    if match := re.fullmatch(r"transformer\.h\.(\d+)\.(\w+\.\w+)\.weight", name):
        layer, part = match.groups()
        if part in PARTS:
            return f"model.layers.{layer}.{PARTS[part]}.weight"
    elif name in WITH_VOCABULARY:
        return "lm_head.weight" if name == "lm_head.weight" else "model.embed_tokens.weight"
    raise UserError(f"{name} has no place in transformers' NanoChatForCausalLM: this model cannot be exported")


# ---- There

def export(checkpoint: Path, meta: dict, dtype: str, max_shard_bytes: int, folder: Path) -> int:
    """
    Fill a folder with everything but the model card; returns how many parameters the model has there. dtype: as for
    `read_weights`. UserError for a model that the class cannot express.
    """
    tokenizer = Tokenizer.load(checkpoint)
    for name, value in meta["model_config"].items():
        if name not in (*CONFIG, "softcap"):
            raise UserError(f"{checkpoint} has {name}={value!r}, which transformers' NanoChatForCausalLM does not know: it cannot be exported")
    config = GPTConfig(**meta["model_config"])
    if config.vocab_size != tokenizer.get_vocab_size():
        raise UserError(f"{checkpoint}: the model has {config.vocab_size:,} tokens, its tokenizer {tokenizer.get_vocab_size():,}")
    bos, end = tokenizer.get_bos_token_id(), tokenizer.encode_special("<|assistant_end|>")
    ids = {"bos_token_id": bos, "eos_token_id": [end, bos], "pad_token_id": bos}

    padding: dict[str, Tensor] = {}
    dtypes: set[torch.dtype] = set()

    def cropped() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_weights(checkpoint, dtype):
            if name in WITH_VOCABULARY:
                tensor, padding[name] = tensor.split((config.vocab_size, len(tensor) - config.vocab_size))
            dtypes.add(tensor.dtype)
            yield their_name(name), tensor

    parameters = write_sharded(folder, cropped(), max_shard_bytes)
    if config.padded_vocab_size > config.vocab_size:
        write_tensors(folder / PADDING_FILE, padding, {})
    (saved_as,) = (str(kind).removeprefix("torch.") for kind in dtypes)
    for name, content in {
        "config.json": {"architectures": ["NanoChatForCausalLM"]} | ALWAYS | {theirs: getattr(config, ours) for ours, theirs in CONFIG.items()} | {
            "final_logit_softcapping": config.softcap or None, "intermediate_size": 4 * config.n_embd, "attention_dropout": 0.0, "rms_norm_eps": NORM_EPS, "use_cache": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}, "dtype": saved_as, STEP: meta["step"],
        } | ids,
        # Without a mask, generate() takes padding for what may not be seen, unless it ends answers: never <|bos|>, then.
        "generation_config.json": ids | {"pad_token_id": end},
        "tokenizer_config.json": tokenizer_config(tokenizer, config.sequence_len),
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    to_hf(tokenizer).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return parameters


def read_weights(checkpoint: Path, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """
    (name, tensor) of every weight, one after the other: as the model computes with them ("auto"), cast to bfloat16, or
    ("float32") as the optimizers keep them. UserError where there are no such masters.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in sorted(checkpoint.glob("optimizer_rank_*.safetensors"))]
        weights = stack.enter_context(safe_open(checkpoint / MODEL_FILE, framework="pt"))
        masters = index_of(files) if dtype == "float32" else {}
        for name in weights.keys():
            tensor = weights.get_tensor(name)
            if dtype == "float32" and tensor.dtype != torch.float32:
                tensor = read_master(masters.get(f"master.{name}", []), name, tensor.shape, checkpoint)
            yield name, tensor.to(torch.bfloat16) if dtype == "bfloat16" else tensor


def read_master(pieces: list[Part], name: str, shape: torch.Size, checkpoint: Path) -> Tensor:
    """A whole master from the pieces of it that ranks kept."""
    master, end = torch.empty(shape.numel()), 0
    for low, high, piece in overlaps(pieces, 0, len(master)):
        if low != end:
            break
        master[low:high] = piece.source.get_slice(f"master.{name}")[low - piece.start : high - piece.start]
        end = high
    if end < len(master):
        raise UserError(f"{checkpoint} has no float32 masters, only {MODEL_FILE} as it was imported: leave out --dtype=float32")
    return master.view(shape)


def write_sharded(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> int:
    """
    model.safetensors; or, where it would be larger than max_bytes, several files and their index; of which one is in
    memory at a time. Returns the number of parameters.
    """
    files: list[list[str]] = []
    part: dict[str, Tensor] = {}
    size = total = parameters = 0

    def flush() -> None:
        write_tensors(folder / f"part-{len(files)}", part, {"format": "pt"})
        files.append(list(part))
        part.clear()

    for name, tensor in tensors:
        if part and size + tensor.nbytes > max_bytes:
            flush()
            size = 0
        part[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        parameters += tensor.numel()
    flush()
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)] if len(files) > 1 else [MODEL_FILE]
    for i, name in enumerate(names):
        (folder / f"part-{i}").rename(folder / name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total, "total_parameters": parameters}, "weight_map": {name: file for file, part_names in zip(names, files) for name in part_names}}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return parameters


# ---- And back

def read_folder(folder: Path, tokenizer_path: Path | None = None) -> Imported:
    """A folder of a NanoChatForCausalLM. UserError for anything that would not be the same model here."""
    path = folder / "config.json"
    there = read_json(path)
    if there.get("model_type") != "nanochat":
        raise UserError(f"{path} is of a model of type {there.get('model_type')!r}; only 'nanochat' can be imported")
    config = to_config({ours: there.get(theirs) for ours, theirs in CONFIG.items()} | {
        "n_kv_head": there.get("num_key_value_heads") or there.get("num_attention_heads"),
        "sequence_len": there.get("max_position_embeddings", 2048),  # what that class takes for granted
        "softcap": there.get("final_logit_softcapping", 15.0),
    }, path, CONFIG)
    rope = dict(there.get("rope_parameters") or there.get("rope_scaling") or {})
    found = {
        "rope_type": rope.pop("rope_type", "default"), "rope_theta": rope.pop("rope_theta", there.get("rope_theta", 10_000.0)),
        "head_dim": there.get("head_dim") or config.head_dim, "intermediate_size": there.get("intermediate_size", 8192),
    } | {name: there.get(name, value) for name, value in ALWAYS.items()} | rope
    expected = ALWAYS | {"rope_type": "default", "rope_theta": ROPE_THETA, "head_dim": config.head_dim, "intermediate_size": 4 * config.n_embd}
    for name, value in found.items():
        if name not in expected or value != expected[name]:
            raise UserError(f"{path} has {name}={value!r}; this program's models have {expected.get(name, 'no such thing')}: it cannot be imported")
    eps, notes = there.get("rms_norm_eps", 1e-6), []
    if eps != NORM_EPS:
        if not isinstance(eps, float) or not 0 <= eps <= 1e-5:
            raise UserError(f"{path} has rms_norm_eps={eps!r}; this program's models have {NORM_EPS}: it cannot be imported")
        notes.append(f"rms_norm_eps={eps} there, {NORM_EPS} here: logits may differ in the fourth digit")

    ours = {their_name(name): name for name in parameter_shapes(config, path)}
    weights: dict[str, Tensor] = {}
    for file in weight_files(folder):
        for name, tensor in read_safetensors(file).items():
            weights[ours.get(name, name)] = tensor  # a stranger keeps its name, and is refused by it
    padding = read_safetensors(folder / PADDING_FILE) if (folder / PADDING_FILE).exists() else {}
    step = there.get(STEP)
    tokenizer = from_hf(tokenizer_path or folder / "tokenizer.json")
    return Imported(config, weights, padding, tokenizer, step if type(step) is int and step >= 0 else 0, notes)


def weight_files(folder: Path) -> list[Path]:
    """The files of an exported folder's weights."""
    if (folder / INDEX_FILE).exists():
        names = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) and Path(name).name == name for name in names.values()):
            raise UserError(f"{folder / INDEX_FILE} is no index of files in its folder")
        return [folder / name for name in sorted(set(names.values()))]
    if not (folder / MODEL_FILE).exists():
        raise UserError(f"there is neither {MODEL_FILE} nor {INDEX_FILE} in {folder}")
    return [folder / MODEL_FILE]


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def read_json(path: Path) -> dict:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no {path.name} in {path.parent}") from None
    except (OSError, ValueError) as error:  # not UTF-8, not JSON
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object")
    return content


def to_config(fields: dict, where: Path, called: dict[str, str]) -> GPTConfig:
    """
    A GPTConfig, checked. UserError, naming the file, for fields that are missing, unknown or impossible together.
    called: what the fields are called in that file, where not as here.
    """
    for name, value in fields.items():
        if name not in (*CONFIG, "softcap"):
            raise UserError(f"{where} has {name}={value!r}, which this program's models do not have: it cannot be imported")
    for name in CONFIG:
        if type(fields.get(name)) is not int or not 1 <= fields[name] < 2**31:
            raise UserError(f"{where} has {called.get(name, name)}={fields.get(name)!r}; expected a whole number of at least 1")
    try:
        config = GPTConfig(**fields)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if config.n_embd % config.n_head or config.head_dim % 2 or config.n_head % config.n_kv_head:
        raise UserError(f"{where}: width {config.n_embd} has no even heads, or {config.n_head} heads no groups of {config.n_kv_head}")
    return config


def parameter_shapes(config: GPTConfig, where: Path) -> dict[str, torch.Size]:
    """Name and shape of every parameter of such a model."""
    if config.n_layer > 10_000:  # each costs memory even on the meta device
        raise UserError(f"{where} has {config.n_layer:,} layers: no model does")
    with torch.device("meta"):
        return {name: p.shape for name, p in GPT(config).named_parameters()}


def fit(there: Imported, dtype: str, where: Path) -> dict[str, Tensor]:
    """
    The weights as our checkpoints hold them: every parameter, of one dtype (dtype "auto": theirs, or float32 where they have
    several), the vocabulary padded. UserError for strangers, missing ones and other shapes.
    """
    if there.config.vocab_size != there.tokenizer.get_vocab_size():
        raise UserError(f"{where}: the model has {there.config.vocab_size:,} tokens, its tokenizer {there.tokenizer.get_vocab_size():,}")
    shapes = parameter_shapes(there.config, where)
    if strangers := sorted(there.weights.keys() - shapes.keys()):
        raise UserError(f"{where} has weights that this program's models of {there.config.n_layer} layers do not have: {some(strangers)}; it cannot be imported")
    if missing := sorted(shapes.keys() - there.weights.keys()):
        raise UserError(f"{where} lacks weights of a model of {there.config.n_layer} layers: {some(missing)}")
    kinds = {tensor.dtype for tensor in there.weights.values()}
    if not all(kind.is_floating_point for kind in kinds):
        raise UserError(f"{where} has weights of {' and '.join(sorted(map(str, kinds)))}; expected floating-point numbers")
    if dtype == "auto":
        dtype = "bfloat16" if kinds == {torch.bfloat16} else "float32"
    weights = {}
    for name, shape in shapes.items():
        tensor = there.weights[name].to(getattr(torch, dtype))
        if name in WITH_VOCABULARY and tensor.shape == (there.config.vocab_size, shape[1]):
            missing_rows = shape[0] - len(tensor), shape[1]
            rows = there.padding.get(name, tensor.new_zeros(missing_rows))
            if rows.shape != missing_rows:
                raise UserError(f"{where / PADDING_FILE} does not belong to these weights; without it the padding is zero")
            tensor = torch.cat((tensor, rows.to(tensor.dtype)))
        if tensor.shape != shape:
            raise UserError(f"{where}: {name} is {tuple(tensor.shape)}, expected {tuple(shape)}")
        weights[name] = tensor.contiguous()
    return weights


def some(names: list[str]) -> str:
    return ", ".join(names[:6]) + f" and {len(names) - 6:,} more" * (len(names) > 6)
