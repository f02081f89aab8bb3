"""Bytes of parameters, their gradients and the optimizer's state, per element held by a device.

What torch's optimizers keep: SGD nothing, SGD with momentum one value per element, Adam and AdamW two (exp_avg, exp_avg_sq),
in the dtype of the parameter that they update (torch.optim, `state` of each optimizer). Mixed precision adds a
float32 master copy that the optimizer updates, so the state is float32 then (Micikevicius et al. 2018; Rajbhandari et al.
2020, ZeRO, section 3.1: 2 + 2 + 12 bytes per element for Adam).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError

# optimizer -> values of state per parameter element
OPTIMIZERS = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2}

ITEMSIZES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per device by purpose; adds up with `+`."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    master: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.master

    def __add__(self, other: ParameterBytes) -> ParameterBytes:
        return ParameterBytes(self.weights + other.weights, self.gradients + other.gradients,
                              self.optimizer + other.optimizer, self.master + other.master)


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype` ("float32", "torch.bfloat16", any float8). Raises PlanError on an unknown dtype."""
    key = dtype.removeprefix("torch.")
    if key.startswith("float8"):
        return 1
    if key not in ITEMSIZES:
        raise PlanError(f"dtype {dtype!r} is unknown; known: {', '.join(ITEMSIZES)}, float8_*")
    return ITEMSIZES[key]


def is_mixed(dtype: str, precision: str) -> bool:
    """Whether parameters of `dtype` are computed with in a smaller floating `precision`."""
    return dtype.removeprefix("torch.") in ("float32", "float64") and itemsize(precision) < itemsize(dtype)


def parameter_bytes(numel: float, dtype: str, precision: str, optimizer: str, training: bool = True) -> ParameterBytes:
    """Bytes of `numel` trainable elements held in `dtype` and computed with in `precision`.

    Equal: weights, gradients and optimizer state, all of that dtype, as plain torch has it. `precision` smaller than
    `dtype`: weights and gradients in `precision`, the master copy and the state in `dtype`. Not training: weights only.
    Integers (quantised weights, counters) keep their dtype and have no gradient. Raises PlanError on unknown names.
    """
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"optimizer {optimizer!r} is unknown; known: {', '.join(OPTIMIZERS)}")
    floating = "float" in dtype
    held = itemsize(precision if is_mixed(dtype, precision) else dtype)
    if not training or not floating:
        return ParameterBytes(weights=numel * held)
    kept = itemsize(dtype)
    return ParameterBytes(
        weights=numel * held,
        gradients=numel * held,
        optimizer=numel * kept * OPTIMIZERS[optimizer],
        master=numel * kept if is_mixed(dtype, precision) else 0.0,
    )
