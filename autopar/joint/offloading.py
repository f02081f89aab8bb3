"""Plans with the optimizer's state on the host, or with parameters and gradients too: by name, where nothing else fits a device, and where devices
are so short of memory that these are faster in spite of what the step takes then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autopar import onestage
from autopar.codegen.edges import options
from autopar.errors import InfeasibleError
from autopar.joint.inner import Inner
from autopar.onestage import CLOSE
from autopar.plan import Alternative, Plan
from autopar.planner import Planner
from autopar.problem.graph import Program
from autopar.problem.prices import Prices
from autopar.problem.settings import OFFLOADED
from autopar.recipes import offload as offloads
from autopar.recipes.offload import OFFLOADS
from autopar.request import Request

WORDS = {"optimizer": "optimizer state rests", "parameters": "parameters, gradients and optimizer state rest"}


def by_recipe(gm: fx.GraphModule, hints: Mapping[str, int], request: Request, **about: Any) -> Plan:
    """The plan of a recipe that rests on the host. Raises InfeasibleError where device or host is too small, PlanError where hosts are not known."""
    offload = OFFLOADS[str(request.recipe)]
    settings = replace(request.settings, offload=offload.held)
    offloads.checked(offload.name, request.cluster, settings)
    planner = Planner.of(gm, hints, replace(request, recipe=offload.base, settings=settings))
    return _settled(planner, onestage.plan_with(planner, **about), "")


def may(request: Request) -> bool:
    """Whether plans on the host are considered where nobody asks for them: something is trained, what is searched is free, and devices have a
    host with memory of its own, of which the cluster says what it has. (A CPU rank's memory is the host's.)"""
    free = request.recipe is None and request.search == "ilp" and request.settings.training and not request.settings.offload
    return free and request.cluster.device.kind != "cpu" and not request.cluster.parts and not offloads.unknown(request.cluster.device)


def instead(inner: Inner, failed: InfeasibleError, about: Mapping[str, Any]) -> Plan:
    """The best plan on the host where no other one fits, for which `failed` is the reason. Raises it, with what the host adds, where
    that does not fit either."""
    inner.request.say("nothing fits the devices: optimizer state on the host")
    missing = f"{failed.missing_bytes / 2**30:.2f} GiB per device are missing" if failed.missing_bytes is not None else "memory is missing"
    found, _, why = _fastest(inner, math.inf, f", because nothing else fits: {missing}", about)
    if found is None:
        raise InfeasibleError(f"{failed}\nwith parameters, gradients and optimizer state on the host: {why}", missing_bytes=failed.missing_bytes)
    return found


def or_faster(inner: Inner, made: Plan, about: Mapping[str, Any]) -> Plan:
    """`made`, or a plan on the host that is faster. That is only looked for where `made` runs blocks again or has several stages or microbatches,
    which it does for memory, and where its step leaves time for what the host takes."""
    step_s = made.predicted.step_s
    if not (made.remat or made.places > 1 or made.microbatches > 1):
        return made
    found, tried, _ = _fastest(inner, step_s, f": {1e3 * step_s:.4g} ms with all of it on devices", about)
    if found is None:
        return replace(made, alternatives=(*made.alternatives, *tried))
    others = (*made.alternatives, *tried, Alternative(made.strategy, made.mesh, step_s, made.predicted.memory_bytes))
    proven = replace(found.predicted, bound_s=min(found.predicted.bound_s, made.predicted.bound_s))  # of all plans
    return replace(found, alternatives=(*found.alternatives, *others), predicted=proven)


def _fastest(inner: Inner, known_s: float, why: str, about: Mapping[str, Any]) -> tuple[Plan | None, list[Alternative], str]:
    """The fastest plan on the host that beats `known_s`, a line for each that does not, and why the last one is none."""
    best: Plan | None = None
    tried: list[Alternative] = []
    reason = ""
    for held in OFFLOADED[1:]:
        beside_s = _update_s(inner, held)
        open_ = [level for level in inner.whole.open_levels if _work_s(inner, level) + beside_s < known_s * (1 - CLOSE)]
        if not open_:
            continue
        inner.request.say(f"short of memory: {WORDS[held]} on the host")
        settings = replace(inner.request.settings, offload=held)
        planner = inner.whole.anew(replace(inner.request, settings=settings, memory_bytes=inner.limit_bytes))
        try:
            made = onestage.plan_with(planner, **about) if math.isinf(known_s) else onestage.beating(planner, known_s, open_, **about)
            best = _settled(planner, made, why)
        except InfeasibleError as error:
            reason = str(error)
            tried.append(Alternative(f"{held} on the host", (inner.request.cluster.devices,), None, None, reason))
            continue
        known_s = best.predicted.step_s
    return best, tried, reason


def _update_s(inner: Inner, held: str) -> float:
    """Seconds that no update with that on the host beats: an even share of it for each device."""
    request = inner.request
    prices = Prices(request.cluster.line(1).mesh((1,)), request.cluster.device, replace(request.settings, offload=held))
    table = inner.whole.table(1, placed=False)
    whole_s = sum(prices.update_s(op, table[op.name][:1]) for op in inner.whole.program.ops.values() if op.role == "param")
    return whole_s / request.cluster.devices


def _work_s(inner: Inner, level: str) -> float:
    """Seconds that nothing before the update beats, with all blocks run again at `level`."""
    return inner.work(1, level).step_s(inner.request.cluster.devices, 1, 1)


def _settled(planner: Planner, made: Plan, why: str) -> Plan:
    """`made` with the name of its recipe and a note. Raises InfeasibleError where hosts have too little memory for it."""
    named = [o.name for o in OFFLOADS.values() if (o.base, o.held) == (made.strategy, made.offload)]
    name = named[0] if named else f"{made.strategy}, {made.offload} on the host"
    host_bytes = _host_bytes(planner.program, made, planner.request)
    offloads.fits(name, host_bytes, planner.request.cluster)
    note = f"{WORDS[made.offload]} on the host, {host_bytes / 2**30:.3g} GiB for each device{why}"
    return replace(made, strategy=name, notes=(*made.notes, note))


def _host_bytes(program: Program, made: Plan, request: Request) -> float:
    """Bytes on the host for the device that has most there."""
    prices = Prices(request.cluster.mesh(made.mesh), request.cluster.device, request.settings)
    return sum(prices.host_bytes(op, options(made.nodes[op.name])) for op in program.ops.values() if op.role == "param")
