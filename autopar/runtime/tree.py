"""A check that users have not replaced modules, parameters or ties of a built model: emitted programs do not run these
modules, so a replacement would be ignored without an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar._torch import local_of
from autopar.errors import RunError
from autopar.runtime.mesh import Mesh
from autopar.runtime.params import Held

INSTEAD = (
    "What a sharded model computes is in its emitted program, which takes what was registered under this name when "
    "the model was compiled. Change the model before compile (new heads, adapters, parametrizations, other ties), or "
    "write values into what is there: load_full(state_dict), or in place under no_grad"
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A module of the tree: its path, the table of its parent that has it, and its key there."""

    path: str
    siblings: Mapping[str, Any]
    key: str
    module: nn.Module


class Tree:
    """A record of what is registered in `module` when it is built: its modules, the tensors `held`, and `aliases`
    (second name of a parameter -> its first)."""

    def __init__(self, module: nn.Module, held: Mapping[str, Held], aliases: Mapping[str, str], mesh: Mesh) -> None:
        self._parts = [
            _Part(f"{path}.{key}" if path else key, parent._modules, key, part)
            for path, parent in module.named_modules()
            for key, part in parent.named_children()
        ]
        self._shapes = [(one, one.info.local_shape(mesh)) for one in held.values()]
        self._tied = [
            (alias, module.get_submodule(alias.rpartition(".")[0])._parameters, alias.rpartition(".")[2], held[name])
            for alias, name in aliases.items()
            if isinstance(held[name].tensor, nn.Parameter)
        ]

    def check(self) -> None:
        """Raise RunError where a module was replaced or deleted, a tensor was deleted or has another local shape, or a
        tie was broken."""
        for part in self._parts:
            if part.siblings.get(part.key) is not part.module:
                raise RunError(
                    f"{part.path} was replaced or deleted since the model was compiled, and no step would see it. "
                    f"{INSTEAD}"
                )
        for held, shape in self._shapes:
            found = held.owner.get(held.key)
            if found is None:
                raise RunError(
                    f"{held.name} was deleted since the model was compiled (or made part of a parametrization). "
                    f"{INSTEAD}"
                )
            if local_of(found).shape != shape:
                raise RunError(
                    f"{held.name} was replaced by a tensor of which this rank has {tuple(local_of(found).shape)}, "
                    f"wanted {shape}, its part of {held.info.shape} under layout {held.info.layout}. {INSTEAD}"
                )
        for alias, table, key, held in self._tied:
            if table.get(key) is not held.owner[held.key]:
                raise RunError(
                    f"{alias} and {held.name} were one parameter when the model was compiled, and are two now, of "
                    f"which one would have no gradient. {INSTEAD}"
                )
