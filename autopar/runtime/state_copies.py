"""A check that nobody writes into what `state_dict()` gave of a weight that rests in another order than the model's, as
averages of weights and torch.distributed.checkpoint do: it is a copy then, where other values are the weights
themselves. What was written would be lost, in silence.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from autopar._torch import give_local, local_of
from autopar.errors import RunError


class StateCopies:
    """The copies of one module that were given last, by name: tensors without memory that share their version
    counters, with the versions in which they were given."""

    def __init__(self) -> None:
        self._given: dict[str, list[tuple[Tensor, int]]] = {}

    def gave(self, name: str, copy: Tensor) -> Tensor:
        """Watch `copy`, which is given for `name`; returns it."""
        # what is written into a DTensor counts there, and into its local tensor (by checkpoints) here
        tensors = [one for one in (copy, local_of(copy)) if not one.is_inference()]  # these have no versions
        self._given[name] = [(_without_memory(one), one._version) for one in tensors]
        return copy

    def loaded(self, names: Iterable[str]) -> None:
        """Values of `names` are loaded, perhaps those that were written into copies."""
        for name in names:
            self._given.pop(name, None)

    def check(self) -> None:
        """Raise RunError where a copy was written into and not loaded since, once for each time."""
        wrong = [name for name, probes in self._given.items() if any(probe._version != was for probe, was in probes)]
        self.loaded(wrong)
        if wrong:
            raise RunError(
                f"{wrong[0]} of state_dict() was written into"
                f"{f', one of {len(wrong)} such values' if len(wrong) > 1 else ''}. The weight rests in another order "
                "than the model's, so that state_dict() has a copy of it, and what was written is not in the model: "
                "give load_state_dict() the state dict, or write into parameters() in place"
            )


def _without_memory(tensor: Tensor) -> Tensor:
    """A tensor that has the version counter of `tensor`, and not its values."""
    probe = tensor.detach()
    give_local(probe, local_of(tensor).new_empty(0))
    return probe
