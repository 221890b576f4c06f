"""AdamW: the update rule, a pure function of tensors, and the optimizer on top of it."""
import torch
from torch import Tensor
from torch.nn import Parameter


def adamw_update(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    step: int, lr: float, weight_decay: float, betas: tuple[float, float], eps: float,
) -> None:
    """
    Step number `step` (from 1) in place on any slice of a parameter; everything float32. Loshchilov & Hutter 2019,
    arXiv:1711.05101. Scalars are Python floats (double precision); eps is added after the bias correction.
    """
    beta1, beta2 = betas
    master.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    master.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


class AdamW:
    """
    AdamW on float32 masters. `groups`: [{"params": {name: parameter}, "lr": float}, …].

    The masters are the tensors the parameters hold when the optimizer is made. If the model is cast to another
    dtype afterwards they live on here, and each step writes its result back in the parameter's dtype.
    A parameter's attributes `lr_mul` and `wd_mul` scale its learning rate and weight decay.
    """

    def __init__(
        self, groups: list[dict], betas: tuple[float, float] = (0.8, 0.95), eps: float = 1e-10, weight_decay: float = 0.0
    ):
        self.param_groups = [{"initial_lr": group["lr"], "weight_decay": weight_decay, **group} for group in groups]
        self.betas, self.eps = betas, eps
        self.steps = torch.zeros(1, dtype=torch.int64)  # taken so far; on the CPU, where reading it waits for nothing
        self.masters = {name: p.data for group in groups for name, p in group["params"].items()}
        assert all(master.dtype == torch.float32 for master in self.masters.values())
        self.exp_avg = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(master) for name, master in self.masters.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients; parameters without one are left alone."""
        self.steps += 1
        for group in self.param_groups:
            for name, p in group["params"].items():
                if p.grad is None:
                    continue
                adamw_update(
                    self.masters[name], p.grad.float(), self.exp_avg[name], self.exp_avg_sq[name], self.steps.item(),
                    group["lr"] * getattr(p, "lr_mul", 1.0), group["weight_decay"] * getattr(p, "wd_mul", 1.0), self.betas, self.eps,
                )
                write_back(p, self.masters[name])

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that must survive a restart, by name; loading copies into the same tensors."""
        tensors = {f"exp_avg.{name}": t for name, t in self.exp_avg.items()}
        tensors |= {f"exp_avg_sq.{name}": t for name, t in self.exp_avg_sq.items()}
        return tensors | {f"master.{name}": t for name, t in self.masters.items()} | {"steps": self.steps}


def write_back(p: Parameter, master: Tensor) -> None:
    """The parameter becomes its master, rounded to its dtype. In float32 they are the same memory."""
    if p.data_ptr() != master.data_ptr():
        p.copy_(master)
