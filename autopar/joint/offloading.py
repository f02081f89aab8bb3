"""Plans whose parameters, gradients and optimizer state rest on the host: by name, where nothing else fits a device, and where devices are so
short of memory that these are faster in spite of the optimizer's step there."""

from __future__ import annotations

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
from autopar.problem.settings import Settings
from autopar.recipes import offload as offloads
from autopar.recipes.offload import OFFLOADS
from autopar.request import Request


def by_recipe(gm: fx.GraphModule, hints: Mapping[str, int], request: Request, **about: Any) -> Plan:
    """The plan of a recipe that rests on the host. Raises InfeasibleError where device or host is too small, PlanError where hosts are not known."""
    offload, settings = OFFLOADS[str(request.recipe)], replace(request.settings, offload=True)
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
    inner.request.say("nothing fits: parameters and optimizer state on the host")
    missing = f"{failed.missing_bytes / 2**30:.2f} GiB per device are missing" if failed.missing_bytes is not None else "memory is missing"
    planner = _planner(inner)
    try:
        return _settled(planner, onestage.plan_with(planner, **about), f", because nothing else fits: {missing}")
    except InfeasibleError as error:
        raise InfeasibleError(f"{failed}\nwith parameters, gradients and optimizer state on the host: {error}", missing_bytes=failed.missing_bytes) from error


def or_faster(inner: Inner, made: Plan, about: Mapping[str, Any]) -> Plan:
    """`made`, or a plan on the host that is faster. That is only looked for where `made` runs blocks again or has several stages, which it
    does for memory, and where its step leaves time for the optimizer's on the host."""
    step_s = made.predicted.step_s
    if not (made.remat or made.places > 1) or least_s(inner) >= step_s * (1 - CLOSE):
        return made
    inner.request.say("short of memory: parameters and optimizer state on the host")
    planner = _planner(inner)
    try:
        found = _settled(planner, onestage.beating(planner, step_s, **about), f": {1e3 * step_s:.4g} ms with all of it on devices")
    except InfeasibleError as error:
        return replace(made, alternatives=(*made.alternatives, Alternative("on the host", made.mesh, None, None, str(error))))
    others = (*made.alternatives, Alternative(made.strategy, made.mesh, step_s, made.predicted.memory_bytes))
    proven = replace(found.predicted, bound_s=min(found.predicted.bound_s, made.predicted.bound_s))  # of all plans
    return replace(found, alternatives=(*found.alternatives, *others), predicted=proven)


def least_s(inner: Inner) -> float:
    """Seconds that no plan on the host beats: the least work of a step, and an even share of the optimizer's step on each host."""
    request = inner.request
    prices = Prices(request.cluster.line(1).mesh((1,)), request.cluster.device, _on_host(request.settings))
    table = inner.whole.table(1, placed=False)
    update_s = sum(prices.update_s(op, table[op.name][:1]) for op in inner.whole.program.ops.values() if op.role == "param")
    return inner.work(1).step_s(request.cluster.devices, 1, 1) + update_s / request.cluster.devices


def _on_host(settings: Settings) -> Settings:
    return replace(settings, offload=True)


def _planner(inner: Inner) -> Planner:
    """A planner of the same graph for plans on the host."""
    request = replace(inner.request, settings=_on_host(inner.request.settings), memory_bytes=inner.limit_bytes)
    return Planner.of(inner.gm, inner.hints, request)


def _settled(planner: Planner, made: Plan, why: str) -> Plan:
    """`made` with the name of its recipe and a note. Raises InfeasibleError where hosts have too little memory for it."""
    name = next((o.name for o in OFFLOADS.values() if o.base == made.strategy), f"{made.strategy} on the host")
    host_bytes = _host_bytes(planner.program, made, planner.request)
    offloads.fits(name, host_bytes, planner.request.cluster)
    note = f"parameters, gradients and optimizer state rest on the host, {host_bytes / 2**30:.3g} GiB for each device{why}"
    return replace(made, strategy=name, notes=(*made.notes, note))


def _host_bytes(program: Program, made: Plan, request: Request) -> float:
    """Bytes on the host for the device that has most there."""
    prices = Prices(request.cluster.mesh(made.mesh), request.cluster.device, request.settings)
    return sum(prices.host_bytes(op, options(made.nodes[op.name])) for op in program.ops.values() if op.role == "param")
