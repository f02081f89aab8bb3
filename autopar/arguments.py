"""Checks of the arguments of `compile`: each is converted to the type that the rest works with, or an error says what
was given and what is wanted. Called by api.compile.

`CHECKS` has an entry for each argument. Names are looked up here, before the model is captured, which may take minutes.
What can only be checked against the model, the cluster or the graph is checked where these are known.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F

from autopar.cluster import Cluster
from autopar.cost.memory import check_optimizer
from autopar.errors import AutoparError, CaptureError, ClusterError, PlanError, RuleError
from autopar.optimizers import OPTIMIZERS
from autopar.plan_schema import MOST
from autopar.text import first_line, near, shown, sizes

Check = Callable[[str, Any], Any]  # (name of the argument, its value) -> the value to work with; raises an AutoparError


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, each as its entry of CHECKS returns it. Raises CaptureError, ClusterError, RuleError and
    PlanError."""
    return {name: CHECKS[name](name, value) for name, value in given.items()}


def folder(value: Any) -> Path:
    """The path of the folder of a saved plan. Raises PlanError for anything that is not a path."""
    if not isinstance(value, (str, os.PathLike)):
        fail("folder", value, "the path of a folder")
    return Path(value)


def some(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise CaptureError where the inputs have no element at all: nothing can be planned for such sizes."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim()]
    if tensors and not any(value.numel() for value in tensors):
        raise CaptureError(
            f"example_inputs have no elements (shapes {', '.join(str(tuple(value.shape)) for value in tensors)}): "
            "their sizes are what is planned for; give a batch of the size that a step has (on the command line: in "
            "what the factory returns, which --batch and --seq are handed to)"
        )


def unsized(**given: int | None) -> None:
    """Raise PlanError where sizes are given beside inputs, which have theirs: others would be planned than were asked
    for."""
    for name, size in given.items():
        if size is not None:
            fail(name, size, "no size beside example_inputs: theirs are planned for, so make them of this size")


def fail(name: str, got: object, wanted: str, kind: type[AutoparError] = PlanError) -> NoReturn:
    """Raise an error of `kind` that says which argument it is, what was given and what is wanted."""
    text = f"the class {got.__name__}" if isinstance(got, type) else shown(got)
    of_type = "" if isinstance(got, (str, type)) or got is None else f" ({type(got).__name__})"
    raise kind(f"{name} is {text}{of_type}; wanted {wanted}")


def _model(name: str, value: Any) -> Any:
    """An nn.Module."""
    if isinstance(value, nn.Module):
        return value
    what = "an nn.Module"
    if isinstance(value, type) and issubclass(value, nn.Module):
        what = f"an nn.Module: make one of it, {value.__name__}(...)"
    elif inspect.isroutine(value):
        what = "an nn.Module: call it where it makes one, or put the function into the forward of a Module"
    elif isinstance(value, str):
        what = "an nn.Module: make the model first (the command line, `autopar plan`, takes names of models)"
    return fail(name, value, what, CaptureError)


def _cluster(name: str, value: Any) -> Any:
    """A Cluster, or the name, file or description of one."""
    if isinstance(value, (str, Path)):
        return Cluster.parse(value)
    if isinstance(value, Cluster):
        return value
    count = len(value) if isinstance(value, (list, tuple)) else 4
    return fail(
        name,
        value,
        f"a Cluster, or the name of one: PRESET:NODESxDEVICES as 'h100:1x{count}' or 'cpu:1x{count}', a .toml file, or "
        "'here'",
        ClusterError,
    )


def _example(name: str, value: Any) -> Any:
    """Example inputs: a tuple, a dict by names, a pair of both, or None."""
    wanted = "a tuple of positional inputs, a dict of named ones, or (tuple, dict)"
    if isinstance(value, (str, bytes)) or not (value is None or isinstance(value, Iterable)):
        fail(name, value, wanted, CaptureError)
    if not all(isinstance(key, str) for key in _named(value)):
        fail(name, value, f"{wanted}, whose names are text", CaptureError)
    return value


def split(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as (positional ones, those by name)."""
    if isinstance(value, torch.Tensor):
        return (value,), {}
    placed = () if isinstance(value, Mapping) else value[0] if _is_pair(value) else tuple(value)
    return placed, dict(_named(value))


def _named(value: Any) -> Mapping[Any, Any]:
    """Of example inputs those by name."""
    return value if isinstance(value, Mapping) else value[1] if _is_pair(value) else {}


def _is_pair(value: Any) -> bool:
    """Whether example inputs are (positional ones, those by name)."""
    return (
        isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], Mapping)
    )


def _loss(name: str, value: Any) -> Any:
    """A loss function, or None."""
    if isinstance(value, str):
        known = [known for known in dir(F) if known.endswith("_loss")]
        like = f"{value.removesuffix('_loss')}_loss"
        fail(name, value, f"a function of outputs and targets, as torch.nn.functional.mse_loss{near(like, known)}")
    if isinstance(value, type):
        fail(name, value, f"a function of outputs and targets: make one of it, {value.__name__}()")
    if value is not None and not callable(value):
        fail(name, value, "a function of outputs and targets, as torch.nn.functional.mse_loss")
    return value


def _search(name: str, value: Any) -> Any:
    """The name of a search, or a function."""
    from autopar.asked_search import search_of  # solvers: not there where plans are only loaded
    from autopar.search import SEARCHES

    if isinstance(value, type) or not (isinstance(value, str) or callable(value)):
        fail(name, value, f"one of {', '.join(SEARCHES)}, or a function as autopar.search.Search has it")
    search_of(value)
    return value


def _recipe(name: str, value: Any) -> Any:
    from autopar.recipes.names import check_name  # with the graph of problems, as above

    if value is not None:
        check_name(_text("the name of one strategy (`autopar recipes` lists them)")(name, value))
    return value


def _remat(name: str, value: Any) -> Any:
    from autopar.request import check_remat

    check_remat(_text("'auto', 'none', 'selective' or 'full'")(name, value))
    return value


def _optimizer(name: str, value: Any) -> Any:
    check_optimizer(
        _text(
            f"the name of one that a plan can have state for: {', '.join(OPTIMIZERS)}; the optimizer itself is made of "
            "the compiled model's parameters()"
        )(name, value)
    )
    return value


def _mesh(name: str, value: Any) -> tuple[int, ...] | None:
    """Sizes of mesh axes as a tuple, from `2x4`, a number or a sequence; or None."""
    if value is None:
        return None
    found = (
        sizes(value)
        if isinstance(value, str)
        else (value,)
        if _is_whole(value)
        else tuple(value)
        if isinstance(value, (list, tuple))
        else None
    )
    if not found or not all(_is_whole(size) and size > 0 for size in found):
        fail(name, value, "the sizes of the mesh axes, whole numbers of at least 1, as (2, 2)")
    return tuple(int(size) for size in found)


def _precision(name: str, value: Any) -> str | None:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return _optional_text("'bf16', 'fp16', or a floating dtype of torch")(name, value)


def _seconds(name: str, value: Any) -> float:
    """A number of seconds above 0."""
    try:
        seconds = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number above all floats
        seconds = math.inf
    if not seconds > 0:
        fail(name, value, "seconds, a number above 0, as 30.0")
    return seconds


def _rules(name: str, value: Any) -> Any:
    """A mapping of rules, or None (rules.as_rules checks the entries)."""
    if value is not None and not isinstance(value, Mapping):
        fail(
            name,
            value,
            "a dict of operators and rule strings, as {torch.ops.mine.scale.default: 'b d -> b d'}",
            RuleError,
        )
    return value


def _whole(least: int) -> Check:
    """A check that takes a whole number of at least `least`."""

    def check(name: str, value: Any) -> int:
        if not _is_whole(value) or value < least:
            fail(name, value, f"a whole number of at least {least}")
        if value > MOST:  # what a plan file may say
            fail(name, value, f"a whole number of at most {MOST}")
        return int(value)

    return check


def _text(wanted: str) -> Check:
    """A check that takes any text; `wanted` says what is wanted."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, str):
            fail(name, value, wanted)
        return value

    return check


def _flag(name: str, value: Any) -> Any:
    """A bool."""
    if not isinstance(value, bool):
        fail(name, value, "True or False")
    return value


def _optional_text(wanted: str) -> Check:
    """A check that takes text or None."""
    check = _text(wanted)
    return lambda name, value: None if value is None else check(name, value)


def _mode(name: str, value: Any) -> Any:
    """ "train" or "inference"."""
    if value not in ("train", "inference"):
        raise PlanError(f"{name} is {value!r}, wanted train or inference{near(str(value), ('train', 'inference'))}")
    return value


def _progress(name: str, value: Any) -> Any:
    """A function of one text, or None."""
    if value is not None and not callable(value):
        fail(name, value, "a function of one text, as print")
    return value


def _source(name: str, value: Any) -> Any:
    """A mapping of plain data, which goes into plan.json, or None."""
    if value is not None and not isinstance(value, Mapping):
        fail(name, value, "a dict")
    try:
        json.dumps(dict(value or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{name} goes into plan.json, and {first_line(error)}: wanted a dict of text, numbers and lists of them"
        ) from error
    return value


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number, of Python or numpy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


CHECKS: dict[str, Check] = {
    "model": _model,
    "cluster": _cluster,
    "example_inputs": _example,
    "loss_fn": _loss,
    "search": _search,
    "mesh": _mesh,
    "mode": _mode,
    "precision": _precision,
    "recipe": _recipe,
    "batch": _whole(1),
    "seq": _whole(1),
    "rules": _rules,
    "optimizer": _optimizer,
    "remat": _remat,
    "pareto": _flag,
    "prove": _flag,
    "time_limit_s": _seconds,
    "seed": _whole(0),
    "progress": _progress,
    "source": _source,
}
