"""Which optimizer updates which parameters of a GPT."""
from nanochat.model.gpt import GPT
from nanochat.optim.adamw import DistAdamW
from nanochat.optim.muon import DistMuon, Variant
from nanochat.optim.zero import Sharding

TABLE_LR = 0.5    # of value tables, relative to the embedding's
SCALAR_LR = 0.02  # of scalars and gates: they are of the order of one


def setup_optimizers(
    model: GPT, sharding: Sharding, unembedding_lr: float = 0.004, embedding_lr: float = 0.2, matrix_lr: float = 0.02,
    weight_decay: float = 0.0, muon_variant: Variant = "muon", lr_scale: float = 1.0,
) -> tuple[DistAdamW, DistMuon]:
    """
    (adamw, muon), for the shards that this rank keeps: Muon for the matrices of the blocks, AdamW for everything else.
    weight_decay: Muon's. Rates of embedding, tables and head are those of a model 768 wide; they change as 1/√width.
    lr_scale: of all rates.
    """
    scale, roles = (model.config.n_embd / 768) ** -0.5, model.roles()
    rates = {"head": unembedding_lr * scale, "embedding": embedding_lr * scale,
             "table": TABLE_LR * embedding_lr * scale, "scalar": SCALAR_LR}
    groups = [{"shards": [s for s in sharding.shards if roles[s.name] == role], "lr": lr * lr_scale}
              for role, lr in rates.items()]
    matrices = [name for name, role in roles.items() if role == "matrix"]
    muon = DistMuon(sharding, matrices, matrix_lr * lr_scale, weight_decay, variant=muon_variant)
    return DistAdamW(groups, sharding.device), muon
