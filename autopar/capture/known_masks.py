"""Selection by masks whose values follow from sizes alone or are in a buffer: the number of selected rows is then known
without values. Used by export.

    mask = torch.eye(2 * b, dtype=torch.bool)
    negatives = similarity[~mask].view(2 * b, -1)          # SimCLR: all but the diagonal

How tensors are made from numbers and sizes (`torch.eye`, `arange`, comparisons, changes in place) is recorded, and
repeated with values where such a mask selects something. If each row of the mask selects equally many elements, that
many columns of each row are gathered; a rank can do that for its shard of the rows. Else elements of the flattened
tensor are selected. In both cases their positions come from sorting the mask, in the graph. The sizes of the mask
become numbers, so the plan holds for these alone.

A buffer may have other values in a checkpoint. A mask that selects equally many elements then is right; for another one
the graph raises an error when it runs (`ops.picked_places`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar._torch import pytree
from autopar.capture.by_tensor import UntilChanged
from autopar.capture.devices import changed
from autopar.capture.leaves import tensors_of
from autopar.capture.shadow import ATTRIBUTES, BUFFERS
from passes import ops

FILLED: dict[str, float] = {"new_ones": 1, "new_zeros": 0, "ones_like": 1, "zeros_like": 0}
"""Functions that read only the sizes of their operand -> the number with which they fill the result."""
UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Functions whose results have arbitrary values."""
MOST_MASK_ELEMENTS = 2**27
"""Masks with more elements are not computed to count what they select."""


@dataclass(frozen=True, eq=False)
class _Made:
    """How a tensor was made: by a call whose tensor arguments are `_Made` too. `changed`: the call changes its first
    argument in place, and that is the tensor. `held`: it was computed from buffers."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    changed: bool = False
    held: bool = False


class KnownMasks(TorchFunctionMode):
    """A mode in which selections by such masks have a known size, if `counting`. `left` counts the selections that were
    not replaced because `counting` is off: their size follows from symbolic sizes, or from a buffer."""

    def __init__(self, *, counting: bool) -> None:
        super().__init__()
        self.counting, self.left = counting, 0
        self._made = UntilChanged[_Made]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if (
            name in ("__getitem__", "masked_select")
            and len(args) == 2
            and not kwargs
            and (name == "__getitem__" or args[0].dim() == args[1].dim())  # else masked_select broadcasts
            and (picked := self._picked(*args)) is not None
        ):
            if (made := self._how(func, name, args, kwargs)) is not None:
                self._made.keep(picked, made)
            return picked
        made = None if name in UNFILLED else self._how(func, name, args, kwargs)
        result = func(*args, **kwargs)
        in_place = changed(func, args, kwargs)
        for tensor in in_place:
            self._made.forget(tensor)
        if made is None:
            return result
        if in_place and isinstance(args[0], Tensor):
            self._made.keep(args[0], made)
        elif isinstance(result, Tensor):
            if name in FILLED:
                made = _Made(torch.full, (tuple(result.shape), FILLED[name]), {"dtype": result.dtype})
            self._made.keep(result, made)
        return result

    def _how(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Made | None:
        """How a call makes its result, or its first argument where it changes that, if it is known how all its tensor
        arguments are made; not for calls with `out`."""
        if kwargs.get("out") is not None:
            return None
        if name not in FILLED and any(self._of(tensor) is None for tensor in tensors_of((args, kwargs))):
            return None
        known_args, known_kwargs = pytree.tree_map(
            lambda item: self._of(item) if isinstance(item, Tensor) else item, (args, kwargs)
        )
        held = any(leaf.held for leaf in pytree.tree_leaves((known_args, known_kwargs)) if isinstance(leaf, _Made))
        return _Made(func, known_args, known_kwargs, bool(changed(func, args, kwargs)), held)

    def _of(self, tensor: Tensor) -> _Made | None:
        """How a tensor was made, if known; plain attributes and buffers of the model count as constants."""
        made = self._made.get(tensor)
        if made is None:
            for values in (ATTRIBUTES, BUFFERS):
                if (value := values.get(tensor)) is not None:
                    made = _Made(value.cpu, (), {}, held=values is BUFFERS)
                    self._made.keep(tensor, made)
        return made

    def _picked(self, rows: Tensor, index: Any) -> Tensor | None:
        """`rows[index]`, computed without a size that depends on values; None where that is not known, or not
        wanted."""
        if (found := _masked(rows, index)) is None or (made := self._of(found[0])) is None:
            return None
        mask, first = found
        if (made.held or any(isinstance(size, torch.SymInt) for size in mask.shape)) and not self.counting:
            self.left += 1
            return None
        # asked of symbolic sizes, too: they are those of the mask then
        if any(size != wanted for size, wanted in zip(rows.shape[first:], mask.shape, strict=False)):
            return None
        if mask.numel() > MOST_MASK_ELEMENTS or (counts := _counts(made)) is None:
            return None
        return _rows(rows, mask, first, counts, ops.CHECKED_PLACES if made.held else _places)


def _masked(rows: Tensor, index: Any) -> tuple[Tensor, int] | None:
    """The mask in `index`, and the first dim of `rows` that it indexes. None unless all other parts of the index are
    whole dims."""
    parts = list(index) if isinstance(index, tuple) else [index]
    masks = [place for place, part in enumerate(parts) if isinstance(part, Tensor)]
    if len(masks) != 1 or parts[masks[0]].dtype is not torch.bool or not parts[masks[0]].dim():
        return None
    mask, before, behind = parts[masks[0]], parts[: masks[0]], parts[masks[0] + 1 :]
    first = rows.dim() - mask.dim() - len(behind) if Ellipsis in before else len(before)
    whole = all(part is Ellipsis or part == slice(None) for part in (*before, *behind))
    return (mask, first) if whole and 0 <= first <= rows.dim() - mask.dim() else None


def _places(mask: Tensor, count: int) -> Tensor:
    """The first `count` positions of each row of `mask [..., n]` where it is true: [..., count]."""
    return mask.int().argsort(dim=-1, descending=True, stable=True)[..., :count]


def _rows(
    rows: Tensor, mask: Tensor, first: int, counts: list[int], places_of: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """The rows selected by `mask`, which indexes the dims of `rows` from `first` on; `counts` is how many each row of
    the mask selects along its last dim. `places_of` finds their positions."""
    last = first + mask.dim() - 1
    if mask.dim() == 1 or len(set(counts)) > 1:
        return rows.flatten(first, last).index_select(first, places_of(mask.flatten(), sum(counts)))
    places = places_of(mask, counts[0])
    wide = places.reshape(*[1] * first, *places.shape, *[1] * (rows.dim() - last - 1)).expand(
        *rows.shape[:first], *places.shape, *rows.shape[last + 1 :]
    )
    return rows.gather(last, wide).flatten(first, last)


def _counts(made: _Made) -> list[int] | None:
    """How many elements each row of a mask selects, along its last dim. None where the mask cannot be computed here, or
    is random. Computed in a thread of its own, because torch's modes belong to a thread."""
    steps = _steps(made)
    plain = [pytree.tree_map(_plain, (step.args, step.kwargs)) for step in steps]

    def counted() -> list[int] | None:
        before = torch.get_rng_state()
        found = _value(steps, plain).sum(-1).flatten().tolist()
        if torch.equal(before, torch.get_rng_state()):
            return list(found)
        torch.set_rng_state(before)
        return None

    with ThreadPoolExecutor(1) as outside:
        try:
            return outside.submit(counted).result()
        except (RuntimeError, TypeError, ValueError):
            return None


def _steps(made: _Made) -> list[_Made]:
    """`made` and all that it is made from, each once, after what it reads."""
    found: dict[_Made, None] = {}
    waiting = [made]
    while waiting:
        missing = [read for read in _reads(waiting[-1]) if read not in found]
        waiting += missing
        if not missing:
            found[waiting.pop()] = None
    return list(found)


def _reads(made: _Made) -> list[_Made]:
    return [leaf for leaf in pytree.tree_leaves((made.args, made.kwargs)) if isinstance(leaf, _Made)]


def _plain(item: Any) -> Any:
    """Sizes as numbers, which fixes them; devices as the CPU."""
    return (
        int(item) if isinstance(item, torch.SymInt) else torch.device("cpu") if isinstance(item, torch.device) else item
    )


def _value(steps: list[_Made], plain: list[Any]) -> Any:
    """The tensor that the last of `steps` makes, with `plain` arguments. Other values are freed after their last
    reader."""
    readers = Counter(read for step in steps for read in _reads(step))
    values: dict[_Made, Any] = {}
    for step, arguments in zip(steps, plain, strict=True):
        args, kwargs = pytree.tree_map(lambda item: values[item] if isinstance(item, _Made) else item, arguments)
        kwargs = {name: "cpu" if name == "device" else item for name, item in kwargs.items()}
        if step.changed:
            args = (args[0].clone(), *args[1:])
        result = step.func(*args, **kwargs)
        values[step] = args[0] if step.changed else result
        for read in _reads(step):
            readers[read] -= 1
            if not readers[read]:
                values.pop(read, None)
    return values[steps[-1]]
