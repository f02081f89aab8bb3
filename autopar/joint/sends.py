"""What a pipeline waits for its sends, in the Problem of a shape: layouts of what blocks leave to each other say how
much each rank sends. Called by SearchContext.solve.

A cut may be in front of any piece of the model, so that each value counts by the share of the cuts at which it is sent.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.bare_plan import bare_plan
from autopar.cost.comm import collective_s
from autopar.joint.timetables import Timetable
from autopar.problem.build import Model
from autopar.problem.nets import output_layout

if TYPE_CHECKING:
    from autopar.joint.search_context import SearchContext


def with_sends(context: SearchContext, model: Model, table: Timetable) -> Model:
    """`model`, the Problem of a whole step under `table`, with the sends that a step waits for (Timetable.waits): each
    of what crosses a cut, on average over all cuts, and over the slowest link between two stages."""
    if table.places == 1:
        return model
    mesh, program = model.prices.mesh, model.links[0].program
    flat = bare_plan(context.whole, mesh, model.decode([0] * len(model.clusters)), "")  # one of any layouts
    _, *crossings = context.crossing(flat, table.microbatches)
    places = context.request.cluster.places(table.places, mesh.sizes)
    links = {places.link(one, other) for one, other in itertools.pairwise(table.at)}
    at = {op.name: (index, m) for index, of in enumerate(model.clusters) for m, op in enumerate(of.members)}
    nodes = list(model.problem.nodes)
    for (name, output), cuts in Counter(itertools.chain(*crossings)).items():
        index, member = at[name]
        lies = [output_layout(combo, member, output) for combo in model.choices[index]]
        sent_s = {
            layout: max(
                collective_s("send", model.prices.local_bytes(program.bytes_of((name, output)), layout), link)
                for link in links
            )
            for layout in set(lies)
        }
        waits_s = table.waits * cuts / len(crossings) * np.array([sent_s[layout] for layout in lies])
        nodes[index] = replace(nodes[index], cost_s=nodes[index].cost_s + waits_s)
    return replace(model, problem=replace(model.problem, nodes=tuple(nodes)))
