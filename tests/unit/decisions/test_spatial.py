"""Few large images: there are no samples to share, so the search cuts height or width, with borders."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.onestage import plan
from autopar.plan import Plan
from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from autopar.recipes.kinds import ATTRIBUTE, REPLICATE
from autopar.request import Request

SIDE = 1024


class Scene(nn.Module):
    """Convolutions and pools over whole scenes, their mean, and a class for each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, stride=2, padding=3)
        self.layers = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(images)), 3, 2, 1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


@cache
def captured() -> Captured:
    """The graph, for images of SIDE x SIDE."""
    with torch.device("meta"):
        return capture(Scene(), (torch.zeros(8, 3, SIDE, SIDE), torch.zeros(8, dtype=torch.long)), {})


def planned(batch: int) -> tuple[Plan, Program]:
    """The plan of `batch` scenes on four devices."""
    graph = captured()
    hints = {**graph.hints, "b": batch}
    request = Request(Cluster.parse("h100:1x4"), mesh=(4,), time_limit_s=20.0)
    return plan(graph.gm, hints, request, model="scene", graph_hash=graph.graph_hash), read(
        graph.gm, hints, training=True
    )


def windows(made: Plan, program: Program) -> dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Convolutions and pools: layout of the image, kinds of split, algorithms."""
    found = {}
    for name, op in program.ops.items():
        if op.role == "op" and any(word in str(op.target) for word in ("conv2d", "max_pool2d")):
            node = made.nodes[name]
            found[name] = (node.ins[0].split("|")[0], node.kinds, node.runs)
    return found


def test_one_large_image_is_cut_along_its_height_or_width() -> None:
    made, program = planned(1)
    found = windows(made, program)
    assert len(found) == 4  # two of the layers are alike
    assert all(kinds[0] != REPLICATE for _, kinds, _ in found.values()), found
    for name in list(found)[2:]:  # the stem may as well be cut by channels: its image is whole on all
        layout, kinds, runs = found[name]
        assert layout in ("S2", "S3") and kinds == (ATTRIBUTE,) and runs == ("halo",), (name, found)
    others = {other.name: other.step_s for other in made.alternatives}
    assert made.predicted.step_s < 0.5 * others["single"] and all(
        made.predicted.step_s < seconds for seconds in others.values() if seconds is not None
    ), (made.predicted, others)


def test_samples_are_cut_where_there_are_enough() -> None:
    made, program = planned(8)
    assert all(layout == "S0" for layout, _, _ in windows(made, program).values()), windows(made, program)
