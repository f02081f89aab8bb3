"""State of an optimizer that is not shaped as its parameter: means of rows and columns (Adafactor), a scale for each
row of what is kept in 8 bits.

DTensor cuts such a tensor along with what it was computed from. Of a parameter that rests in sections (params.py) its
rows are then in that parameter's order: with 2 ranks and q, k, v in one matrix, q's first half, k's, v's, then the
second halves. A checkpoint has the model's order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import RunError
from autopar.layout import Entry, Layout, dim_of, is_placed, is_shard, sections_of, shard
from autopar.runtime.checkpoint import check_order, plain
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import relayout
from autopar.runtime.params import Held, distribute

INSTEAD = 'Save its weights alone, or plan with recipe="zero3" or "ddp", where parameters rest in order'


def saved(key: str, value: Tensor, h: Held, mesh: Mesh) -> Tensor:
    """The state `key` of `h` as a checkpoint has it: in the model's order, sums over ranks completed; a collective
    operation.

    Raises RunError for a part of this rank that is no DTensor, of which a checkpoint would have the first rank's alone,
    and where the order cannot be told.
    """
    if not isinstance(value, DTensor):
        _check_whole(key, value, h)
        return value
    if any(at.is_partial() for at in value.placements):
        value = value.redistribute(placements=[Replicate() if at.is_partial() else at for at in value.placements])
    if not h.info.sectioned:
        return value
    rests = _layout(key, value, h)
    return value if rests == plain(rests) else _moved(value, rests, plain(rests), h, mesh, model_order=True)


def loaded(key: str, value: Tensor, h: Held, mesh: Mesh) -> Tensor:
    """The inverse of `saved`."""
    if not isinstance(value, DTensor) or not h.info.sectioned:
        return value
    rests = _layout(key, value, h)
    if rests == plain(rests):
        return value
    check_order(value, h.name, mesh)
    return _moved(value, plain(rests), rests, h, mesh, model_order=False)


def _moved(value: DTensor, source: Layout, target: Layout, h: Held, mesh: Mesh, *, model_order: bool) -> Tensor:
    """`value`, which lies as `source`, as a DTensor of what lies as `target`."""
    shape = tuple(value.shape)
    local = relayout(value.to_local().detach().to(mesh.device), source, target, shape, mesh, h.name)
    return distribute(local.contiguous(), shape, target, mesh, model_order=model_order)


def _layout(key: str, value: DTensor, h: Held) -> Layout:
    """How `value` lies, with the sections of the parameter that it was computed from."""
    return tuple(
        _entry(key, value, h, own, at.dim if at.is_shard() else None)  # type: ignore[attr-defined, unused-ignore]
        for own, at in zip(h.info.entries, value.placements, strict=True)
    )


def _entry(key: str, value: Tensor, h: Held, own: Entry, cut: int | None) -> Entry:
    """One axis, on which the parameter rests as `own` and `value` is cut along dim `cut`, or whole. Raises RunError
    where more dims of `value` than it says may be rows of the parameter."""
    if is_shard(own) and len(sections_of(own)) > 1:
        shape = h.info.shape
        rows = shape[dim_of(own)]
        may_be_rows = tuple(value.shape).count(rows) - (shape.count(rows) - 1 if cut is None else 1)
        if may_be_rows > 0 or (cut is not None and value.shape[cut] != rows):
            raise _unordered(key, value, h)
        return "R" if cut is None else shard(cut, sections_of(own))
    if is_placed(own) and cut is not None:
        raise _unordered(key, value, h)
    return "R" if cut is None else f"S{cut}"


def _check_whole(key: str, value: Tensor, h: Held) -> None:
    """Raise RunError where the plain tensor `value` is this rank's part of `h`, or has rows in another order."""
    here, whole = h.local.numel(), torch.Size(h.info.shape).numel()
    if value.dim() and value.numel() == here != whole:
        raise RunError(
            f"the optimizer's state {key!r} of {h.name} is a plain tensor of this rank's part, {tuple(value.shape)}: a "
            "checkpoint would have that of the first rank alone. Make it of the parameter, as "
            "torch.zeros_like(parameter) does, so that it is a DTensor"
        )
    if value.dim() and any(is_shard(e) and value.shape.count(h.info.shape[dim_of(e)]) for e in _sections(h)):
        raise _unordered(key, value, h)


def _sections(h: Held) -> list[Entry]:
    return [e for e in h.info.entries if is_shard(e) and len(sections_of(e)) > 1]


def _unordered(key: str, value: Tensor, h: Held) -> RunError:
    return RunError(
        f"the optimizer's state {key!r} of {h.name} has shape {tuple(value.shape)}, of a parameter of shape "
        f"{h.info.shape} that rests as {h.info.layout}, its rows in another order than the model's: which dims of the "
        f"state are such rows cannot be told, and another plan would read them in the wrong order. {INSTEAD}"
    )
