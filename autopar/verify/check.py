"""`verify`: the emitted module on local ranks against one device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.bundle import Bundle
from autopar.capture import Captured, lift
from autopar.codegen.edges import Edges, edges
from autopar.codegen.module import Names, emit
from autopar.plan import Plan
from autopar.problem.graph import Program, read
from autopar.runtime import count, launch
from autopar.verify.collectives import describe, differences, priced, ran
from autopar.verify.compare import difference
from autopar.verify.probe import first_difference
from autopar.verify.randomness import keep_all
from autopar.verify.reference import optimizer, train_step
from autopar.verify.report import Report, Row
from autopar.verify.volume import priced_bytes, ran_bytes


@dataclass(frozen=True)
class Case:
    """What is verified: the graph (all floats lifted to the dtype of the check), its plan and names, the weights by fqn,
    buffers and constants included, and the global batch by input name. `notes` says what the comparison leaves out; `mutate`
    changes the emitted text: that is how tests plant errors."""

    gm: fx.GraphModule
    plan: Plan
    names: Names
    weights: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    mutate: Callable[[str], str] = str

    @property
    def training(self) -> bool:
        return self.plan.mode == "train"


def case_of(captured: Captured, plan: Plan, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor],
            dtype: torch.dtype = torch.float64) -> Case:
    """The case of a captured model: graph, weights and floating inputs lifted to `dtype`. `weights` are whole tensors by
    original name (`model.state_dict()`), `batch` the global inputs by name. Nothing is dropped at random in a case
    (`verify.randomness`); its notes say so."""
    def to(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: (t.to(dtype) if t.is_floating_point() else t).detach().cpu() for n, t in tensors.items()}

    names = Names(captured.input_names, captured.structure, captured.aliases, captured.fleeting)
    gm = lift(captured.gm, dtype)
    notes = keep_all(gm)
    return Case(gm, plan, names, to(weights), to(captured.constants), to(batch), notes)


def verify(case: Case, *, tolerance: float = 1e-9) -> Report:
    """Run `case` on one device and on the plan's ranks, and compare everything. See the package docstring.

    Raises RunError when a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        path = Path(folder) / "reference.pt"
        launch(_reference, 1, case, str(path))  # in a process of its own: what it leaves in memory would be copied by every rank
        source = case.mutate(emit(case.gm, case.plan, case.names))
        results = launch(_rank, case.plan.ranks, source, _light(case), str(path))
    rows, seen = results[0]
    rows += _collectives(case, seen)
    judged = [(name, kind, error, tolerance if kind != "collectives" else 0.0) for name, kind, error in rows]
    report = Report(tuple(Row(*row) for row in judged), case.plan.mesh, collectives=len(seen), notes=case.notes)
    return report if report.ok else replace(report, first=_first(case, tolerance))


def _reference(case: Case, path: str) -> None:
    """The results of the single device, to a file."""
    torch.save(train_step(case.gm, {**case.weights, **case.constants}, case.batch, training=case.training), path)


def _light(case: Case) -> dict[str, Any]:
    """What a rank needs of a case: no graph."""
    return {"plan": case.plan, "weights": dict(case.weights), "constants": dict(case.constants), "batch": dict(case.batch)}


def _rank(source: str, case: dict[str, Any], path: str) -> tuple[list[tuple[str, str, float]], list[Any]]:
    """One rank: a training step (or a forward), every result gathered and compared with the reference."""
    module = Bundle(case["plan"], source, case["constants"]).build(case["weights"])
    local = module.shard_batch(**case["batch"])
    type(module).STRUCTURE = None  # outputs by name, whatever the user's own structure is
    training = case["plan"].mode == "train"
    with count() as seen:
        outputs = module(*local)
        if training:
            outputs["loss"].backward()
    wanted = torch.load(path, weights_only=True, mmap=True)
    rows = _differences("output", module.full(outputs), wanted)
    del outputs  # one kind of result at a time: whole copies of a large model do not fit beside each other
    if wanted["buffer"]:
        rows += _differences("buffer", module.full_state_dict(), wanted)
    if training:
        rows += _differences("gradient", module.full_grads(), wanted)
        optimizer(module.parameters()).step()
        rows += _differences("parameter", module.full_state_dict(), wanted)
    return rows, list(seen)


def _differences(kind: str, got: Mapping[str, Tensor | None], wanted: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[str, str, float]]:
    """(name, label, error) of all results of one kind; on rank 0, the one that reports."""
    if dist.get_rank() != 0:
        return []
    rows = []
    for name, value in wanted[kind].items():
        here = got.get(name)
        if here is None and kind == "gradient" and not value.any():
            continue  # a parameter that the loss does not reach: no gradient here, zeros there
        rows.append((name, "loss" if kind == "output" and name == "loss" else kind, difference(here, value)))
    return rows


def _collectives(case: Case, seen: list[Any]) -> list[tuple[str, str, float]]:
    program, found = _edges(case)
    got, wanted = ran(seen), priced(program, case.plan, found)
    rows = [(f"collectives: {describe(wanted, got) or 'run = priced'}", "collectives", float(differences(wanted, got)))]
    sent, paid = ran_bytes(seen), priced_bytes(program, case.plan, found)
    if paid is not None:
        rows.append((f"bytes: {describe(paid, sent) or 'run = priced'}", "collectives", float(differences(paid, sent))))
    return rows


def _edges(case: Case) -> tuple[Program, Edges]:
    program = read(case.gm, sizes(case), training=case.training)
    return program, edges(program, case.plan)


def sizes(case: Case) -> dict[str, int]:
    """The symbolic sizes of this batch (not those that were planned)."""
    found = dict(case.plan.hints)
    for node in case.gm.graph.nodes:
        if node.meta.get("role") == "input":
            for dim, size in enumerate(node.meta["val"].shape):
                for name, symbol in case.gm.meta["symbols"].items():
                    if not isinstance(size, int) and size.node.expr == symbol:
                        found[name] = case.batch[node.meta["input"]].shape[dim]
    return found


def _first(case: Case, tolerance: float) -> str:
    """Run both sides again with every value recorded, and name the first node that differs."""
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        path = Path(folder) / "values.pt"
        weights = {**case.weights, **case.constants}
        values = train_step(case.gm, weights, case.batch, training=case.training, record=True)["values"]
        torch.save({name: [(v.detach(), v.grad) for v in items] for name, items in values.items()}, path)
        source = case.mutate(emit(case.gm, case.plan, case.names, probes=True))
        return str(launch(first_difference, case.plan.ranks, source, _light(case), str(path), tolerance)[0])

