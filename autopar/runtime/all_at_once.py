"""Refusal of optimizers that treat all parameters as one flat vector (torch.optim.LBFGS), where that vector cannot be
formed.

In a pipeline a rank has the parameters of its own place only, so inner products over its vector are not those of the
model. And torch concatenates DTensors only where every rank's part has the same size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakSet

from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import RunError
from autopar.layout import even, is_placed
from autopar.runtime.mesh import Mesh
from autopar.runtime.params import Held


class OnMesh(Protocol):
    """A built model."""

    @property
    def _held(self) -> Mapping[str, Held]: ...
    @property
    def MESH(self) -> Mesh: ...


_modules: WeakSet[Any] = WeakSet()
INSTEAD = "Use an optimizer that steps each parameter by itself (AdamW, SGD, Muon)"


def install(module: OnMesh) -> None:
    """Check the parameters of `module` before each step of such an optimizer, which raises RunError where they are not
    all on this rank, or are cut unevenly."""
    _modules.add(module)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if isinstance(optimizer, LBFGS):
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for module in _modules:
            _check(module, [held for held in module._held.values() if id(held.tensor) in stepped])


def _check(module: OnMesh, stepped: list[Held]) -> None:
    """Raise RunError where the parameters `stepped` of `module` cannot be concatenated into one vector."""
    if stepped and module.MESH.places > 1:
        raise RunError(
            "LBFGS takes inner products over all parameters, and in a pipeline each rank would take them over those "
            f"of its own place: the directions would not be those of the model. {INSTEAD}, or a plan without stages "
            '(recipe="zero3"), where LBFGS steps as on one device'
        )
    for held in stepped:
        layout = held.info.entries
        if any(map(is_placed, layout)) or not even(held.info.shape, layout, module.MESH.sizes):
            raise RunError(
                f"LBFGS makes one vector of all parameters, which torch does of equal parts alone, and {held.name} of "
                f"shape {held.info.shape} rests as {held.info.layout} on {module.MESH}, where parts are unequal. "
                f'{INSTEAD}, a plan where parameters rest whole (recipe="ddp"), or sizes that divide by the ranks'
            )


register_optimizer_step_pre_hook(_before)
