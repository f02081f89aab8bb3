"""Values of what a model computes when it is made (rope tables, position ids), for a model on the meta device.

There are three ways to compute a module's tensors: its `reset_parameters`, the `_init_weights(module)` of the Hugging
Face model that it is in, and its constructor, called again with the arguments that it kept as attributes. All run on
copies whose weights stay on meta, so no memory of their size is used. The values of a way are used only if it gives the
same ones for two different previous contents of the tensor, which shows that it writes all of it, deterministically.
Where several ways give values, they must agree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.capture import block_runs
from autopar.capture._torch import OF_MODELS
from autopar.capture.shadow import shadow
from autopar.text import first_line

Values = dict[str, torch.Tensor]
WEIGHTS = (torch.empty, torch.empty_like, torch.rand, torch.randn, torch.normal)
"""Functions that make weights, uninitialised or random. Values that can be recomputed do not come from these."""
# arguments of constructors that say where and in what tensors are made, not what they hold
FACTORY = ("device", "dtype")


def recompute(model: nn.Module, names: list[str]) -> tuple[Values, dict[str, str]]:
    """Values on the CPU of the tensors `names` of `model`, buffers or plain attributes; and for each that has none,
    why."""
    found: Values = {}
    why: dict[str, str] = {}
    by_owner: dict[str, list[str]] = {}
    for name in names:
        by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for path, wanted in by_owner.items():
            answers, said = _answers(model, path, [name.rpartition(".")[2] for name in wanted])
            for name in wanted:
                given = {
                    way: values[key] for way, values in answers.items() if (key := name.rpartition(".")[2]) in values
                }
                if given and _agree(list(given.values())):
                    found[name] = next(iter(given.values()))
                else:
                    why[name] = f"{' and '.join(given)} give different values" if given else "; ".join(said)
    return found, why


def _answers(model: nn.Module, path: str, keys: list[str]) -> tuple[dict[str, Values], list[str]]:
    """The values that each way gives for the tensors `keys` of the module at `path`, and the reasons of those that give
    none."""
    answers: dict[str, Values] = {}
    said: list[str] = []
    for way, give in (
        ("reset_parameters", _reset),
        ("_init_weights", _init_weights),
        ("its constructor", _constructed),
    ):
        try:
            answers[way] = give(model, path, keys)
        except OF_MODELS as error:  # code that makes tensors and needs values of weights: this way gives nothing
            said.append(f"{way}: {first_line(error)[:200]}")
        else:
            said += [f"{way} does not make it"] if not answers[way] else []
    return answers, said


def _reset(model: nn.Module, path: str, keys: list[str]) -> Values:
    """The tensors that `reset_parameters` of the module at `path` makes."""
    if not callable(getattr(model.get_submodule(path), "reset_parameters", None)):
        raise AttributeError("there is none")
    return _written(model.get_submodule(path), keys, lambda copy: copy.reset_parameters())


def _init_weights(model: nn.Module, path: str, keys: list[str]) -> Values:
    """The tensors that `_init_weights` makes of the module at `path`: its own, or that of the nearest module around
    it."""
    parts = path.split(".") if path else []
    around = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1)]
    write: Any = next((found for module in around if callable(found := getattr(module, "_init_weights", None))), None)
    if write is None:
        raise AttributeError("there is none")
    return _written(model.get_submodule(path), keys, write)


def _written(owner: nn.Module, keys: list[str], write: Callable[[Any], object]) -> Values:
    """The tensors that `write` fills completely in a copy of `owner`, whatever they contained before."""
    runs: list[Values] = []
    for number in (0, 1):
        copy = shadow(owner)
        for key in keys:
            before = _poison(getattr(copy, key), number)
            if key in copy._buffers:
                copy._buffers[key] = before
            else:
                setattr(copy, key, before)
        torch.manual_seed(number)
        with _light():
            write(copy)
        runs.append(_like(copy, owner, keys))
    return _agreed(*runs)


def _constructed(model: nn.Module, path: str, keys: list[str]) -> Values:
    """The tensors of a second module, constructed with the arguments of the first; its plain attributes must equal
    those of the first."""
    owner = model.get_submodule(path)
    given = _kept_arguments(owner)
    runs: list[Values] = []
    for number in (0, 1):
        torch.manual_seed(number)
        with _light():
            made = type(owner)(**given)
        made.train(owner.training)
        if _shape_of(made) != _shape_of(owner):
            raise ValueError("run again with the arguments that are kept it makes another module")
        runs.append(_like(made, owner, keys))
    return _agreed(*runs)


def _agreed(first: Values, second: Values) -> Values:
    """What two runs have made alike."""
    return {key: value for key, value in first.items() if key in second and same(value, second[key])}


def _kept_arguments(owner: nn.Module) -> dict[str, Any]:
    """The constructor's arguments, from attributes of the same names. Raises ValueError where one has no such
    attribute, even if it has a default."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(owner).__init__).parameters.items():
        if name == "self" or (name in FACTORY and parameter.default is None):
            continue
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ) or name not in vars(owner):
            raise ValueError(f"{type(owner).__name__} does not keep the argument {name} as an attribute")
        found[name] = vars(owner)[name]
    return found


def _shape_of(module: nn.Module) -> dict[Any, str]:
    """All plain attributes below a module, as a comparable value, without what depends on the dtype that it was cast
    to."""
    table: dict[Any, str] = {}
    for path, part in module.named_modules():
        table[path, ":class"] = type(part).__qualname__
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            table[path, name] = str(None if tensor is None else tuple(tensor.shape))
        for name, value in vars(part).items():
            if name not in block_runs.INNER and isinstance(value, (bool, int, float, str)):
                table[path, name] = repr(value)
    return table


def _like(copy: nn.Module, owner: nn.Module, keys: list[str]) -> Values:
    """The tensors of `copy` that have values and the sizes of those of `owner`, in the dtype of `owner`."""
    found: Values = {}
    for key in keys:
        value, wanted = getattr(copy, key, None), getattr(owner, key)
        if isinstance(value, torch.Tensor) and not value.is_meta and value.shape == wanted.shape:
            found[key] = value.detach().to(wanted.dtype).cpu().clone()
    return found


def _poison(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """A CPU tensor filled with a marker that differs between `number` 0 and 1, to see which elements are written."""
    return torch.full(
        tensor.shape, bool(number) if tensor.dtype == torch.bool else 3 + 8 * number, dtype=tensor.dtype, device="cpu"
    )


def _agree(values: list[torch.Tensor]) -> bool:
    """Whether all values are equal."""
    return all(same(values[0], other) for other in values[1:])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit the same values."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
    )


class _Uninitialised(TorchFunctionMode):
    """A mode in which weights (made uninitialised or random) go to meta and all other tensors to the CPU, whatever the
    default device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in WEIGHTS and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


@contextmanager
def _light() -> Iterator[None]:
    """A context in which code that makes tensors takes no memory for weights."""
    with torch.device("cpu"), _Uninitialised():
        yield
