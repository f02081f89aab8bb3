"""Views by strides, written so that they do not depend on the order in which tensors lie in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.problem.read_graph import read
from autopar.rules import options_for
from passes import ANNOTATE, NORMALIZE, run
from tests.helpers.export import B, assert_same, check_values, export_graph, targets


class Taken(nn.Module):
    def __init__(self, take: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.take, self.map = take, nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.map(x)).square()


def windows(y: Tensor) -> Tensor:
    """Chunks of four rows, each half of the one before, as Longformer takes them."""
    chunks = y.view(y.shape[0], 3, 4, 8)
    size, stride = list(chunks.size()), list(chunks.stride())
    size[1], stride[1] = 2 * size[1] - 1, stride[1] // 2
    return chunks.as_strided(size, stride)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": windows,
    "copy": lambda y: y.mT.contiguous().as_strided((y.shape[0], 7, 6), (96, 12, 1)),
    "turned": lambda y: y.mT.as_strided((y.shape[0], 8, 6), (96, 1, 8), 8),
    "diagonals": lambda y: y.as_strided((y.shape[0], 8), (96, 9)),
    "one sample": lambda y: y[0].clone().as_strided((2, 3), (16, 2), 3),
}


@pytest.mark.parametrize("name", FORMS)
def test_elements_are_those_that_strides_reach(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = Taken(FORMS[name]), {"x": torch.randn(4, 12, 8, dtype=torch.float64)}
    gm = run(export_graph(model, (), inputs, {"x": {0: B}}), NORMALIZE)
    check_values(gm)
    assert not [target for target in targets(gm) if "as_strided" in str(target)]
    assert_same(gm, model, inputs, 1e-12)
    program = read(run(gm, ANNOTATE), {"b": 4}, training=False)
    cut = [
        any(use.value == "S0" for option in options_for(op.call, 2) for use in option.outs)
        for op in program.ops.values()
        if op.role == "op" and op.call.target is torch.ops.aten.index_select.default
    ]
    assert cut == [True]


@pytest.mark.parametrize(
    ("take", "why"),
    [
        (lambda y: y[:, :3].as_strided((2, 2), (8, 1)), "not its own"),
        (lambda y: y.clone().as_strided((y.shape[0], 13, 8), (96, 8, 1)), "behind those of"),
    ],
)
def test_memory_of_others_is_refused(take: Callable[[Tensor], Tensor], why: str) -> None:
    gm = export_graph(Taken(take), (torch.zeros(4, 12, 8, dtype=torch.float64),), dims=({0: B},))
    with pytest.raises(ValueError, match=rf"test_strided.py:\d+.*{why}"):
        run(gm, NORMALIZE)
