"""`autopar verify`: the emitted module on local ranks against the model's graph on one device, and that graph against
the model."""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopar.capture import own_state
from autopar.cli.console import progress, show, write_json
from autopar.cli.rebuild import Rebuilt, rebuild
from autopar.errors import PlanError
from autopar.frontend import Loaded
from autopar.layout import Layout, dim_of, divisible, is_shard, parse, ways_of
from autopar.plan import NodePlan, Plan
from autopar.report.checks import checked
from autopar.verify import Case, case_of, graph_rows, inputs_of, verify

TOLERANCES = {"float64": 1e-9, "float32": 1e-4}  # largest relative difference, by dtype
DEVICES = ("cpu", "cuda")


def verify_command(
    where: Path,
    dtype: str,
    tolerance: float | None,
    batch: int | None,
    seq: int | None,
    json: str | None,
    device: str,
) -> int:
    """Verify on ranks of `device`, print, and give the exit code: 0 when every value is within the tolerance, 1
    otherwise."""
    if device not in DEVICES:
        raise PlanError(f"device {device!r}: wanted one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            "device 'cuda': torch finds no CUDA device on this machine; use --device cpu, which verifies the same "
            "plan on CPU ranks"
        )
    if dtype not in TOLERANCES:
        raise PlanError(f"dtype {dtype!r}: wanted one of {', '.join(TOLERANCES)}")
    with progress(f"verifying {where}") as tell:
        rebuilt = rebuild(where, tell, weights=True)
        loaded = loaded_at(rebuilt, batch, seq)
        check_parts(rebuilt, loaded)
        tell("the model against its graph")
        rows, notes = graph_rows(
            loaded.model, rebuilt.captured, loaded.args, loaded.kwargs, training=rebuilt.plan.mode == "train"
        )
        tell(f"{rebuilt.plan.ranks} ranks against one device")
        report = verify(
            case(rebuilt, loaded, getattr(torch, dtype), device),
            tolerance=TOLERANCES[dtype] if tolerance is None else tolerance,
        )
        report = replace(report, rows=(*rows, *report.rows), notes=(*notes, *report.notes))
    if not write_json(json, json_text.loads(report.to_json())):
        show(checked(report))
    return 0 if report.ok else 1


def loaded_at(rebuilt: Rebuilt, batch: int | None, seq: int | None) -> Loaded:
    """The model with a batch, at another batch or sequence than planned where they are given."""
    if not batch and not seq:
        return rebuilt.loaded
    rebuilt.loaded.check_sizes(size for size, value in (("batch", batch), ("seq", seq)) if value)
    return rebuilt.source.load(rebuilt.plan, device="cpu", batch=batch, seq=seq)


def check_parts(rebuilt: Rebuilt, loaded: Loaded) -> None:
    """Raise PlanError, before ranks start, where a batch does not fall into parts for the ranks of the plan and its
    microbatches; on ranks the emitted module says the same."""
    plan, given = rebuilt.plan, inputs_of(rebuilt.captured, loaded.args, loaded.kwargs)
    inputs = {
        node.meta["input"]: plan.nodes[node.name]
        for node in rebuilt.captured.gm.graph.nodes
        if node.meta.get("role") == "input"
    }
    if plan.microbatches > 1:
        _check_microbatches(plan, given, inputs)
    _check_ranks(plan, given, inputs)


def _layout(node: NodePlan) -> Layout:
    """How an input lies."""
    return parse(node.outs[0].split("|")[0])


def _check_ranks(plan: Plan, given: Mapping[str, Any], inputs: Mapping[str, NodePlan]) -> None:
    """Raise PlanError where an input does not divide over the plan's ranks."""
    for name, node in inputs.items():
        for dim, size in enumerate(given[name].shape):
            if size % (ways := ways_of(_layout(node), dim, plan.mesh)):
                raise PlanError(
                    f"input {name!r}: dim {dim} of size {size} does not divide by the {ways} ranks that cut it; use "
                    f"{divisible(size, ways)}, or plan for the batch that you have"
                )


def _check_microbatches(plan: Plan, given: Mapping[str, Any], inputs: Mapping[str, NodePlan]) -> None:
    """Raise PlanError where an input does not divide into the plan's microbatches."""
    cut = {name: dim_of(node.micro[0]) for name, node in inputs.items() if node.micro and is_shard(node.micro[0])}
    ways = math.lcm(*(ways_of(_layout(inputs[name]), dim, plan.mesh) for name, dim in cut.items()))
    step = plan.microbatches * ways
    for name, dim in cut.items():
        if (size := given[name].shape[dim]) % step:
            raise PlanError(
                f"input {name!r}: dim {dim} of size {size} does not divide into {plan.microbatches} microbatches on "
                f"{ways} rank{'s' * (ways > 1)}; use {divisible(size, step)}, or plan for the batch that you have"
            )


def case(rebuilt: Rebuilt, loaded: Loaded, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Case:
    """What to verify: the plan on ranks of `device`, computed in `dtype`, with nothing dropped at random, with the
    weights and the batch of `loaded`."""
    return case_of(
        rebuilt.captured,
        rebuilt.plan.on(device),
        own_state(loaded.model),
        inputs_of(rebuilt.captured, loaded.args, loaded.kwargs),
        dtype,
    )
