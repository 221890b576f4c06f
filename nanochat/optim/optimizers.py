"""Which optimizer updates which parameters of a GPT."""
from typing import Any

from nanochat.model.gpt import GPT
from nanochat.optim.adamw import DistAdamW
from nanochat.optim.ema_nesterov import EMANesterov
from nanochat.optim.muon import DistMuon
from nanochat.optim.sharding import Sharding

# The rate of value embeddings, relative to the embedding's.
VALUE_EMBEDDING_LR = 0.5
# The rate of gates and of the smear's scale, whose weights are of the order of one.
SCALAR_LR = 0.02
# AdamW in large models, as in nanochat except for eps. All blocks begin as the identity, and norms undo a stream's
# scale, so the scales' first gradients are rounding errors, which an eps of 1e-10 would turn into full steps.
LARGE: dict[str, dict[str, Any]] = {
    "embedding": {"betas": (0.8, 0.995), "weight_decay": 0.001},
    "value_embedding": {"betas": (0.8, 0.995), "weight_decay": 0.01},
    "head": {"betas": (0.8, 0.96), "weight_decay": 0.01},
    "smear": {"eps": 1e-5},
    "residual_scale": {"eps": 1e-5, "weight_decay": 0.05},
    "first_scale": {"eps": 1e-5, "betas": (0.96, 0.95)},
}


def setup_optimizers(
    model: GPT,
    sharding: Sharding,
    unembedding_lr: float = 0.004,
    embedding_lr: float = 0.2,
    matrix_lr: float = 0.02,
    weight_decay: float = 0.0,
    lr_scale: float = 1.0,
    ema_nesterov: float = 0.0,
) -> tuple[Any, ...]:
    """
    (adamw, muon), for the shards that this rank keeps: Muon for the matrices of the blocks, AdamW for everything else.
    ema_nesterov: its distance; unless 0, an EMANesterov for all shards is the third, which steps last.
    weight_decay: Muon's. Rates of embeddings and head are for a model 768 wide; they scale as 1/√width.
    lr_scale: multiplies all rates.
    """
    roles = model.roles()
    by_width = (model.config.n_embd / 768) ** -0.5
    rates = {
        "head": unembedding_lr * by_width,
        "embedding": embedding_lr * by_width,
        "value_embedding": VALUE_EMBEDDING_LR * embedding_lr * by_width,
        "gate": SCALAR_LR,
        "smear": 0.2 if model.config.narrow_gates else SCALAR_LR,
        "residual_scale": 0.005,
        "first_scale": 0.5,
    }
    if untrained := set(roles.values()) - {"matrix", *rates}:
        raise ValueError(f"no rate for the parameters of role {untrained}: name one in setup_optimizers")
    groups = []
    for role, lr in rates.items():
        shards = [shard for shard in sharding.shards if roles[shard.name] == role]
        group = {"shards": shards, "lr": lr * lr_scale}
        if model.config.stream_scales:
            group |= LARGE.get(role, {})
        groups.append(group)
    adamw = DistAdamW(groups, sharding.device)
    matrices = [name for name, role in roles.items() if role == "matrix"]
    muon = DistMuon(sharding, matrices, matrix_lr * lr_scale, weight_decay)
    if ema_nesterov:
        return adamw, muon, EMANesterov(sharding.shards, ema_nesterov)
    return adamw, muon
