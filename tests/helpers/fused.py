"""A model whose state dict has other names than its parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Fused(nn.Module):
    """One product for two layers, whose state dict has two weights, as torchtitan's attention has."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 8, bias=False)
        self._register_state_dict_hook(self._saved)

    @staticmethod
    def _saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        first, second = state.pop(f"{prefix}both.weight").chunk(2)
        state |= {f"{prefix}first.weight": first, f"{prefix}second.weight": second}

    def forward(self, x: Tensor) -> Tensor:
        """[b, 4] -> []."""
        first, second = self.both(x).chunk(2, -1)
        return (first * second).square().mean()
