"""AdamW: the update rule, a pure function of tensors, and the optimizer on top of it."""
import torch
from torch import Tensor
from torch.nn import Parameter


def adamw_update(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    lr: Tensor, decay: Tensor, correction1: Tensor, correction2: Tensor,
    beta1: float, beta2: float, eps: float,
) -> None:
    """
    One step in place on any slice of a parameter; everything float32. Loshchilov & Hutter 2019, arXiv:1711.05101.

    lr and decay = lr · weight decay; correction = 1 − betaᵗ: scalar tensors, because they change from step to step
    and a compiled function would otherwise be compiled anew. eps is added after the bias correction.
    """
    master.mul_(1 - decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    denominator = (exp_avg_sq / correction2).sqrt() + eps
    master.sub_(lr * (exp_avg / correction1) / denominator)


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
        beta1, beta2 = self.betas
        correction1, correction2 = (1 - beta ** self.steps.item() for beta in self.betas)
        for group in self.param_groups:
            for name, p in group["params"].items():
                if p.grad is None:
                    continue
                lr = group["lr"] * getattr(p, "lr_mul", 1.0)
                decay = lr * group["weight_decay"] * getattr(p, "wd_mul", 1.0)
                scalars = torch.tensor([lr, decay, correction1, correction2], dtype=torch.float32)
                adamw_update(
                    self.masters[name], p.grad.float(), self.exp_avg[name], self.exp_avg_sq[name],
                    *scalars.to(p.device, non_blocking=True).unbind(), beta1, beta2, self.eps,
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
