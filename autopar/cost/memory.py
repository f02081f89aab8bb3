"""Bytes of parameters, their gradients and the optimizer's state, per element held by a device.

What torch's optimizers keep: SGD nothing, SGD with momentum one value per element, Adam and AdamW two (exp_avg,
exp_avg_sq), in the dtype of the parameter that they update (torch.optim, `state` of each optimizer). Mixed precision
computes with a copy of a float32 master that the optimizer updates, so the state is float32 then (Micikevicius et al.
2018), and so is the gradient here, because it is summed and adds up in float32: 2 + 4 + 12 bytes per element for Adam.
(Rajbhandari et al. 2020, ZeRO, section 3.1, count 2 + 2 + 12.)
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.optimizers import OPTIMIZERS
from autopar.text import near

POLICIES = {"bf16": ("bfloat16", "float32"), "fp16": ("float16", "float32")}
"""Mixed precision: name -> dtype of the computation, dtype in which parameters rest, are updated and have their
gradients."""

ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
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
        return ParameterBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.master + other.master,
        )


HOSTED = {"": 0, "optimizer": 0, "parameters": 2}
"""What beside the optimizer's state is on the host, by problem.settings.OFFLOADED: values per trained element (the
weight that rests, its gradient)."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype` ("float32", "torch.bfloat16", any float8). Raises PlanError on an unknown
    dtype."""
    key = dtype.removeprefix("torch.")
    if key.startswith("float8"):
        return 1
    if key not in ITEMSIZES:
        raise PlanError(f"dtype {dtype!r} is unknown; known: {', '.join(ITEMSIZES)}, float8_*")
    return ITEMSIZES[key]


def computes_in(precision: str) -> str:
    """The dtype that a model is computed in under `precision`: a policy (POLICIES), or a dtype that everything has."""
    return POLICIES[precision][0] if precision in POLICIES else precision


def scales_loss(precision: str) -> bool:
    """Whether gradients under `precision` are those of a loss times a scale, and are divided by it once a step
    (runtime.scaling)."""
    return precision in POLICIES and POLICIES[precision][0] == "float16"


def rests_in(dtype: str, precision: str) -> str:
    """The dtype in which a trained parameter that is computed with in `dtype` rests, is updated and has its
    gradient."""
    dtype = dtype.removeprefix("torch.")
    return POLICIES[precision][1] if precision in POLICIES and dtype == POLICIES[precision][0] else dtype


def check_optimizer(name: str) -> None:
    """Raises PlanError for the name of no optimizer whose state is known."""
    if name not in OPTIMIZERS:
        raise PlanError(f"optimizer {name!r} is unknown; known: {', '.join(OPTIMIZERS)}{near(str(name), OPTIMIZERS)}")


def parameter_bytes(
    numel: float,
    dtype: str,
    precision: str,
    optimizer: str,
    *,
    training: bool = True,
    leaf: float | None = None,
    offload: str = "",
) -> ParameterBytes:
    """Bytes of `numel` trainable elements at rest, which are computed with in `dtype`. `leaf`: the number of elements
    that are computed with, where it is another one (problem.at_rest).

    * One dtype and one layout: weights, gradients and optimizer state, all of that dtype, as plain torch has it.
    * Under a policy (POLICIES), or with a leaf: the weights that are computed with, and the master copy at rest, whose
      dtype gradients and state have.
    * Not training: weights only.
    * `offload` (problem.settings.OFFLOADED): the optimizer's state is on the host, or all that rests.

    Integers (quantised weights, counters) keep their dtype and have no gradient. Raises PlanError on unknown names.
    """
    check_optimizer(optimizer)
    weights = itemsize(dtype) * (numel if leaf is None else leaf)
    if not training or "float" not in dtype:
        return ParameterBytes(weights=weights)
    rest = rests_in(dtype, precision)
    resting = numel * itemsize(rest)
    if offload == "parameters":
        return ParameterBytes(weights, resting)
    apart = leaf is not None or rest != dtype.removeprefix("torch.")
    return ParameterBytes(
        weights, resting, 0.0 if offload else resting * OPTIMIZERS[optimizer].state, resting if apart else 0.0
    )


def host_bytes(numel: float, dtype: str, precision: str, optimizer: str, offload: str) -> float:
    """Bytes in the memory of the host for `numel` trained elements that are computed with in `dtype`; `offload` as in
    `parameter_bytes`."""
    if not offload or "float" not in dtype:
        return 0.0
    return numel * itemsize(rests_in(dtype, precision)) * (HOSTED[offload] + OPTIMIZERS[optimizer].state)
