"""Plans under ZeRO and with offloading, for tests."""

from __future__ import annotations

from autopar import joint
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.request import Request
from tests.helpers.verify import Sizes, Subject

ROLES: dict[str, tuple[Sizes, tuple[roles.Role, ...]]] = {
    "zero1 on 4": ((4,), (roles.zero1,)),
    "zero2 on 4": ((4,), (roles.zero2,)),
    "zero1 x zero1": ((2, 2), (roles.zero1, roles.zero1)),
    "ddp x zero1": ((2, 2), (roles.data, roles.zero1)),
    "zero1 x tp": ((2, 2), (roles.zero1, roles.tensor)),
    "zero2 x tp_sp": ((2, 2), (roles.zero2, roles.tensor_sequence)),
    "zero1 x zero3": ((2, 2), (roles.zero1, roles.zero3)),
}


def offloaded(who: Subject, sizes: Sizes, recipe: str = "zero_offload") -> Plan:
    """A plan on the host, as users ask for it."""
    request = Request(
        Cluster.parse(f"cpu:1x{sizes[0]}"), Settings(who.mode), recipe=recipe, mesh=sizes, time_limit_s=20.0
    )
    return joint.plan(who.captured.gm, who.captured.hints, request, model=who.name, graph_hash=who.captured.graph_hash)
