"""Loss scaling for float16, for modules whose gradients are sharded over ranks.

float16 has no numbers below 6e-8, which most gradients of a trained model are: the loss is multiplied by a scale before
the backward, gradients are divided by it in the optimizer's dtype, and a step in which one of them overflowed is left
out, on all ranks, and the scale halved (Micikevicius et al. 2018, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch import LocalScaler
from autopar.errors import RunError
from autopar.runtime.collectives import all_reduce_in_place
from autopar.runtime.first_order import check_gradients_on
from autopar.runtime.params import Param

if TYPE_CHECKING:
    from autopar.runtime.module import ShardedModule

NARROW = "float16"
"""The dtype whose gradients need a scale; bfloat16 has the range of float32."""


class GradScaler(LocalScaler):
    """As `torch.amp.GradScaler`, for the parameters of a sharded module: `model.train_step(*batch, scaler=scaler)`,
    `scaler.step(optimizer)`, `scaler.update()`; `scaler.unscale_(optimizer)` in front of clipping. All ranks take a
    step or none does.

    torch's own decides for each rank by itself: it looks for overflows on the ranks of the first gradient alone, and
    its FSDP one not at all with fused optimizers (tests/dist/test_loss_scale.py). `device` is the kind of device of the
    ranks; the options are those of torch.amp.GradScaler.
    """

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        super().__init__(device, **options)
        self.place = torch.device(device)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale; a collective operation. Raises RuntimeError on the second
        time in a step."""
        super().unscale_(optimizer)
        if self.is_enabled() and dist.is_initialized():
            found = self.overflows(optimizer)
            anywhere = torch.stack(
                [torch.zeros((), device=self.place), *(each.to(self.place) for each in found.values())]
            ).max()
            # fused optimizers leave a step out at 1, and at nothing else
            all_reduce_in_place(anywhere, dist.ReduceOp.MAX)
            found.update({device: anywhere.to(device) for device in found or [anywhere.device]})

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()`, unless a gradient overflowed on any rank; a collective operation."""
        if self.is_enabled() and not self.is_unscaled(optimizer):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


def is_narrow(declared: Iterable[Param]) -> bool:
    """Whether some trained parameter is computed with in float16 and rests in another dtype: mixed precision, which
    needs a scale."""
    return any(info.compute == NARROW and info.trainable for info in declared)


def scaler_for(module: ShardedModule) -> GradScaler:
    """A scaler that does nothing where `module` needs none."""
    return GradScaler(module.MESH.device.type, enabled=is_narrow(module.declared().values()))


def scale_of(scaler: Any, device: torch.device, *, needed: bool, weight: float) -> Tensor | None:
    """The factor of the loss in the backward: the scale of `scaler` times `weight`, a tensor on `device`; None for 1.
    Raises RunError where gradients are not recorded, `weight` is no finite number, a scale is `needed` and there is no
    scaler, and where the scaler is no autopar.GradScaler."""
    check_gradients_on()
    if not _is_weight(weight):
        raise RunError(
            f"loss_weight is {weight!r}; wanted a finite number, the part that the loss of this step has: 1/k in each "
            "of k steps whose gradients add up"
        )
    if scaler is None and needed:
        raise RunError(
            "this plan computes in float16, whose gradients underflow without a scale of the loss: call "
            f'train_step(*batch, scaler=scaler) with scaler = autopar.GradScaler("{device.type}"), then '
            "scaler.step(optimizer) and scaler.update(); GradScaler(enabled=False) does without"
        )
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise RunError(
            f"scaler is a {type(scaler).__module__}.{type(scaler).__name__}, under which some ranks step and others do "
            "not when a gradient overflows; wanted an autopar.GradScaler"
        )
    share = torch.full((), weight, dtype=torch.float64, device=device)
    if scaler is None or not scaler.is_enabled():
        return None if weight == 1.0 else share
    return share * scaler.scale(torch.ones((), device=device))


def _is_weight(weight: Any) -> bool:
    """Whether it is a finite number, or a tensor of one."""
    is_number = (
        weight.dim() == 0 and not weight.is_complex()
        if isinstance(weight, Tensor)
        else isinstance(weight, (int, float))
    )
    return is_number and math.isfinite(weight)
