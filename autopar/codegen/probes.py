"""Probes: calls in an emitted file that report every value and gradient, to find the first wrong node.

`emit(..., probes=True)` puts `x = self.probe("node", x, "S0,R|S0,P", (b, s, 64))` behind each operator. What a probe
does is up to `autopar.verify`; ordinary files have none.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.problem.pairs import LayoutPair


def probe(name: str, variable: str, pair: LayoutPair, shape: str) -> str:
    """The line that reports one value; `shape` is its global shape (of a microbatch, where there are several)."""
    return f'{variable} = self.probe("{name}", {variable}, "{pair}", {shape})'


def names(name: str, count: int) -> Sequence[str]:
    """The names under which the outputs of one node are reported."""
    return [name] if count == 1 else [f"{name}:{i}" for i in range(count)]
