"""From the tables of an emitted class to registered parameters and buffers, in the order of the original model."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from autopar.errors import RunError
from autopar.runtime.mesh import Mesh
from autopar.runtime.names import Naming, full_name, path_of
from autopar.runtime.params import Held, Param, empty, place


class Stated(Protocol):
    """The tables of an emitted class: its parameters and buffers by their names in it."""

    PARAMS: ClassVar[Mapping[str, Param]]
    BUFFERS: ClassVar[Mapping[str, Param]]


class Tables(Stated, Protocol):
    """An instance with such tables, and the local tensors that its forward reads (`w` and `b`): a Block or a
    ShardedModule."""

    w: dict[str, Tensor]
    b: dict[str, Tensor]


class Scope(Tables, Protocol):
    """An instance with runs of blocks: a model, or a stage of it."""

    RUNS: ClassVar[Mapping[str, tuple[Any, Sequence[Naming]]]]
    FIRST: ClassVar[Mapping[str, int]]
    runs: dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Declared:
    """One parameter or buffer by its original name, and the tables that want its local part."""

    info: Param
    buffer: bool
    readers: list[tuple[dict[str, Tensor], str]] = field(default_factory=list)


@dataclass(eq=False)
class Declarations:
    """All that a model and its blocks declare; `paths` lists the names of each block by its module path."""

    found: dict[str, Declared] = field(default_factory=dict)
    paths: dict[str, list[str]] = field(default_factory=dict)

    @staticmethod
    def of(scope: Scope) -> Declarations:
        """Make the blocks of a model or stage and take the tables of all."""
        made = Declarations()
        made._add(scope)
        for run, (kind, namings) in scope.RUNS.items():
            scope.runs[run] = [kind(naming) for naming in namings]
            for number, (block, naming) in enumerate(
                zip(scope.runs[run], namings, strict=True), scope.FIRST.get(run, 0)
            ):
                block.number = number
                made._add(block, naming)
        return made

    @staticmethod
    def stated(scope: type[Scope]) -> Declarations:
        """The declarations of a stage class that may run on another place: no block is made, and there are no
        readers."""
        made = Declarations()
        tables: list[tuple[Naming, type[Stated]]] = [
            ("", scope),
            *((naming, kind) for kind, namings in scope.RUNS.values() for naming in namings),
        ]
        for naming, kind in tables:
            for buffer, table in ((False, kind.PARAMS), (True, kind.BUFFERS)):
                for short, info in table.items():
                    made._state(naming, short, info, buffer)
        return made

    @staticmethod
    def together(parts: Sequence[Declarations]) -> Declarations:
        """The declarations of all scopes of a model, each name once, with all its readers."""
        made = Declarations()
        for part in parts:
            for name, about in part.found.items():
                made.found.setdefault(name, Declared(about.info, about.buffer)).readers.extend(about.readers)
            for path, names in part.paths.items():
                made.paths.setdefault(path, []).extend(names)
        return made

    def _add(self, reader: Tables, naming: Naming = "") -> None:
        """Take the tables of the model (`naming` is empty) or of the block that is named so."""
        for buffer, table, read in ((False, reader.PARAMS, reader.w), (True, reader.BUFFERS, reader.b)):
            for short, info in table.items():
                self._state(naming, short, info, buffer).readers.append((read, short))

    def _state(self, naming: Naming, short: str, info: Param, buffer: bool) -> Declared:
        """One entry of a table."""
        name, path = full_name(naming, short), path_of(naming, short)
        if path:
            self.paths.setdefault(path, []).append(name)
        return self.found.setdefault(name, Declared(info, buffer))

    def names(self, aliases: Mapping[str, str], order: Sequence[str], elsewhere: Container[str] = ()) -> list[str]:
        """All names, tied ones included: those of `order` first, where the path of a block stands for all its names;
        without those that are `elsewhere`. Raises RunError where `order` has a name that nothing declares."""
        found: list[str] = []
        for entry in order:
            known = entry in self.found or entry in aliases
            if not known and entry not in self.paths and entry in elsewhere:
                continue
            if not known and entry not in self.paths:
                raise RunError(
                    f"ORDER names {entry!r}, which is no parameter, buffer or block of the emitted model; emit the "
                    "plan again"
                )
            found += [entry] if known else self.paths[entry]
        return list(dict.fromkeys([*found, *self.found, *aliases]))

    def register(
        self, root: nn.Module, aliases: Mapping[str, str], names: Sequence[str], mesh: Mesh
    ) -> dict[str, Held]:
        """Make every tensor, without values yet (nan), and register it in `root` under all its names; the state dict
        then has their order."""
        tensors: dict[str, Tensor] = {}
        held: dict[str, Held] = {}
        for name in names:
            first = aliases.get(name, name)
            about = self.found[first]
            if first not in tensors:
                tensors[first] = empty(first, about.info, mesh, buffer=about.buffer)
            owner, key = place(root, name, tensors[first], buffer=about.buffer, persistent=about.info.persistent)
            if name == first:
                held[name] = Held(name, about.info, owner, key, about.readers, tensors[first])
        return held
