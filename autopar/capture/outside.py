"""What the code of a model keeps outside of the model: globals, attributes of classes, functions and plain objects,
cells of closures, defaults of arguments. Used by asked and step_counts.

    STEPS = 0                                 # a global that forward counts
    class Net(nn.Module): seen = []           # an attribute of the class
    def scheduled(x, state=[0]): ...          # a default that is changed

A shadow has its own attributes, but all shadows share these: what one run leaves there, the next would find, and the
user after it. So `Outside` remembers what there is, and puts it back before each run and when all is done.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from autopar.capture.closures import UNSET, content
from autopar.capture.lines import users

Place = tuple[str, ...]
"""Where something is, in words."""
ENTERED = ("forward", "backward", "setup_context", "__call__", "__getattr__")
"""Methods that are called without being named."""
DEPTH = 4
"""How deep containers and objects are looked into."""
CONTAINERS = (dict, list, set, deque)
"""Types of what may have other items later."""
CACHED = type(functools.lru_cache(users))
"""The type of functions with a cache of their own."""
CODE = (FunctionType, type, property, functools.partial, MethodType, classmethod, staticmethod, CACHED)
"""Types of code and of what wraps it."""


@dataclass(frozen=True, eq=False)
class Slot:
    """A name that code reads and may write: an item of a dict, what a cell holds, or an attribute of `owner`."""

    owner: Any
    name: Any

    @property
    def value(self) -> Any:
        """What it is now, or UNSET."""
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, UNSET)
        if isinstance(self.owner, CellType):
            return content(self.owner)
        return vars(self.owner).get(self.name, UNSET)

    def put(self, value: Any) -> None:
        """Give it a value."""
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        elif isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        else:
            setattr(self.owner, self.name, value)


class Outside:
    """What the code of a model, and of `functions`, finds outside of them, as it is now."""

    def __init__(self, model: nn.Module, *functions: Callable[..., Any]) -> None:
        found = _Search(model, *functions)
        self._slots = [(slot, slot.value) for slot in found.slots.values()]
        self._caches = [(cached, cached.cache_info().misses) for cached in found.caches]
        self._named = [(owner, set(vars(owner))) for owner in found.owners]
        held: dict[int, Any] = {}
        for _, value in self._slots:
            _containers(value, held, DEPTH)
        self._contents = [(inside, _items(inside)) for inside in map(_inside, held.values())]

    def put_back(self) -> None:
        """Put back all that code has changed since."""
        for owner, names in self._named:
            for name in [name for name in vars(owner) if name not in names and not name.startswith("__")]:
                delattr(owner, name)
        for slot, value in self._slots:
            if slot.value is not value and value is not UNSET:
                slot.put(value)
        for inside, items in self._contents:
            _refill(inside, items)
        for cached, misses in self._caches:
            if cached.cache_info().misses != misses:
                cached.cache_clear()  # after which it has missed nothing


def slots(model: nn.Module) -> dict[Place, Slot]:
    """All names outside of `model` that its code reads, by place."""
    return _Search(model).slots


def is_plain_object(value: Any) -> bool:
    """Whether a value is an object of a class of the user's, with attributes of its own."""
    return (
        (type(value) is SimpleNamespace or _is_users(type(value)))
        and hasattr(value, "__dict__")
        and not isinstance(value, Tensor | nn.Module | type)
    )


def _containers(value: Any, found: dict[int, Any], depth: int) -> None:
    """Add to `found` the containers and plain objects that `value` is and has inside, by identity."""
    if id(value) in found or not depth or not (isinstance(value, CONTAINERS) or is_plain_object(value)):
        return
    found[id(value)] = value
    for item in _items(_inside(value)):
        _containers(item, found, depth - 1)


def _inside(value: Any) -> Any:
    """A container itself; of an object the dict of its attributes."""
    return value if isinstance(value, CONTAINERS) else vars(value)


def _built_in(container: Any) -> Any:
    """The type of Python that a container is of. Its own type may read or write in ways of its own: a dict of classes
    whose items are made when they are read."""
    return next(kind for kind in type(container).__mro__ if kind.__module__ in ("builtins", "collections"))


def _items(container: Any) -> list[Any]:
    """What a container has now; of a dict its keys, and then its values."""
    kind = _built_in(container)
    return [*kind.keys(container), *kind.values(container)] if issubclass(kind, dict) else [*kind.__iter__(container)]


def _refill(container: Any, items: Sequence[Any]) -> None:
    """Let a container have the items that it had, where it has others."""
    now, kind = _items(container), _built_in(container)
    if len(now) == len(items) and all(a is b for a, b in zip(now, items, strict=True)):
        return
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in zip(items[: len(items) // 2], items[len(items) // 2 :], strict=True):
            kind.__setitem__(container, key, value)
    else:
        (kind.update if issubclass(kind, set) else kind.extend)(container, items)


class _Search:
    """Follows the code of a model from the forwards of its modules to all functions whose names it reads. `slots`: what
    it finds that is neither code nor a module of Python; `owners`: functions and classes, which may get new attributes;
    `caches`: functions with a cache of their own."""

    def __init__(self, model: nn.Module, *functions: Callable[..., Any]) -> None:
        self.slots: dict[Place, Slot] = {}
        self.owners: list[FunctionType | type] = []
        self.caches: list[Any] = []
        self._seen: set[int] = set()
        self._read: dict[str, None] = dict.fromkeys(ENTERED)
        self._unread: dict[str, list[type]] = {}  # name -> classes with an attribute of it that nothing has read
        self._left = deque[Any]()
        for module in model.modules():
            own = vars(module)
            hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
            for value in (module, *own.values(), *hooks, *functions):
                self._left.append(type(value) if is_plain_object(value) or isinstance(value, nn.Module) else value)
        while self._left:
            self._follow(self._left.popleft())

    def _follow(self, value: Any) -> None:
        """Look into a function or class, or whatever wraps one."""
        if not isinstance(value, CODE) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._left.extend(value.__bases__)
            self._class(value)
        elif isinstance(value, property):
            self._left.extend((value.fget, value.fset))
        elif isinstance(value, functools.partial):
            self._left.append(value.func)
        elif isinstance(value, CACHED):
            self.caches.append(value)
            self._left.append(value.__wrapped__)
        else:
            self._left.append(value.__func__)

    def _class(self, kind: type) -> None:
        if not _is_users(kind):
            return
        self.owners.append(kind)
        special = not issubclass(kind, nn.Module)
        for name in list(vars(kind)):
            if name in self._read or (special and name.startswith("__")):
                self._attribute(kind, name)
            else:
                self._unread.setdefault(name, []).append(kind)

    def _attribute(self, kind: type, name: str) -> None:
        if not name.startswith("__") or isinstance(vars(kind)[name], CODE):
            self._name((kind.__name__, name), Slot(kind, name))

    def _function(self, function: FunctionType) -> None:
        code = function.__code__
        if not users(code.co_filename):
            return
        self.owners.append(function)
        here, names = function.__name__, dict.fromkeys(_names(code))
        self._read.update(names)
        for name in names:
            for kind in self._unread.pop(name, ()):
                self._attribute(kind, name)
        for name in (name for name in names if name in function.__globals__):
            value = function.__globals__[name]
            self._name((name,), Slot(function.__globals__, name))
            if isinstance(value, ModuleType) and users(_file(value)):
                for inner in (inner for inner in names if inner in vars(value)):
                    self._name((name, inner), Slot(vars(value), inner))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._name((here, name), Slot(cell, name))
        for name in list(vars(function)):
            self._name((here, name), Slot(function, name))
        for key, value in (*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()):
            if isinstance(value, (*CODE, *CONTAINERS)) or is_plain_object(value):
                self._name((here, f"default {key}"), Slot({key: value}, key))

    def _name(self, place: Place, slot: Slot) -> None:
        """One name: code is followed, anything else is found."""
        value = slot.value
        if isinstance(value, CODE):
            self._left.append(value)
        elif not isinstance(value, ModuleType | nn.Module):
            self.slots.setdefault(place, slot)


def _is_users(kind: type) -> bool:
    return users(_file(sys.modules.get(kind.__module__)))


def _file(module: ModuleType | None) -> str:
    """The file of a module of Python; that of none where it has none."""
    return (vars(module).get("__file__") if module is not None else None) or "<frozen >"


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes that code reads or writes, in functions inside, too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
