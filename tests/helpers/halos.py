"""Convolutions and pools of an image that is cut, as their calls are emitted, on all ranks at once without a process
group: the runtime's `halo` takes the rows of other ranks from the whole image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from autopar.codegen.algorithms import PlannedCall, algorithm_text
from autopar.codegen.expressions import Written
from autopar.plan import NodePlan
from autopar.rules.oracle import RunOnAllRanks, call_of
from autopar.window_rows import Window


def halo(target: Any, shape: Sequence[int]) -> RunOnAllRanks:
    """Each rank runs what is written for it: the operator without padding along the dim that is cut, on the rows that
    it needs, padded at the ends of the image of `shape`."""

    def run(shards: Sequence[Any]) -> list[torch.Tensor]:
        (dim,) = [d for d, (whole, part) in enumerate(zip(shape, shards[0][0][0].shape, strict=True)) if whole != part]
        image = torch.cat([args[0] for args, _ in shards], dim)
        return [
            _emitted(target, image, args, kwargs, f"S{dim}", _rows(image, len(shards), rank))
            for rank, (args, kwargs) in enumerate(shards)
        ]

    return run


def _rows(image: torch.Tensor, ways: int, rank: int) -> Callable[..., torch.Tensor]:
    """What `runtime.algorithms.halo` gives on one rank."""

    def halo(
        x: torch.Tensor, *, dim: int, size: int, outs: int, reach: int, stride: int = 1, padding: int = 0, **rest: Any
    ) -> torch.Tensor:
        assert rest.keys() <= {"axis", "mesh", "fill"} and x.shape[dim] < size == image.shape[dim]
        window = Window(size, outs, reach, stride, padding)
        lo, hi = window.needs(ways, rank)
        pads = (0, 0) * (image.dim() - 1 - dim) + window.pads(ways, rank)
        return F.pad(image.narrow(dim, lo, hi - lo), pads, value=rest.get("fill", 0.0))

    return halo


def _emitted(
    target: Any, image: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any], cut: str, rows: Callable[..., Any]
) -> Any:
    """The value of the text that is written for the operator on a rank with `args`, where `cut` is the layout of
    `image` on the only axis."""
    held = {f"t{place}": arg for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    texts = tuple(f"t{place}" if f"t{place}" in held else repr(arg) for place, arg in enumerate(args))
    call = call_of(target, (image, *args[1:]), kwargs)
    node = NodePlan((f"{cut}|{cut}",), (f"{cut}|{cut}",), ("",), ("attribute",), ("halo",))
    # of an Op and of the writer of its scope what the text of a halo needs: a program is not at hand, nor a graph
    text = algorithm_text(
        PlannedCall(
            SimpleNamespace(name=str(target), target=target, call=call),  # type: ignore[arg-type]
            node,
            Written(texts, {name: repr(value) for name, value in kwargs.items()}, tuple(args), ()),
            SimpleNamespace(algorithms={}, use=lambda target: None),  # type: ignore[arg-type]
        )
    )
    assert text is not None and text.count("halo(") == 1
    return eval(text, {"torch": torch, "F": F, "MESH": None, "halo": rows, **held})
