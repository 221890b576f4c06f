"""Which optimizer updates which parameters of a GPT."""
from nanochat.adamw import DistAdamW
from nanochat.gpt import GPT
from nanochat.muon import DistMuon, Variant
from nanochat.zero import Sharding

# AdamW's settings by role of the parameter; weight decay is constant and counts in learning rates.
ADAMW = {
    "embedding": dict(betas=(0.8, 0.95), weight_decay=0.0),
    "head": dict(betas=(0.8, 0.95), weight_decay=0.0),
    "table": dict(betas=(0.8, 0.95), weight_decay=0.0),
    "scalar": dict(betas=(0.8, 0.95), weight_decay=0.0),
}


def setup_optimizers(
    model: GPT, sharding: Sharding, unembedding_lr: float = 0.004, embedding_lr: float = 0.2, matrix_lr: float = 0.02,
    weight_decay: float = 0.0, muon_variant: Variant = "muon",
) -> tuple[DistAdamW, DistMuon]:
    """
    (adamw, muon), for the shards that this rank keeps: AdamW for the embedding and the head, Muon for the matrices
    of the blocks; only these decay. AdamW's rates are those of a model 768 wide and change as 1/√width.
    """
    scale = (model.config.n_embd / 768) ** -0.5
    rates = {"head": ("lm_head.weight", unembedding_lr), "embedding": ("transformer.wte.weight", embedding_lr)}
    groups = [
        {"shards": [s for s in sharding.shards if s.name == name], "lr": lr * scale, **ADAMW[role]}
        for role, (name, lr) in rates.items()
    ]
    matrices = [name for name, _ in model.named_parameters() if name.startswith("transformer.h.")]
    return DistAdamW(groups, sharding.device), DistMuon(
        sharding, matrices, matrix_lr, weight_decay, variant=muon_variant
    )
