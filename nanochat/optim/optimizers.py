"""Which optimizer updates which parameters of a GPT."""
from nanochat.model.gpt import GPT
from nanochat.optim.adamw import DistAdamW
from nanochat.optim.muon import DistMuon
from nanochat.optim.zero import Sharding

TABLE_LR = 0.5    # of value tables, relative to the embedding's
SCALAR_LR = 0.02  # of scalars and gates: they are of the order of one


def setup_optimizers(
    model: GPT,
    sharding: Sharding,
    unembedding_lr: float = 0.004,
    embedding_lr: float = 0.2,
    matrix_lr: float = 0.02,
    weight_decay: float = 0.0,
    lr_scale: float = 1.0,
) -> tuple[DistAdamW, DistMuon]:
    """
    (adamw, muon), for the shards that this rank keeps: Muon for the matrices of the blocks, AdamW for everything else.
    weight_decay: Muon's. Rates of embedding, tables and head are those of a model 768 wide; they change as 1/√width.
    lr_scale: multiplies all rates.
    """
    roles = model.roles()
    by_width = (model.config.n_embd / 768) ** -0.5
    rates = {
        "head": unembedding_lr * by_width,
        "embedding": embedding_lr * by_width,
        "table": TABLE_LR * embedding_lr * by_width,
        "scalar": SCALAR_LR,
    }
    groups = []
    for role, lr in rates.items():
        shards = [shard for shard in sharding.shards if roles[shard.name] == role]
        groups.append({"shards": shards, "lr": lr * lr_scale})
    adamw = DistAdamW(groups, sharding.device)
    matrices = [name for name, role in roles.items() if role == "matrix"]
    muon = DistMuon(sharding, matrices, matrix_lr * lr_scale, weight_decay)
    return adamw, muon
