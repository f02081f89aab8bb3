"""The plan: the plain-data result of a search.

Strings, numbers and tuples only: node names, layouts as `"S0,R"`, never live objects. `Plan.to_json` is the whole file
format; the same input gives the same bytes where the search met no limit of time. Loading refuses another schema; using
a plan refuses another graph.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autopar import plan_schema
from autopar.cluster.types import DEVICE_KINDS
from autopar.errors import PlanError
from autopar.text import numbered

FILE = "plan.json"
"""The name of the plan in a folder that was saved."""

SCHEMA = 8


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What a plan says of one operator.

    ins, outs   for each operand and output `"layout of the value|layout of the gradient"`
    factors     for each mesh axis, the factor that is split
    kinds       for each mesh axis, the kind of that factor: sample, operator, attribute, parameter, replicate, partial
    runs        for each mesh axis, the runtime algorithm ("": the operator itself runs on shards)
    micro       for each output, how the microbatches of a step share it: `S0` each has its own rows, `P` each has a
                part of a sum, `R` (or no entry) all have the same value
    """

    ins: tuple[str, ...]
    outs: tuple[str, ...]
    factors: tuple[str, ...]
    kinds: tuple[str, ...]
    runs: tuple[str, ...]
    micro: tuple[str, ...] = ()

    @property
    def divides(self) -> tuple[bool, ...]:
        """Whether the work divides by the size of each mesh axis."""
        return tuple(kind in ("sample", "attribute", "parameter") for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a step of the plan is predicted to take.

    step_s          seconds of a step
    memory_bytes    bytes of the fullest device
    compute_s, exposed_s, hidden_s    seconds of compute; of collectives that it waits for; of those that it overlaps.
                    Of a pipeline the microbatches of the busiest place, with communication in them; all else of the
                    step (waiting for other places, sums of gradients, the optimizer); 0
    bound_s         a lower bound on the step of any plan, 0 if there is none: the least work there is, or with `prove`
                    the proven bound of all plans. For inference, and searches of one stage by name, it is the bound of
                    the Problem, whose linear prices are within a few per cent of those of steps
    places_bytes    bytes of the fullest device of each place of a pipeline (of several places)
    """

    step_s: float
    memory_bytes: float
    compute_s: float
    exposed_s: float
    hidden_s: float
    bound_s: float = 0.0
    places_bytes: tuple[float, ...] = ()

    @property
    def gap(self) -> float:
        """The proven relative gap, `step_s / bound_s - 1`; infinity without a bound."""
        return self.step_s / self.bound_s - 1 if self.bound_s > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Alternative:
    """A recipe that was priced along the way, on a mesh with the places of a pipeline in front. `step_s` is None where
    it has no price (it does not fit, or time was up), `why` says why. `how` is `Plan.how` of what name and mesh do not
    tell from others."""

    name: str
    mesh: tuple[int, ...]
    step_s: float | None
    memory_bytes: float | None
    why: str = ""
    how: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: the operators of the top-level graph that run in it, the instances `[first, stop)` of each run
    of blocks (by scope), and its place on the pipeline axis. A model that is not cut has one stage without entries.

    `again`: how many of its first instances are run again, for runs of `Plan.remat` of which not all are.
    """

    nodes: tuple[str, ...] = ()
    blocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    place: int = 0
    again: Mapping[str, int] = field(default_factory=dict)

    @property
    def spans(self) -> str:
        """The blocks of the stage for people, `h 0-5`: the first and the last of each run."""
        return ", ".join(f"{scope} {first}-{stop - 1}" for scope, (first, stop) in self.blocks.items())


@dataclass(frozen=True, slots=True)
class Plan:
    """How one model runs on one cluster: every field of a plan file (docs/plan-file.md). `hints` are the sizes of
    symbolic dims that it was planned for, `axes` the names of the mesh axes, `nodes` the decisions by operator."""

    model: str
    graph_hash: str
    mode: str
    precision: str
    optimizer: str
    hints: Mapping[str, int]
    cluster: Mapping[str, Any]
    axes: tuple[str, ...]
    mesh: tuple[int, ...]
    strategy: str
    seed: int
    nodes: Mapping[str, NodePlan]
    predicted: Predicted
    alternatives: tuple[Alternative, ...] = ()
    stages: tuple[Stage, ...] = (Stage(),)
    schedule: str = "none"  # of the pipeline: a key of autopar.pipeline.SCHEDULES, "none" where nothing is cut
    microbatches: int = 1
    remat: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Runs of blocks (by scope) whose forward is run again in the backward, and the nodes of each whose results are
    kept: none where the block is run again whole (`Stage.again`: of how many instances). What is absent keeps what its
    operators save."""
    offload: str = ""  # what is in the memory of the host: one of problem.settings.OFFLOADED
    parted: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    """Runs of blocks that are laid out in parts (passes.part_runs), by scope: what each part but the first is called,
    and the instance that it begins with, or the operator behind which the rest of a block does. All else in a plan
    names the parts."""
    # values that a step takes over all microbatches before the first one runs, `node` or `node:output`
    totals: tuple[str, ...] = ()
    # operands that are the same for all microbatches, of which each takes its part of a sum, `node:operand`
    shared: tuple[str, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)  # the MODEL argument that gave the model, if one did
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA

    @property
    def ranks(self) -> int:
        """The number of ranks that the plan needs."""
        return math.prod(self.mesh) * self.places

    @property
    def places(self) -> int:
        """The length of the pipeline axis: how many groups of ranks hold different stages. `mesh` is the mesh of
        each."""
        return 1 + max(stage.place for stage in self.stages)

    @property
    def device_kind(self) -> str:
        """The kind of device that its ranks run on, `cpu` or `cuda`, the same for all parts of a cluster."""
        part = (self.cluster.get("parts") or [self.cluster])[0]
        return str(part.get("device", {}).get("kind", "cpu"))

    def on(self, kind: str) -> Plan:
        """The same plan for ranks on devices of `kind`, "cpu" or "cuda". Raises PlanError for another kind."""
        if kind not in DEVICE_KINDS:
            raise PlanError(f"kind is {kind!r}; wanted one of {', '.join(map(repr, DEVICE_KINDS))}")

        def changed(cluster: Mapping[str, Any]) -> dict[str, Any]:
            if "parts" in cluster:
                return {**cluster, "parts": [changed(part) for part in cluster["parts"]]}
            return {**cluster, "device": {**cluster["device"], "kind": kind}}

        return replace(self, cluster=changed(self.cluster))

    @property
    def pipelined(self) -> bool:
        """Whether a step runs a pipeline schedule or several microbatches."""
        return len(self.stages) > 1 or self.microbatches > 1

    @property
    def grid(self) -> tuple[int, ...]:
        """The mesh of all ranks: for a pipeline the number of places, then the mesh of each."""
        return (self.places, *self.mesh) if self.places > 1 else self.mesh

    @property
    def how(self) -> str:
        """For people, what strategy and mesh do not say: stages, schedule, microbatches, and which blocks are run
        again; empty for one stage and one microbatch that keeps everything."""
        stages = (
            [f"{len(self.stages)} stages on {self.places} place{'s' * (self.places > 1)}, {self.schedule}"]
            if len(self.stages) > 1
            else []
        )
        several = [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        again = [f"{', '.join(self.remat)} run again"] if self.run_again else []
        return ", ".join((*stages, *several, *again))

    @property
    def runs(self) -> dict[str, tuple[str, ...]]:
        """The runtime algorithms of each node, one per mesh axis."""
        return {name: node.runs for name, node in self.nodes.items()}

    @property
    def micro_hints(self) -> dict[str, int]:
        """The sizes of one microbatch, by symbol."""
        return {name: size // self.microbatches if name == "b" else size for name, size in self.hints.items()}

    def stages_on(self, place: int) -> tuple[int, ...]:
        """The numbers of the stages of a place, in order."""
        return tuple(number for number, stage in enumerate(self.stages) if stage.place == place)

    def again(self, stage: Stage, scope: str, count: int) -> int:
        """How many of the first of the `count` instances of the run `scope` that `stage` has are run again in the
        backward."""
        return min(count, stage.again.get(scope, count)) if scope in self.remat else 0

    @property
    def run_again(self) -> str:
        """For people, which blocks are run again in the backward; empty where none are."""
        found = []
        for scope, kept in self.remat.items():
            where = self._again_where(scope)
            if where is not None:
                found.append(f"{scope}{where}, {_keeping(kept)}")
        return "; ".join(found)

    def _again_where(self, scope: str) -> str | None:
        """In brackets, how many instances of the run `scope` are run again in which stages; empty where all of them
        are, None where none is."""
        counts = {
            number: stage.again.get(scope, -1)
            for number, stage in enumerate(self.stages)
            if scope in (*stage.blocks, *stage.again)
        }
        if all(n < 0 for n in counts.values()):
            return ""
        found = []
        for n in sorted({n for n in counts.values() if n}):
            which = (
                f"of {numbered('stage', [number for number, own in counts.items() if own == n])}"
                if len(self.stages) > 1
                else ""
            )
            found.append(f"{'all' if n < 0 else f'the first {n}'} {which}".strip())
        return f" ({', '.join(found)})" if found else None

    @property
    def digest(self) -> str:
        """A short hash of the whole plan: an emitted file names the plan that it was emitted for."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """The plan as JSON text, byte for byte the same for the same plan."""
        return json.dumps(asdict(self), indent=1, sort_keys=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan. Raises PlanError when the text is not a plan of this schema, naming what is wrong."""
        if not isinstance(text, (str, bytes)):
            raise PlanError(f"not a plan: wanted the text of one, got a {type(text).__name__}")
        try:
            data = json.loads(text, object_pairs_hook=plan_schema.keyed)
        except (ValueError, RecursionError) as error:  # of the syntax; a number of too many digits; too deep
            raise PlanError(f"not a plan: the text is no JSON ({error})") from error
        plan_schema.check_keys(data)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise PlanError(f"plan has schema {got!r}, this version of autopar reads {SCHEMA}; plan the model again")
        wanted, found = {f.name for f in fields(Plan)}, set(data)
        if wanted != found:
            raise PlanError(f"plan lacks {sorted(wanted - found)} and has unknown {sorted(found - wanted)}")
        plan_schema.check(data)
        return _plan(data)

    def check(self, graph_hash: str, nodes: Iterable[str], source: str = "the model") -> None:
        """Raise PlanError, naming what differs, unless the plan was made for the graph with this hash and these nodes.
        `source` is what gave that graph, for the message."""
        if graph_hash == self.graph_hash:
            return
        raise PlanError(
            f"the plan for {self.model} is for another graph than {source} gives now ({changed(self.nodes, nodes)}; "
            f"hash {self.graph_hash[:12]} planned, {graph_hash[:12]} now): plan the model again"
        )

    def save(self, path: str | Path) -> None:
        """Write the JSON to `path`, atomically. Raises PlanError where that is no file that can be written."""
        write_atomic(_path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file, or the one in a folder that `autopar emit` or Compiled.save wrote. Raises PlanError, with
        its name, when it is missing or not a plan."""
        path = _path(path)
        path = path / FILE if path.is_dir() else path
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(
                f"cannot read plan {path}: {error.strerror}; wanted a file that `autopar plan -o` wrote, or a folder "
                "of `autopar emit` or Compiled.save"
            ) from error
        except UnicodeDecodeError as error:
            raise PlanError(
                f"cannot read plan {path}: byte {error.start} is no UTF-8 text ({error.reason}), and a plan is one; "
                "plan the model again"
            ) from error
        try:
            return Plan.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


def changed(old: Iterable[str], new: Iterable[str]) -> str:
    """What the names of nodes say of how two unlike graphs differ."""
    before, after = dict.fromkeys(old), dict.fromkeys(new)
    gone, made = [n for n in before if n not in after], [n for n in after if n not in before]
    parts = [f"{len(before)} nodes, {len(after)} now"] if len(before) != len(after) else []
    for what, names in (("gone", gone), ("new", made)):
        parts += [f"{what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"] if names else []
    return "; ".join(parts) or "the same nodes with other sizes, arguments or numbers of blocks"


def _keeping(kept: Sequence[str]) -> str:
    """For people, what results blocks keep that are run again."""
    return (
        "whole"
        if not kept
        else f"keeping {kept[0].rpartition('/')[2]}"
        if len(kept) == 1
        else f"keeping {len(kept)} results"
    )


def _path(path: Any) -> Path:
    """The path of a plan file. Raises PlanError for anything that is not a path."""
    if not isinstance(path, (str, os.PathLike)):
        raise PlanError(f"path is {path!r} ({type(path).__name__}); wanted the name of a plan file")
    return Path(path)


def _plan(data: dict[str, Any]) -> Plan:
    """The Plan that checked data describes."""
    tuples = {key: tuple(data[key]) for key in ("axes", "mesh", "notes", "totals", "shared")}
    nodes = {name: NodePlan(**{k: tuple(v) for k, v in node.items()}) for name, node in data["nodes"].items()}
    stages = tuple(
        Stage(
            tuple(s["nodes"]),
            {scope: (first, stop) for scope, (first, stop) in s["blocks"].items()},
            s["place"],
            dict(s["again"]),
        )
        for s in data["stages"]
    )
    remat = {scope: tuple(names) for scope, names in data["remat"].items()}
    others = tuple(Alternative(**{**a, "mesh": tuple(a["mesh"])}) for a in data["alternatives"])
    predicted = Predicted(**{**data["predicted"], "places_bytes": tuple(data["predicted"].get("places_bytes", ()))})
    parted = {scope: dict(parts) for scope, parts in data["parted"].items()}
    rest = {
        "parted": parted,
        "nodes": nodes,
        "stages": stages,
        "remat": remat,
        "alternatives": others,
        "predicted": predicted,
    }
    return Plan(**{**data, **tuples, **rest})


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new content, never half of it. Links stay, and their file is
    written; devices and pipes (/dev/null) stay too, and are written to. Raises PlanError where the file cannot be
    written."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        file_path = Path(os.path.realpath(path))
        file_path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file_path.parent, prefix=f".{file_path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, file_path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror or error}; name another file") from error
