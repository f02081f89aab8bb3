"""What is trained and how, as far as prices depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.plan import Plan

OFFLOADED = ("", "optimizer", "parameters")
"""What may be on the host, the least first: nothing; the optimizer's state, which is brought to the device for the step; trained parameters
too, with their gradients, so that the optimizer steps there."""


ROWS_TO = ("ranks", "experts", "nodes")
"""A token goes once to each rank of an axis that has some of its experts; once to each of its experts; once to each part of a cluster with such ranks, and
is copied inside."""


@dataclass(frozen=True)
class Settings:
    """What is trained and how: `mode` train or inference, the optimizer's name, the compute precision.

    `fused`: chains of pointwise operators run as one kernel. `matmul`: the dtype of matmuls with weights where it is another one
    (float8), their operands quantised on the way: that moves `cast_bytes` per element (read once, written by rows and by columns), and `turn_bytes`
    more where columns are made of rows; `casts_shards` says that it is done before what comes in is gathered. `matmul_share` is their rate as a share of
    the device's best in that dtype. `attention`: the rate of fused attention, as a multiple of the device's.
    `dealt`: rows of the sequence come in the order in which rings balance, so that attention has none to put in order.
    `tokens_in_parts`: tokens go to their experts in parts, one from each rank of an axis that cuts the experts' width, and are gathered there.
    `rows_to` (ROWS_TO): to what of its experts a token goes once; `in_a_row`: these lie next to each other. Emitted programs do nothing of this but to send it once to a rank.
    `offload` (OFFLOADED): what is in the memory of the host.
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
        return self.mode == "train"
