"""Reduce-scatters of gradients of gathered weights, in the background of the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from autopar.runtime.moves import Chain


@dataclass(eq=False)
class Scatter:
    """The reduce-scatter of the gradient of one parameter, in the background; `done` takes the result."""

    chain: Chain
    done: Callable[[Tensor], None]

    @property
    def nbytes(self) -> float:
        """Bytes of the input of its running collective."""
        return self.chain.nbytes

    @property
    def more(self) -> bool:
        """Whether a collective is yet to begin."""
        return self.chain.more

    def go_on(self) -> bool:
        """Start the next collective, or pass the result to `done`. Returns whether `go_on` is to be called again."""
        if self.chain.more:
            self.chain.go_on()
            return True
        self.done(self.chain.finish())
        return False

    def wait(self) -> None:
        """Wait for the current collective."""
        self.chain.wait()
