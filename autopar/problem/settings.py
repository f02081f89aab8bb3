"""What is trained and how, as far as prices depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.plan import Plan

OFFLOADED = ("", "optimizer", "parameters")
"""What is kept in host memory: nothing; the optimizer's state, which is copied to the device for each step; or also the
trained parameters and their gradients, so that the optimizer steps on the host."""


@dataclass(frozen=True)
class Settings:
    """What is trained and how, as far as prices depend on it.

        mode               "train" or "inference"
        optimizer          a name of autopar.optimizers
        precision          the dtype of compute, by policy (cost.memory.POLICIES)
        fused              chains of pointwise operators run as one kernel
        matmul             the dtype of matmuls with weights where it is another one (float8); "" for that of
                           `precision`
        cast_bytes         bytes moved per element to quantise an operand of such a matmul: read once, written by rows
                           and by columns
        turn_bytes         further bytes per element where columns are made of rows by a kernel of its own
        casts_shards       operands are quantised before they are gathered
        matmul_share       the rate of such matmuls as a share of the device's best in that dtype
        attention          the rate of fused attention as a multiple of the device's
        dealt              rows of the sequence come in the order in which rings are balanced; otherwise attention puts
                           them in order
        tokens_in_parts    each rank of an axis that splits the experts' width sends its part of a token; the parts are
                           gathered by the experts
        rows_to            how often a token is sent to its experts: once to each of the "ranks" of an axis that have
                           some of them; once to each of the "experts"; or once to each of the "nodes" with such ranks,
                           inside which it is copied on
        in_a_row           the experts of a token are neighbours
        offload            one of OFFLOADED

    Emitted programs have the defaults of `fused` to `in_a_row`; others describe other software (benchmarks of the
    cost model).
    """

    mode: str = "train"
    optimizer: str = "adamw"
    precision: str = "float32"
    fused: bool = False
    matmul: str = ""
    cast_bytes: float = 4.0
    turn_bytes: float = 0.0
    casts_shards: bool = False
    matmul_share: float = 1.0
    attention: float = 1.0
    dealt: bool = False
    tokens_in_parts: bool = False
    rows_to: str = "ranks"
    in_a_row: bool = False
    offload: str = ""

    @staticmethod
    def of(plan: Plan) -> Settings:
        """What `plan` was priced for."""
        return Settings(plan.mode, plan.optimizer, plan.precision, offload=plan.offload)

    @property
    def training(self) -> bool:
        """Whether there is a backward and an optimizer's step."""
        return self.mode == "train"
