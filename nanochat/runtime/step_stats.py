"""The numbers of an optimizer step that the optimizers and the log read."""
from dataclasses import dataclass

from torch import Tensor


@dataclass
class StepStats:
    """A step's numbers, equal on every rank, on the device: reading them on the host waits for the step."""

    ok: Tensor      # 1.0; 0.0 if a loss or gradient of any rank is not finite: then no rank may change anything
    values: Tensor  # (5,) float32: mean loss, gradient norm before clipping, ok, ranks that ask to stop, to save
