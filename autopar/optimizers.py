"""The optimizers that a plan can name: what torch has for them, and how much state they keep. Plain data; costs and
runtime go by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Optimizer:
    """A class of torch.optim with its options; `state`: values that it keeps per element of a parameter; `fused`:
    whether DTensors have its step in one kernel, as plain tensors do (they have that of SGD, too)."""

    torch_name: str
    state: int
    fused: bool = False
    options: Mapping[str, float] = field(default_factory=dict)


OPTIMIZERS = {
    "sgd": Optimizer("SGD", 0),
    "sgd-momentum": Optimizer("SGD", 1, options={"momentum": 0.9}),
    "adam": Optimizer("Adam", 2, fused=True),
    "adamw": Optimizer("AdamW", 2, fused=True),
}
