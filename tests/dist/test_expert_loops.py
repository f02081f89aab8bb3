"""Layers of experts that are written as loops over modules, on ranks against one device."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.verify import case_of, verify
from passes import ops
from passes.edit import graphs
from tests.helpers.loops import ASKING, HIDDEN, LOOPS, TOP, Gated, Looped, plain
from tests.helpers.pieces import PIECES, D
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned

BOTH = LOOPS | ASKING


def dropping() -> nn.Module:
    """With dropout behind the layers."""
    return nn.Sequential(*plain(), nn.Dropout(0.1))


EXPERT = {"gated": Gated, "plain": plain, "dropping": dropping}


class Blocks(nn.Module):
    """Two layers of experts with residuals, and a loss."""

    def __init__(self, loop: str, expert: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Looped(BOTH[loop], EXPERT[expert]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, HIDDEN] -> []."""
        for layer in self.layers:
            x = x + layer(x)
        return (x**2).mean()


@cache
def subject(loop: str, expert: str) -> Subject:
    torch.manual_seed(0)
    model = Blocks(loop, expert)
    captured = capture(model, (torch.randn(4, 6, HIDDEN),))
    in_all = TOP if loop == "by_rank" or expert == "dropping" else 1  # of a layer; two alike layers are one body
    assert sum(node.target is ops.experts for gm in graphs(captured.gm) for node in gm.graph.nodes) in (
        in_all,
        2 * in_all,
    )
    return Subject(loop, "train", captured, model.state_dict())


CASES = [
    ("mixtral", "gated", (2, 2), "random 0"),
    ("mixtral", "gated", (4,), "tp"),
    ("litgpt", "gated", (4,), "ep"),
    ("mistral", "plain", (2, 2), "random 1"),
    ("mistral", "plain", (2,), "tp"),
    ("nonzero", "plain", (2,), "zero3"),
    ("columns", "gated", (2,), "ep"),
    ("switch", "plain", (2, 2), "searched"),
    ("masked", "gated", (2, 2), "random 0"),
    ("columns_of_all", "plain", (2,), "tp"),
    ("by_rank", "gated", (2,), "ep"),
    ("best", "plain", (2, 2), "random 1"),
    ("counted", "gated", (2, 2), "searched"),
    ("hit", "plain", (2,), "zero3"),
    ("any_", "dropping", (2,), "tp"),
    ("one_column", "plain", (2,), "ep"),
]


def compared(who: Subject, made) -> None:
    report = verify(
        case_of(
            who.captured,
            made,
            who.weights,
            {"x": torch.randn(4, 6, HIDDEN, generator=torch.Generator().manual_seed(1))},
        ),
        ranks=living(made.ranks),
    )
    assert report.ok, (report.first, report.worst)


@pytest.mark.parametrize(("loop", "expert", "sizes", "how"), CASES)
def test_equals_one_device(loop: str, expert: str, sizes: tuple[int, ...], how: str) -> None:
    who = subject(loop, expert)
    compared(who, planned(who, sizes, how))


@cache
def in_pieces(case: str) -> Subject:
    torch.manual_seed(0)
    model = PIECES[case]()
    captured = capture(model, (torch.randn(4, 6, D),))
    return Subject(case, "train", captured, model.state_dict())


@pytest.mark.parametrize(
    ("case", "sizes", "how"),
    [("modules", (2, 2), "random 2"), ("at once", (2,), "ep"), ("one by one", (2,), "tp"), ("marks", (2,), "zero3")],
)
def test_pieces_equal_one_device(case: str, sizes: tuple[int, ...], how: str) -> None:
    who = in_pieces(case)
    made, x = planned(who, sizes, how), torch.randn(4, 6, D, generator=torch.Generator().manual_seed(1))
    report = verify(case_of(who.captured, made, who.weights, {"x": x}), ranks=living(made.ranks))
    assert report.ok, (report.first, report.worst)


@pytest.mark.parametrize(("loop", "expert"), [("mixtral", "gated"), ("mistral", "plain")])
def test_stages_equal_one_device(loop: str, expert: str) -> None:
    who = subject(loop, expert)
    compared(who, by_stages(who, (2,), "zero3", 2, 2, "1f1b"))


class OneLayer(Blocks):
    """Experts of a single layer, which are computed on all rows."""

    def __init__(self) -> None:
        super().__init__("one_column", "plain")
        for layer in self.layers:
            layer.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in layer.experts)


@pytest.mark.parametrize("how", ["zero3", "tp", "1f1b"])
def test_experts_of_one_layer_equal_one_device(how: str) -> None:
    torch.manual_seed(0)
    model = OneLayer()
    captured = capture(model, (torch.randn(4, 6, HIDDEN),))
    who = Subject(f"one layer {how}", "train", captured, model.state_dict())
    compared(who, by_stages(who, (2,), "zero3", 2, 2, "1f1b") if how == "1f1b" else planned(who, (2,), how))
