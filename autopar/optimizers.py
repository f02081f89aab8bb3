"""The optimizers that a plan can name: their class in torch, and how much state they keep. Plain data, read by cost
(bytes and seconds of a step) and by the runtime (which makes them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Optimizer:
    """A class of torch.optim with its options; `state`: how many values it keeps per element of a parameter; `fused`:
    whether the runtime asks torch for its fused kernel on GPUs, which makes one pass over memory (the default takes one
    per operator); `again`: how many values per element its kernels read or write beyond one pass, where they are
    several on GPUs too."""

    torch_name: str
    state: int
    fused: bool = False
    again: int = 0
    options: Mapping[str, float] = field(default_factory=dict)


OPTIMIZERS = {
    "sgd": Optimizer("SGD", 0),
    # decays the momentum, adds the gradient, adds that to the weight; DTensors have no fused kernel of it
    "sgd-momentum": Optimizer("SGD", 1, again=3, options={"momentum": 0.9}),
    "adam": Optimizer("Adam", 2, fused=True),
    "adamw": Optimizer("AdamW", 2, fused=True),
}
