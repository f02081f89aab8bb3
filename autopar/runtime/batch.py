"""The batch: cutting a global one, binding a local one to the inputs of the plan, and checking sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.layout import Layout, divisible, is_shard, parse, pieces, ways_of
from autopar.runtime.collectives import objects_of_all
from autopar.runtime.cuts import own
from autopar.runtime.mesh import Mesh
from autopar.runtime.nested import Nested, flat
from autopar.runtime.rank0_weights import fingerprint

EVEN = 2**20  # a multiple of every number of ranks that is a power of two up to this

Fixed = Mapping[str, tuple[int, Any]]
"""Plain arguments that are part of the program: name -> (place among all arguments, value)."""

Dims = Mapping[str, Sequence[str | int | None]]
"""Of each input its global sizes: a number that is part of the program, the name of a symbol, or None for what follows
from others."""

Sample = Mapping[str, tuple[Sequence[int], str]]
"""Of each input the shape and the dtype with which the model was captured."""


def bind(
    inputs: Mapping[str, str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fixed: Fixed | None = None,
    nested: Nested | None = None,
) -> list[Any]:
    """The values of a call in the order of `inputs`. An argument is one input, or (`nested`) a structure of several. An
    argument that is `fixed` may be passed with its planned value. Raises RunError where inputs are missing, given twice
    or unknown, and where a fixed argument has another value."""
    names = list(inputs)
    if kwargs.keys() != inputs.keys():  # where each input is given by its own name, no argument is meant
        args, kwargs = flat(nested or {}, args, kwargs)
    args, kwargs = _without(fixed, names, args, kwargs) if fixed else (args, kwargs)
    if len(args) > len(names):
        raise RunError(f"got {len(args)} inputs, wanted at most {len(names)}: {', '.join(names)}")
    values = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in inputs or name in values:
            why = "given twice" if name in values else "not an input that was planned"
            raise RunError(f"input {name!r} is {why}; the plan's inputs are {', '.join(names)}")
        values[name] = value
    missing = [name for name in names if name not in values]
    if missing:
        raise RunError(
            f"missing inputs {', '.join(missing)}; the plan's inputs are {', '.join(names)}. {_instead(args, missing)}"
        )
    return [values[name] for name in names]


def _instead(args: Sequence[Any], missing: Sequence[str]) -> str:
    """What to do where inputs are missing, as a sentence."""
    if len(args) == 1 and isinstance(args[0], (tuple, list, Mapping)):
        stars = "**" if isinstance(args[0], Mapping) else "*"
        return f"All of them came as one {type(args[0]).__name__}: pass {stars}batch in place of batch"
    return (
        f"Pass what was given to compile, targets too. A forward without {' and '.join(missing)} is another program: a "
        'second plan of the model, made of inputs without (and mode="inference" where the loss needs them)'
    )


def _without(
    fixed: Fixed, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments without those that are fixed, which must have their planned values; a tensor is never one of
    them."""
    order = list(names)
    for name, (place, _) in sorted(fixed.items(), key=lambda item: item[1][0]):
        order.insert(place, name)
    queue, left = iter(order), []
    for value in args:
        here = next(queue, "")
        while here in fixed and isinstance(value, Tensor):
            here = next(queue, "")
        if here in fixed:
            _as_planned(here, value, fixed[here][1])
        else:
            left.append(value)
    for name, (_, planned) in fixed.items():
        if name in kwargs:
            _as_planned(name, kwargs[name], planned)
    return left, {name: value for name, value in kwargs.items() if name not in fixed}


def _as_planned(name: str, value: Any, planned: Any) -> None:
    # nan is as planned where nan was
    """Raise RunError where a fixed argument has another value than was planned."""
    same = not isinstance(value, Tensor) and (value == planned or (value != value and planned != planned))
    if not same:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise RunError(
            f"argument {name!r} is {got}, and the plan was made with {name}={planned!r}, which is part of the emitted "
            f"program: pass {planned!r}, leave it out, or plan the model again with {name}={got}"
        )


def without_gradient(names: Iterable[str], values: Sequence[Any]) -> None:
    """Raise RunError where an input requires a gradient. The plan synchronises the gradients of parameters only: on
    each rank an input's gradient would be an unreduced partial sum."""
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Tensor) and value.requires_grad:
            raise RunError(
                f"input {name!r} requires grad, and a plan has ways for gradients of parameters alone: what came to "
                f"its `.grad` would not be that of the whole model. Pass {name}.detach() where nobody needs it. Else "
                "compile as one model what it comes from and what it goes into, or make it a parameter of the model"
            )


def without_autocast(mesh: Mesh) -> None:
    """Raise RunError where autocast is on: it knows nothing of what a program sends."""
    if torch.is_autocast_enabled(mesh.device.type):
        raise RunError(
            "autocast is on, and would change in which dtypes a program computes and sends that was planned without "
            'it: call the model outside of it, and plan it with compile(model, ..., precision="bf16") for mixed '
            "precision"
        )


def as_computed(sample: Sample, names: Iterable[str], values: Sequence[Any]) -> list[Any]:
    """Floating inputs cast to the dtypes in which the model was captured, as cast_forward_inputs of FSDP's
    MixedPrecisionPolicy does."""
    return [
        value.to(getattr(torch, sample[name][1])) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in zip(names, values, strict=True)
    ]


def check_kinds(sample: Sample, names: Iterable[str], values: Sequence[Any]) -> None:
    """Raise RunError where an input is of another kind of numbers (bool, integer, real, complex) than was planned: what
    the model does by dtype (`if mask.dtype == torch.bool`, `x.float()`) is decided in the program."""
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor) or name not in sample:
            continue
        planned: torch.dtype = getattr(torch, sample[name][1])
        if _kind(value.dtype) != _kind(planned):
            raise RunError(
                f"input {name!r} is {value.dtype} and was planned as {planned}: what a model does by the dtype of an "
                "input is part of the program, which may compute something else of this one. Give "
                f"{name}.to({planned}) where that is the same to the model, or plan it again with inputs as these are"
            )


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype == torch.bool, dtype.is_floating_point, dtype.is_complex


def as_sent(sample: Sample, names: Iterable[str], values: Sequence[Any]) -> list[Any]:
    """Inputs in the dtypes in which the model was captured, since stages send each other what they make of them in
    constant dtypes. Narrower ones are cast, which changes no value (kinds are those planned, `check_kinds`); raises
    RunError on others."""
    return [_widened(name, value, sample[name][1]) for name, value in zip(names, values, strict=True)]


def _widened(name: str, value: Any, planned: str) -> Any:
    wanted: torch.dtype = getattr(torch, planned)
    if not isinstance(value, Tensor) or value.dtype == wanted:
        return value
    if torch.promote_types(value.dtype, wanted) != wanted:
        raise RunError(
            f"input {name!r} is {value.dtype} and was planned as {wanted}: what stages of a pipeline send each other "
            f"is of the dtypes that were planned. Give {name}.to({wanted}), or plan the model again with inputs as "
            "these are"
        )
    return value.to(wanted)


def cut_batch(inputs: Mapping[str, str], values: Sequence[Any], mesh: Mesh) -> list[Any]:
    """This rank's part of each global input, on this rank's device. Raises RunError where a dim does not divide by the
    ranks that cut it."""
    return [_part(name, layout, value, mesh) for (name, layout), value in zip(inputs.items(), values, strict=True)]


def _part(name: str, layout: str, value: Any, mesh: Mesh) -> Any:
    """This rank's part of one global input. Raises RunError as `cut_batch` does."""
    if not isinstance(value, Tensor):
        return value
    if value.is_meta:
        raise RunError(
            f"input {name!r} is on the meta device and has no values: give a batch that has (example inputs of compile "
            "may be without)"
        )
    entries = parse(layout)
    for dim, size in enumerate(value.shape):
        ways = ways_of(entries, dim, mesh.sizes)
        if size % ways:
            raise RunError(
                f"input {name!r}: dim {dim} of size {size} does not divide by the {ways} ranks that cut it "
                f"(layout {layout} on {mesh}); use {divisible(size, ways)}, or plan for another mesh"
            )
    return own(value, entries, mesh.sizes, mesh.coord).contiguous().to(mesh.device)


def microbatched(value: Tensor, dim: int, runs: int, count: int) -> list[Tensor]:
    """The parts of `value` that `count` microbatches have, which share `dim`: it has `runs` pieces of the batch, and
    the k-th part of each is microbatch k's."""
    return [part.flatten(dim, dim + 1) for part in value.unflatten(dim, (runs, count, -1)).unbind(dim + 1)]


def joined(parts: Sequence[Tensor], dim: int, runs: int, sections: Sequence[int] = (1,)) -> Tensor:
    """The value of which microbatches have `parts`: the way back from `microbatched`. Each part has samples side by
    side in `sections` of these relative sizes, as the value has."""
    unit = parts[0].shape[dim] // sum(sections)
    cut = [part.split([size * unit for size in sections], dim) for part in parts]
    whole = [
        torch.stack([part.unflatten(dim, (runs, -1)) for part in same], dim + 1).flatten(dim, dim + 2)
        for same in zip(*cut, strict=True)
    ]
    return torch.cat(whole, dim) if len(whole) > 1 else whole[0]


def check_sizes(
    inputs: Mapping[str, str],
    dims: Dims,
    spans: Mapping[str, tuple[int, int | None, int]],
    values: Sequence[Any],
    mesh: Mesh,
) -> None:
    """Raise RunError where this rank's part of an input has a size that the program was not captured for: such a
    program might run, and compute something else than the model.

    `dims` has the global size of each dim of each input (`Dims`); an input that is not in it is not checked. `spans`
    has for each symbol its least and greatest size, and what the size must be a multiple of."""
    for (name, layout), value in zip(inputs.items(), values, strict=True):
        if name not in dims:
            continue
        if not isinstance(value, Tensor) or value.dim() != len(dims[name]):
            got = f"a tensor of {value.dim()} dims" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise RunError(f"input {name!r} is {got}, wanted a tensor of sizes ({', '.join(map(str, dims[name]))})")
        for dim, size in enumerate(dims[name]):
            wanted = _wanted_instead(
                value.shape[dim], size, spans, partial(_own_size, layout=parse(layout), dim=dim, mesh=mesh)
            )
            if wanted:
                raise RunError(
                    f"input {name!r}: dim {dim} has {value.shape[dim]} entries on this rank, wanted {wanted}. "
                    "Cut or pad the batch, or plan the model again for inputs of this size"
                )
    _check_together(inputs, dims, values, mesh)


def _check_together(inputs: Mapping[str, str], dims: Dims, values: Sequence[Tensor], mesh: Mesh) -> None:
    """Raise RunError where dims that are the same symbol have different global sizes: the local parts may broadcast
    although the whole tensors would not."""
    first: dict[str, tuple[int, str]] = {}
    for (name, layout), value in zip(inputs.items(), values, strict=True):
        entries = parse(layout)
        for dim, size in enumerate(dims.get(name, ())):
            if not isinstance(size, str):
                continue
            whole, what = value.shape[dim] * ways_of(entries, dim, mesh.sizes), f"dim {dim} of input {name!r}"
            wanted, other = first.setdefault(size, (whole, what))
            if whole != wanted:
                raise RunError(
                    f"{what} is {whole}, {other} is {wanted}: both are {size} of the program (sizes of the whole "
                    "batch). Give both the same size, or plan the model again with inputs whose sizes differ as these "
                    "do"
                )


def _wanted_instead(
    got: int, size: int | str | None, spans: Mapping[str, tuple[int, int | None, int]], own_size: Callable[[int], int]
) -> str:
    """The size that was wanted instead of `got`, in words; empty where `got` is right. `own_size` maps a global size to
    this rank's part of it."""

    def part(whole: int) -> str:
        return f"{whole}, of which {own_size(whole)} are this rank's" if own_size(whole) != whole else str(whole)

    if isinstance(size, int):
        return "" if got == own_size(size) else f"{part(size)}: it is part of the emitted program"
    least, most, step = spans.get(size or "", (0, None, 1))
    if most is not None and got > own_size(most):
        return f"at most {part(most)}: that is the greatest {size} the model was captured for"
    if got < own_size(least):
        return f"at least {part(least)}: with a smaller {size} the model does something else than was captured"
    ways = step * EVEN // own_size(step * EVEN)
    if got * ways % step:
        return (
            f"a multiple of {step}{f', cut {ways} ways' if ways > 1 else ''}: with another {size} the model does "
            "something else than was captured"
        )
    return ""


def _own_size(size: int, layout: Layout, dim: int, mesh: Mesh) -> int:
    """How many of the `size` entries of a dim this rank has."""
    return sum(stop - start for start, stop in pieces(size, layout, dim, mesh.sizes, mesh.coord))


def check_agreement(inputs: Mapping[str, str], values: Sequence[Any], mesh: Mesh) -> None:
    """Compare the shapes and dtypes of all ranks' parts, and the contents of parts that several ranks hold (by
    fingerprint); a collective operation. Raises RunError, on every rank, where they are not parts of one global
    batch."""
    if mesh.device_mesh is None or mesh.ranks == 1:
        return
    mine = [
        (tuple(v.shape), float(fingerprint(v)), str(v.dtype)) if isinstance(v, Tensor) else (None, repr(v), "no tensor")
        for v in values
    ]
    everyone = objects_of_all(mine, mesh)
    check_shapes(inputs, [[shape for shape, *_ in each] for each in everyone], mesh)
    check_dtypes(inputs, [[dtype for *_, dtype in each] for each in everyone])
    for index, (name, layout) in enumerate(inputs.items()):
        first: dict[tuple[int, ...], int] = {}
        for rank, coord in enumerate(_coords(mesh)):
            one = first.setdefault(
                tuple(c for c, entry in zip(coord, parse(layout), strict=True) if is_shard(entry)), rank
            )
            if everyone[rank][index] != everyone[one][index]:
                raise RunError(
                    f"input {name!r}: ranks {one} and {rank} have the same part of the batch under layout {layout} on "
                    f"{mesh}, but not the same in it. They work on it together: give them the same (samplers take "
                    "model.data_parallel_size and data_parallel_rank, and model.shard_loaded what they give), or "
                    "every rank its part of one global batch, as model.shard_batch(*global_batch) does"
                )


def check_dtypes(inputs: Mapping[str, str], everyone: Sequence[Sequence[str]]) -> None:
    """Raise RunError unless each input has the same dtype on all ranks."""
    for index, name in enumerate(inputs):
        for rank, each in enumerate(everyone):
            if each[index] != everyone[0][index]:
                raise RunError(
                    f"input {name!r} is {each[index]} on rank {rank} and {everyone[0][index]} on rank 0, and ranks "
                    "cannot sum what they compute of it: give it the same dtype on every rank"
                )


def check_shapes(inputs: Mapping[str, str], everyone: Sequence[Sequence[tuple[int, ...] | None]], mesh: Mesh) -> None:
    """Raise RunError unless each input has the same shape on all ranks (None: it is no tensor). A rank infers the
    global size of a dim as its own size times the number of ranks that cut it. If the last part were smaller, ranks
    would divide by different numbers of samples, although the parts do form one tensor."""
    for index, (name, layout) in enumerate(inputs.items()):
        if any(each[index] != everyone[0][index] for each in everyone):
            got = "; ".join(f"rank {rank}: {each[index]}" for rank, each in enumerate(everyone))
            raise RunError(
                f"input {name!r}: the ranks' parts do not fit together under layout {layout} on {mesh}: {got}. All "
                "parts have the same sizes: give every rank its part of one global batch, as "
                "model.shard_batch(*global_batch) does, and cut, pad or leave out a last batch that is smaller"
            )


def _coords(mesh: Mesh) -> list[tuple[int, ...]]:
    """The coordinates of all ranks, place by place."""
    return list(itertools.product(*map(range, mesh.sizes))) * mesh.places
