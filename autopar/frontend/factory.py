"""Models from Python: `path/to/file.py:factory` and `package.module:factory`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autopar.errors import CaptureError
from autopar.frontend.inputs import Inputs

Factory = Callable[..., Any]
FORMS = "hf:FILE_OR_FOLDER, path/to/file.py:factory or package.module:factory"

SIZES = {"batch": 8, "seq": 128}
"""What a factory may have parameters for, and the sizes where neither the caller nor the factory says one."""

MADE_ON_META = (
    "factories are called under torch.device('meta'), where nothing is allocated and tensors have no values; make it "
    "with device='cpu' where its values are needed: torch.linspace(0, 1, 4, device='cpu').tolist()"
)

RAN_AS = "autopar_model_"
"""What the names of modules that were run from a file begin with."""

_RAN: dict[str, tuple[Path, bytes]] = {}
"""The file that each such module is of, and its text, by the name of the module."""


def find_factory(spec: str) -> Factory:
    """The callable that `spec` names. Raises CaptureError; what the user's own code raises goes through as it is
    (`run_own`)."""
    place, _, name = spec.rpartition(":")
    relative = place.startswith(".") and not place.endswith(".py")  # to which package?
    if not place or not name or relative:
        raise CaptureError(f"cannot read the model {spec!r}: wanted {FORMS}{_meant(Path(spec))}")
    module = import_file(Path(place), spec) if place.endswith(".py") else import_module(place, spec)
    factory = getattr(module, name, None)
    if isinstance(factory, nn.Module):
        raise CaptureError(
            f"model {spec!r}: {name} is a model, {type(factory).__name__}; wanted what makes one, and its inputs: "
            f"def made(): return {name}, (inputs, ...)"
        )
    if callable(factory):
        try:
            inspect.signature(factory)
        except ValueError as error:  # of C, without a note of its parameters
            raise CaptureError(
                f"model {spec!r}: {name} does not say which parameters it has, as many functions that are written in C "
                "do not; wanted a function of Python that makes the model"
            ) from error
        return factory
    there = [key for key, value in vars(module).items() if defined_here(value, module)]
    wrong = f"has no {name!r}" if factory is None else f"has {name!r}, but it is {type(factory).__name__}, not callable"
    raise CaptureError(f"model {spec!r}: {place} {wrong}; callables defined there: {', '.join(there) or 'none'}")


def _meant(path: Path) -> str:
    """What to write for a file or folder that a spec names without the rest, as the end of a message."""
    if path.suffix == ".py" and path.is_file():
        return f"; say which function makes the model: {path}:FUNCTION"
    return f"; a Hugging Face config is hf:{path}" if path.suffix == ".json" or path.is_dir() else ""


def call_factory(factory: Factory, spec: str, *, batch: int, seq: int) -> tuple[nn.Module, Inputs | None]:
    """Call it (with batch and seq where it has such parameters): the model and its inputs, None if it gave none.

    It may give a model, (model, args) or (model, args, kwargs). Raises CaptureError if it gives something else or has
    other parameters without a default.
    """
    known = {"batch": batch, "seq": seq}
    parameters = inspect.signature(factory).parameters
    needed = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if unknown := [name for name in needed if name not in known]:
        raise CaptureError(
            f"model {spec!r}: the factory needs {', '.join(unknown)} without a default; it is called with at most "
            "batch= and seq=. Give defaults, or name a function without these parameters"
        )
    made = run_own(factory, **{name: value for name, value in known.items() if name in parameters})
    match made:
        case nn.Module() as model:
            return model, None
        case (nn.Module() as model, tuple() | list() as args):
            return model, (tuple(args), {})
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs):
            return model, (tuple(args), kwargs)
    raise CaptureError(
        f"model {spec!r}: the factory gave {describe(made)}; wanted a torch.nn.Module, (model, args tuple) or "
        "(model, args tuple, kwargs dict)"
    )


def run_own(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call into the user's own code. What it raises goes through as it is; `own_frames` tells it from errors of
    ours."""
    return function(*args, **kwargs)


def own_frames(error: BaseException) -> traceback.StackSummary | None:
    """The frames of the user's own code in which `error` was raised, the outermost first and without those of the
    import system; None where that code did not raise it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not run_own.__code__:
        trace = trace.tb_next
    if trace is None:
        return None
    frames = traceback.extract_tb(trace.tb_next)
    return traceback.StackSummary.from_list(
        [
            frame
            for frame in frames
            if not frame.filename.startswith("<frozen importlib") and frame.filename != importlib.__file__
        ]
    )


def why_no_values(error: BaseException) -> str:
    """What to say of an error of the user's own code that asks a tensor on the meta device for its values; "" of any
    other."""
    return MADE_ON_META if "meta" in str(error) and isinstance(error, (RuntimeError, TypeError)) else ""


def sizes_of(factory: Factory | None, *, batch: int | None, seq: int | None) -> dict[str, int]:
    """The sizes to make inputs of: what is asked for, else the factory's own default where that is a whole number above
    0, else that of SIZES."""
    parameters = inspect.signature(factory).parameters if factory is not None else {}
    asked = {"batch": batch, "seq": seq}
    return {size: asked[size] or _default(parameters.get(size)) or usual for size, usual in SIZES.items()}


def _default(parameter: inspect.Parameter | None) -> int:
    """The default of a parameter where it can be a size, else 0."""
    value = parameter.default if parameter is not None else 0
    return max(0, value) if type(value) is int else 0


def sizes_without_parameter(factory: Factory) -> tuple[str, ...]:
    """Which of SIZES a factory cannot be told."""
    return tuple(size for size in SIZES if size not in inspect.signature(factory).parameters)


def import_file(path: Path, spec: str) -> ModuleType:
    """Run a Python file as a module. It can import what lies beside it, and the package that it is part of. One that
    this process ran before, and that is as it was then, is not run again: it would register its operators anew, and
    graphs and rules would have different ones."""
    if not path.is_file():
        raise CaptureError(f"model {spec!r}: no file {path} (looked from {Path.cwd()})")
    name, what = f"{RAN_AS}{path.stem}", (path.resolve(), path.read_bytes())
    if name in sys.modules and _RAN.get(name) == what:
        return sys.modules[name]
    _RAN.pop(name, None)
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up here
    folder = path.resolve().parent
    with importable(Path.cwd(), folder, outside_packages(folder)):
        # what is kept compiled is that of before where a file of the same length is written within a second
        run_own(exec, run_own(compile, what[1], path, "exec", dont_inherit=True), module.__dict__)
    _RAN[name] = what
    return module


def import_module(name: str, spec: str) -> ModuleType:
    """Import a module, also from the working directory. A missing import *inside* it is the user's and goes through."""
    try:
        with importable(Path.cwd()):
            return run_own(importlib.import_module, name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise
        raise CaptureError(
            f"model {spec!r}: no module {missing!r} (looked in {Path.cwd()} and the installed packages); wanted {FORMS}"
        ) from error


def outside_packages(folder: Path) -> Path:
    """The nearest folder at or above this one that is not a Python package."""
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


@contextlib.contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """Put folders on the import path for a while, after what is already there."""
    added = [name for name in dict.fromkeys(map(str, folders)) if name not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def defined_here(value: object, module: ModuleType) -> bool:
    """Whether a value is a function or class that the module itself defines."""
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def describe(value: object) -> str:
    """The type of a value, with those of its parts if it is a tuple."""
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__
