"""The state of a sharded module: what it holds, gathered whole and filled again, its random numbers, and the state of
its optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn

from autopar._torch import local_of
from autopar.errors import RunError
from autopar.runtime import checkpoint, optimizer_state
from autopar.runtime.assigned_data import AssignedData
from autopar.runtime.changes import Changes
from autopar.runtime.clipping import clip_grad_norm
from autopar.runtime.mesh import Mesh
from autopar.runtime.params import Held, grad_at_rest
from autopar.runtime.rng import Rng
from autopar.runtime.scopes import Scope
from autopar.runtime.state_copies import StateCopies


class ModuleState(Scope):
    """The methods of a ShardedModule that read and write its state under the names of the original model."""

    MESH: ClassVar[Mesh]
    ALIASES: ClassVar[Mapping[str, str]] = {}
    _held: dict[str, Held]
    _names: Sequence[str]
    _constant: dict[str, None]
    _assigned_data: AssignedData
    _state_copies: StateCopies
    _changes: Changes
    rng: Rng

    def constant_names(self) -> list[str]:
        """The names of buffers that hold values of their own: what `load_constants` has filled."""
        return list(self._constant)

    def load_full(self, state: Mapping[str, Tensor], *, strict: bool = True) -> Self:
        """Fill parameters and buffers from whole tensors under original names, without communication. What
        `load_constants` has filled may be left out. Raises RunError on names and shapes that do not fit; `strict=False`
        ignores unknown names."""
        checkpoint.load_full(
            self._held.values(),
            self.ALIASES,
            state,
            self.MESH,
            strict=strict,
            held_already=self._constant,
            elsewhere=self._elsewhere(),
        )
        self._state_copies.loaded(state)
        self._changes.loaded("load_full()", state)
        return self

    def _check_written(self) -> None:
        """Raise RunError where weights were written in a way that does not reach them."""
        self._assigned_data.check()
        self._state_copies.check()

    def _elsewhere(self) -> Iterable[str]:
        """Names of parameters, buffers and blocks that other places of a pipeline hold."""
        return ()

    def apply(self, fn: Any) -> NoReturn:
        """In place of nn.Module.apply. Raises RunError: a function that initialises would find none of its classes."""
        raise RunError(
            "apply(function): the parts of a sharded module hold its parameters and have no class of the model's, so "
            "that a function that looks for nn.Linear finds none. Initialise the model before compile, load_full what "
            "was initialised, or go over named_parameters(), whose values torch.nn.init draws alike on all ranks"
        )

    def load_constants(self, constants: Mapping[str, Tensor]) -> Self:
        """Fill the buffers named in `constants` and nothing else: what a saved plan carries beside the state dict.

        Raises RunError where a buffer that no state dict holds is not among them.
        """
        missing = [name for name, held in self._held.items() if not held.info.persistent and name not in constants]
        if missing:
            raise RunError(
                f"the plan has no values of {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}, which no "
                "state dict holds: it was made from a model on meta that does not say how they are computed (see the "
                "plan's notes). Plan the model again with real weights"
            )
        chosen = [held for name, held in self._held.items() if name in constants]
        checkpoint.load_full(chosen, {}, constants, self.MESH, strict=False)
        self._constant.update(dict.fromkeys(held.name for held in chosen))
        return self

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and buffers under original names and in their order, on the CPU of every rank; a collective
        operation."""
        self._check_written()
        found = checkpoint.full_state_dict(self._held.values(), self.ALIASES, self.MESH)
        return {name: found[name] for name in self._names if name in found}

    def rng_state(self) -> dict[str, int]:
        """Of what the random numbers to come follow: the seed, and how many steps there were; the same on all ranks.
        Save it beside the state dict, which has none."""
        return self.rng.state()

    def set_rng_state(self, state: Mapping[str, int]) -> None:
        """Go on with random numbers where `rng_state` was asked for, on all ranks alike. Raises RunError on anything
        else."""
        self.rng = self.rng.at(state)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """State of an optimizer of this model by original names and in original order, for
        torch.distributed.checkpoint."""
        return optimizer_state.optimizer_state_dict(self, optimizer, self._held, self.MESH)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, strict: bool = True
    ) -> None:
        """The inverse of `optimizer_state_dict`. Raises RunError where parameters that train have no state in it;
        `strict=False` lets these begin anew."""
        optimizer_state.load_optimizer_state_dict(self, optimizer, state, self._held, self.MESH, strict=strict)
        self._changes.loaded("load_optimizer_state_dict()", {})

    @torch.no_grad()
    def full_grads(self) -> dict[str, Tensor | None]:
        """Whole gradients under original names, on every rank, None where there is none; a collective operation."""
        trained = {n: h for n, h in self._held.items() if isinstance(h.tensor, nn.Parameter)}
        return {
            n: None if (grad := grad_at_rest(h.tensor)) is None else checkpoint.whole(local_of(grad), h, self.MESH)
            for n, h in trained.items()
        }

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does
        on one device; gives the norm before. A collective operation of all ranks. Raises RunError on a `norm_type` of 0
        or less, and with `error_if_nonfinite` on a norm that is nan or infinite."""
        return clip_grad_norm(
            self._counted(),
            list(self.parameters()),
            max_norm,
            self.MESH,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def _counted(self) -> list[nn.Parameter]:
        """The parameters whose gradients this place adds to a norm over all of them."""
        return list(self.parameters())
