"""
Our checkpoints as folders that Hugging Face's transformers loads (its class NanoChatForCausalLM), and the way back.

The mathematics is the same, the names are not. What that class cannot express is refused by name. The rows that pad our
vocabulary, which no token uses, are cut off; a file of their own keeps them, so that an import gives the same bits.
"""
import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from nanochat.checkpoint import MODEL_FILE
from nanochat.errors import UserError
from nanochat.gpt import GPT, NORM_EPS, GPTConfig
from nanochat.hf.tokenizer import from_hf, write_tokenizer
from nanochat.resharding import index_of
from nanochat.saving import write_tensors
from nanochat.tokenizer import Tokenizer

PADDING_FILE = "padding.nanochat"  # safetensors; transformers would load it if it were called *.safetensors
FOLDER = re.compile(  # every file of an exported folder
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|padding\.nanochat|config\.json|"
    r"generation_config\.json|tokenizer\.json|tokenizer_config\.json|chat_template\.jinja|README\.md"
)
STEP = "nanochat_step"  # of the checkpoint, in config.json
WITH_VOCABULARY = ("transformer.wte.weight", "lm_head.weight")
NAMES = {  # ours: theirs, of parameters
    "transformer.wte.": "model.embed_tokens.", "transformer.h.": "model.layers.",
    "attn.c_q.": "self_attn.q_proj.", "attn.c_k.": "self_attn.k_proj.", "attn.c_v.": "self_attn.v_proj.",
    "attn.c_proj.": "self_attn.o_proj.", "mlp.c_fc.": "mlp.fc1.", "mlp.c_proj.": "mlp.fc2.",
}
CONFIG = {  # ours: theirs, of the configuration
    "sequence_len": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads",
    "softcap": "final_logit_softcapping",
}
DEFAULTS = {  # of that class, where they are not what our models have, for what a config.json leaves out
    "model_type": None, "max_position_embeddings": 2048, "final_logit_softcapping": 15.0, "intermediate_size": 8192,
    "rms_norm_eps": 1e-6,
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
    """The name of one of our parameters in NanoChatForCausalLM."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def their_config(config: GPTConfig) -> dict:
    """What config.json says of the mathematics of such a model."""
    return {
        "model_type": "nanochat", "hidden_act": "relu2", "attention_bias": False, "tie_word_embeddings": False,
        **{theirs: getattr(config, ours) for ours, theirs in CONFIG.items()},
        "final_logit_softcapping": config.softcap or None, "intermediate_size": 4 * config.n_embd,
        "head_dim": config.head_dim, "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


# ---- Export

def export(checkpoint: Path, meta: dict, dtype: str, max_shard_bytes: int, folder: Path) -> int:
    """
    Fill a folder with everything but the model card; returns how many parameters the model has there. dtype: as for
    `read_weights`. UserError for a model that the class cannot express.
    """
    for name in meta["model_config"].keys() - CONFIG.keys():
        raise UserError(f"{checkpoint}: transformers' NanoChatForCausalLM has no {name}; it cannot be exported")
    config, tokenizer = GPTConfig(**meta["model_config"]), Tokenizer.load(checkpoint)
    check_vocabulary(config, tokenizer, checkpoint)
    weights = read_weights(checkpoint, dtype)
    for name in weights.keys() - parameter_shapes(config, checkpoint).keys():
        raise UserError(f"{checkpoint}: transformers' NanoChatForCausalLM has no {name}; it cannot be exported")

    padding = {name: weights[name][config.vocab_size :] for name in WITH_VOCABULARY}
    # Copies: of a view, a file's size would be reckoned with its padding.
    weights |= {name: weights[name][: config.vocab_size].clone() for name in WITH_VOCABULARY}
    weights = {their_name(name): tensor for name, tensor in weights.items()}
    shards = split_torch_state_dict_into_shards(weights, max_shard_size=max_shard_bytes)
    for file, names in shards.filename_to_tensors.items():
        write_tensors(folder / file, {name: weights[name] for name in names}, {"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    if config.padded_vocab_size > config.vocab_size:
        write_tensors(folder / PADDING_FILE, padding, {})

    bos, end = tokenizer.get_bos_token_id(), tokenizer.encode_special("<|assistant_end|>")
    ids = {"bos_token_id": bos, "eos_token_id": [end, bos], "pad_token_id": bos}
    write_json(folder / "config.json", {
        "architectures": ["NanoChatForCausalLM"], **their_config(config),
        "dtype": str(weights["lm_head.weight"].dtype).removeprefix("torch."), STEP: meta["step"], **ids,
    })
    # Without a mask, generate() takes padding for what may not be seen, unless it ends answers: so not <|bos|> here.
    write_json(folder / "generation_config.json", ids | {"pad_token_id": end})
    write_tokenizer(tokenizer, config.sequence_len, folder)
    return sum(tensor.numel() for tensor in weights.values())


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_weights(checkpoint: Path, dtype: str) -> dict[str, Tensor]:
    """
    Every weight: as the model computes with it ("auto"), cast to bfloat16, or ("float32") as the optimizers keep it.
    UserError where there are no such masters.
    """
    weights = load_file(checkpoint / MODEL_FILE)
    if dtype == "bfloat16":
        return {name: tensor.bfloat16() for name, tensor in weights.items()}
    if dtype == "float32" and any(tensor.dtype != torch.float32 for tensor in weights.values()):
        with ExitStack() as stack:
            paths = sorted(checkpoint.glob("optimizer_rank_*.safetensors"))
            pieces = index_of(stack.enter_context(safe_open(path, framework="pt")) for path in paths)
            for name, tensor in weights.items():
                key = f"master.{name}"
                master = [piece.source.get_tensor(key) for piece in pieces.get(key, [])]  # each flat, in rising order
                if sum(map(len, master)) != tensor.numel():
                    raise UserError(f"{checkpoint} has no float32 masters, only {MODEL_FILE} as it was imported: "
                                    "leave out --dtype=float32")
                weights[name] = torch.cat(master).view(tensor.shape)
    return weights


# ---- Import

def read_folder(folder: Path, tokenizer_path: Path | None = None) -> Imported:
    """A folder of a NanoChatForCausalLM. UserError for anything that would not be the same model here."""
    path, notes = folder / "config.json", []
    there = DEFAULTS | read_json(path)
    there["num_key_value_heads"] = there.get("num_key_value_heads") or there.get("num_attention_heads")
    config = to_config(there, CONFIG, path)
    for name, expected in their_config(config).items():
        value = there.get(name, expected)
        if name == "rms_norm_eps" and value != expected and type(value) is float and 0 <= value <= 1e-5:
            notes.append(f"rms_norm_eps={value} there, {expected} here: logits may differ in the fourth digit")
        elif value != expected:
            raise UserError(f"{path} has {name}={value!r}; only a model with {expected!r} can be imported")

    ours = {their_name(name): name for name in parameter_shapes(config, path)}
    weights: dict[str, Tensor] = {}
    padding: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")) + sorted(folder.glob(PADDING_FILE)):
        try:  # an unknown tensor keeps its name: `fit` refuses it
            tensors = {ours.get(name, name): tensor for name, tensor in load_file(file).items()}
        except SafetensorError as error:
            raise UserError(f"{file} is damaged: {error}") from error
        if file.name == PADDING_FILE:
            padding = tensors
        elif twice := weights.keys() & tensors.keys():
            raise UserError(f"{file} has {min(twice)}, which another file of the folder has as well")
        else:
            weights |= tensors
    step = there.get(STEP)
    tokenizer = from_hf(tokenizer_path or folder / "tokenizer.json")
    return Imported(config, weights, padding, tokenizer, step if type(step) is int and step >= 0 else 0, notes)


def read_json(path: Path) -> dict:
    """The object in a JSON file. UserError when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except FileNotFoundError:
        raise UserError(f"there is no {path.name} in {path.parent}") from None
    except (OSError, ValueError) as error:  # not UTF-8, not JSON
        raise UserError(f"{path} cannot be read: {error}") from error
    return content


def to_config(fields: dict, names: dict[str, str], where: Path) -> GPTConfig:
    """
    A GPTConfig from the fields of a file; names: ours to those in the file. UserError, naming the file, for values
    that are missing or impossible together.
    """
    for name in names.values():
        value = fields.get(name)
        if name != names["softcap"] and (type(value) is not int or not 1 <= value < 2**31):
            raise UserError(f"{where} has {name}={value!r}; expected a whole number of at least 1")
    try:
        config = GPTConfig(**{ours: fields[name] for ours, name in names.items() if name in fields})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if config.n_embd % config.n_head or config.head_dim % 2 or config.n_head % config.n_kv_head:
        raise UserError(f"{where}: width {config.n_embd} has no even heads, "
                        f"or {config.n_head} heads no groups of {config.n_kv_head}")
    return config


def parameter_shapes(config: GPTConfig, where: Path) -> dict[str, torch.Size]:
    """Name and shape of every parameter of such a model."""
    if config.n_layer > 10_000:  # each costs memory even on the meta device
        raise UserError(f"{where} has {config.n_layer:,} layers: no model does")
    with torch.device("meta"):
        return {name: p.shape for name, p in GPT(config).named_parameters()}


def check_vocabulary(config: GPTConfig, tokenizer: Tokenizer, where: Path) -> None:
    """UserError when model and tokenizer do not belong together."""
    if config.vocab_size != tokenizer.get_vocab_size():
        raise UserError(f"{where}: the model has {config.vocab_size:,} tokens, "
                        f"its tokenizer {tokenizer.get_vocab_size():,}")


def fit(there: Imported, dtype: str, where: Path) -> dict[str, Tensor]:
    """
    The weights as our checkpoints hold them: every parameter, of one dtype (dtype "auto": theirs, or float32 where they
    have several), the vocabulary padded. UserError for unknown, missing and differently shaped ones.
    """
    check_vocabulary(there.config, there.tokenizer, where)
    shapes = parameter_shapes(there.config, where)
    if unknown := sorted(there.weights.keys() - shapes.keys()):
        raise UserError(f"{where} has weights that this program's models of {there.config.n_layer} layers do not have: "
                        f"{', '.join(unknown[:6])}; it cannot be imported")
    if missing := sorted(shapes.keys() - there.weights.keys()):
        raise UserError(f"{where} lacks weights of a model of {there.config.n_layer} layers: {', '.join(missing[:6])}")
    kinds = {tensor.dtype for tensor in there.weights.values()}
    if not all(kind.is_floating_point for kind in kinds):
        raise UserError(f"{where} has weights of {' and '.join(sorted(map(str, kinds)))}; expected floating point")
    if dtype == "auto":
        dtype = "bfloat16" if kinds == {torch.bfloat16} else "float32"
    weights = {}
    for name, shape in shapes.items():
        tensor = there.weights[name].to(getattr(torch, dtype))
        if name in WITH_VOCABULARY and tensor.shape == (there.config.vocab_size, shape[1]):
            rows = there.padding.get(name, tensor.new_zeros(shape[0] - len(tensor), shape[1]))
            if rows.shape != (shape[0] - len(tensor), shape[1]):
                raise UserError(f"{where / PADDING_FILE} does not belong to these weights; without it padding is zero")
            tensor = torch.cat((tensor, rows.to(tensor.dtype)))
        if tensor.shape != shape:
            raise UserError(f"{where}: {name} is {tuple(tensor.shape)}, expected {tuple(shape)}")
        weights[name] = tensor.contiguous()
    return weights
