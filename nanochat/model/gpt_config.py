"""
Everything that determines a model's shapes: its sizes and its pieces. The classic architecture of published checkpoints
has no pieces; each can be added alone. The pieces of modern models depend on depth: small models have the pieces that
won on a CPU (docs/ablations.md), large ones also those that won elsewhere at depths of 12 to 24 (docs/gpus.md).
"""
import math
from dataclasses import MISSING, dataclass, fields

from nanochat.runtime.errors import UserError

LOGIT_SOFTCAP = 15.0
# exp(softcap), summed over any vocabulary, must stay far below float32's largest number.
MAX_SOFTCAP = 64
# The vocabulary is padded to a multiple, so that the largest matrix product has whole tiles.
VOCAB_MULTIPLE = 64
# Width per layer of a model of the one-number family, as in nanochat.
LAYER_WIDTH = 64
HEAD_DIM = 128
ARCHITECTURES = {    # named sets of pieces
    "classic": {},
    "modern": dict(short_windows=True, value_embeddings=True, smear=True, key_offset=True, embedding_std=0.8,
                   fc_scale=0.4),
}
# From this depth on, modern models also have LARGE: pieces that won at depths of 12 to 24, not on a CPU.
LARGE_DEPTH = 12
LARGE = dict(stream_scales=True, subtract_middle=True, narrow_gates=True, qk_scale=1.2, rope_theta=100_000.0)


@dataclass(frozen=True)
class GPTConfig:
    """Everything that determines the shapes of a model. UserError for impossible values."""

    sequence_len: int   # longest row the model is trained on
    vocab_size: int     # tokens that exist; the weights are padded beyond it
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int      # fewer than n_head: grouped-query attention
    softcap: float | None = LOGIT_SOFTCAP  # limit of the logits; None or 0: none
    # ---- Pieces
    rope_theta: float = 10_000.0    # base of the rotary wavelengths
    qk_scale: float = 1.0           # factor of normalized queries and keys: sharper attention
    short_windows: bool = False     # three of four layers see a quarter of sequence_len; every fourth and the last, all
    value_embeddings: bool = False  # alternate layers, including the last, add a gated vector of the token to values
    smear: bool = False             # the embedding adds a gated part of the previous token's embedding
    key_offset: bool = False        # in layers that see all, half of each key is the previous token's
    document_token: int = -1        # begins a document, whose tokens see nothing before it; −1: a row is one text
    narrow_gates: bool = False      # gates read 12 or 24 channels; their limit is 3 for values, 1 for the smear
    stream_scales: bool = False     # a block begins with a learned sum of its input and the first block's input
    subtract_middle: bool = False   # the last block subtracts a learned part of the stream after block n_layer/2
    embedding_std: float = 1.0      # initial
    fc_scale: float = 1.0           # initial scale of c_fc, relative to 1/√width

    def __post_init__(self) -> None:
        if self.softcap is not None and not 0 <= self.softcap <= MAX_SOFTCAP:
            raise UserError(f"softcap={self.softcap!r}: expected a number of at most {MAX_SOFTCAP}; None or 0: none")

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def streams(self) -> int:
        """How many tensors (B, T, C) a block passes on: the residual stream; the first block's input; the middle."""
        return 3 if self.stream_scales or self.subtract_middle else 1

    def offsets_keys(self, layer: int) -> bool:
        return self.key_offset and self.window(layer) == self.sequence_len

    def window(self, layer: int) -> int:
        """The largest number of keys that a query of this layer sees, including its own."""
        whole = not self.short_windows or layer % 4 == 3 or layer == self.n_layer - 1
        return self.sequence_len if whole else math.ceil(self.sequence_len / 4)


def parse_architecture(arch: str) -> tuple[str, dict]:
    """
    (name, changes) of "modern,smear=False,head_dim=64"; name is "" if there are only changes, or nothing. UserError for
    unknown names, pieces and values.
    """
    name, *parts = arch.split(",")
    if "=" in name:
        name, parts = "", [name, *parts]
    if name and name not in ARCHITECTURES:
        raise UserError(f"arch={arch!r}: expected {' or '.join(ARCHITECTURES)}, then changes such as ,smear=False")
    kinds = {f.name: type(f.default) for f in fields(GPTConfig) if f.default is not MISSING}
    kinds["head_dim"] = int
    changes: dict[str, bool | int | float] = {}
    for change in parts:
        piece, _, value = change.strip().partition("=")
        try:
            if kinds[piece] is bool:
                changes[piece] = {"True": True, "False": False}[value]
            else:
                changes[piece] = kinds[piece](value)
        except (KeyError, ValueError):
            expected = ", ".join(f"{piece}={kind.__name__}" for piece, kind in kinds.items())
            raise UserError(f"arch={arch!r}: there is no {change.strip()!r}; pieces are {expected}") from None
    return name, changes


def architecture(arch: str, depth: int = 1) -> dict:
    """The pieces of an architecture at this depth; arch: see `parse_architecture`; without a name, modern."""
    name, changes = parse_architecture(arch)
    pieces = dict(ARCHITECTURES[name or "modern"])
    if name != "classic" and depth >= LARGE_DEPTH:
        pieces |= LARGE
    return pieces | changes


def config_from_depth(
    depth: int,
    vocab_size: int,
    sequence_len: int,
    arch: str = "classic",
    bos: int = -1,
) -> GPTConfig:
    """
    The one-number family: width 64 per layer, rounded up to a multiple of 128; arch: see `architecture`. bos: the token
    that begins a document. In modern models documents are apart (docs/ablations.md).
    """
    pieces = architecture(arch, depth)
    if not arch.startswith("classic"):
        pieces.setdefault("document_token", bos)
    width = math.ceil(depth * LAYER_WIDTH / HEAD_DIM) * HEAD_DIM
    head_dim = pieces.pop("head_dim", HEAD_DIM)
    if head_dim < 4 or head_dim % 4 or width % head_dim:
        raise UserError(f"arch={arch!r}: expected a head_dim that 4 divides and that divides the width, {width}")
    n_head = width // head_dim
    return GPTConfig(sequence_len, vocab_size, depth, width, n_head, n_head, **pieces)
