"""The memory of hosts that a plan needs: that of a node is shared by the ranks of all places on it. Called by
joint.staging and will_it_fit."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.memory.at_rest import host_bytes
from autopar.memory.shares import Shares
from autopar.pipeline.stage_views import views, whole
from autopar.plan import Plan
from autopar.problem.graph import Program


def of_places(program: Program, plan: Plan) -> tuple[float, ...]:
    """Bytes in the memory of the host for one rank of each place; sizes as in `predict`."""
    shares, found = Shares(program, plan), views(program, plan) if len(plan.stages) > 1 else (whole(program),)
    return tuple(
        host_bytes(shares, [found[number] for number in plan.stages_on(place)]) for place in range(plan.places)
    )


def of_a_device(program: Program, plan: Plan) -> float:
    """Host bytes per device of the node (the innermost level) whose devices need most on average."""
    each, node = of_places(program, plan), Cluster.from_dict(dict(plan.cluster)).levels[-1].size
    ranks = [nbytes for nbytes in each for _ in range(plan.ranks // plan.places)]
    nodes = [ranks[first : first + node] for first in range(0, len(ranks), node)]
    return max(sum(here) / len(here) for here in nodes)
