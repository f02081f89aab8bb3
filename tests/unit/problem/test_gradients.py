"""Values that the loss does not depend on have no gradient, so nothing is priced for their backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture import capture
from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from passes import ANNOTATE, NORMALIZE, edit, run
from passes.grads import NO_GRADIENT, needs_grad
from tests.helpers.export import B, export_graph
from tests.unit.rules.samples import fill, reseed
from tests.unit.rules.table import SAMPLES


class Watched(nn.Module):
    """A product, a statistic of it that is only watched, and a split of which one part is used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.watch = nn.Linear(4, 8, bias=False), nn.Linear(8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.up(x)
        used, unused = h.tanh().split(4, -1)
        return used.square().sum(), (self.watch(h).mean().detach() + unused.sum().detach())


def _program(training: bool) -> Program:
    gm = export_graph(Watched(), (torch.zeros(6, 4),), dims=({0: B},))
    gm.meta["outputs"] = [
        {"name": "loss", "kind": "loss", "target": ""},
        {"name": "seen", "kind": "output", "target": ""},
    ]
    return read(run(run(gm, NORMALIZE), ANNOTATE), {"b": 6}, training=training)


def _graded(program: Program) -> dict[str, list[bool]]:
    return {op.fqn or op.name: [t.grad for t in op.call.outs] for op in program.ops.values()}


def test_only_what_leads_to_the_loss_has_a_gradient() -> None:
    graded = _graded(_program(training=True))
    assert graded["up.weight"] == [True] and graded["tanh"] == [True]
    assert graded["watch.weight"] == [False], "the loss does not depend on it"
    assert next(v for k, v in graded.items() if k.startswith("split")) == [True, False]
    assert next(v for k, v in graded.items() if k.startswith("sum_dim")) == [False], "the mean"


def test_nothing_has_one_in_inference() -> None:
    assert not any(flag for flags in _graded(_program(training=False)).values() for flag in flags)


@pytest.mark.parametrize("target", NO_GRADIENT, ids=str)
def test_autograd_records_none_of_them(target: Any) -> None:
    x = torch.rand(3, requires_grad=True)
    more = {"full_like": (2.0,), "new_full": ([3], 2.0)}.get(target.overloadpacket.__name__)
    sizes = ([3],) if target.overloadpacket.__name__.startswith("new_") else ()
    assert not target(x, *(more or sizes)).requires_grad


def test_autograd_records_every_other_operator_that_has_a_rule() -> None:
    """One that it does not record and that is not listed would be priced, and counted, with a backward."""
    reseed()
    assert [str(target) for target in SAMPLES if not _recorded(target) and target not in NO_GRADIENT] == []


@pytest.mark.parametrize("made", [torch.randn_like, torch.rand_like, torch.sign, torch.round], ids=lambda f: f.__name__)
def test_passes_know_what_autograd_records(made: Any) -> None:
    """By which they count what a product with it keeps, and the FLOPs of its backward."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(made(self.up(x)))

    gm = run(run(export_graph(Product(), (torch.zeros(6, 4),)), NORMALIZE), ANNOTATE)
    *_, drawn, product = edit.calls(gm)
    recorded = made(torch.rand(3, requires_grad=True)).requires_grad
    assert needs_grad(gm)[drawn] is recorded
    assert product.meta["saved"].positions == ((0, 1) if recorded else (0,))
    assert product.meta["backward_flops"] == (1 + recorded) * product.meta["flops"]


def _recorded(target: Any) -> bool:
    """Whether autograd records an operator; True where it has no float operand or no float result."""
    args, kwargs = fill((SAMPLES[target][0].args, dict(SAMPLES[target][0].kwargs)))
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not any(x.requires_grad for x in given):
        for x in given:
            x.requires_grad_()
    made = [x for x in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    floats = [x for x in made if x.is_floating_point() or x.is_complex()]
    return not given or not floats or any(x.requires_grad for x in floats)


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(self.up(h).relu())


class Tower(nn.Module):
    """Alike blocks behind a stem and in front of a head."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList([Layer() for _ in range(3)])
        for name in frozen.split():
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h).square().sum()


@pytest.mark.parametrize(
    ("frozen", "graded", "late"),
    [
        ("", True, False),
        ("blocks", True, False),
        ("stem", True, True),
        ("stem blocks", False, False),
        ("stem blocks head", False, False),
    ],
)
def test_blocks_have_one_where_something_in_front_of_them_or_in_them_is_trained(
    frozen: str, graded: bool, late: bool
) -> None:
    captured = capture(Tower(frozen), (torch.zeros(6, 4),))
    program = read(captured.gm, captured.hints, training=True)
    assert [run.count for run in program.runs.values()] == [3]
    (port,) = [op for op in program.ops.values() if op.role == "port"]
    assert port.call.outs[0].grad is graded and port.late is late
    inside = [op for op in program.ops.values() if op.scope and op.role == "op"]
    assert inside and all(op.graded is graded for op in inside)
    assert any(op.saves for op in inside) is graded, "nothing is kept for a backward that there is not"


class Taught(Tower):
    """Blocks that are gone through twice, the second time without a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted, h = self.stem(-x), self.stem(x)
        for block in self.blocks:
            h = block(h)
        for block in self.blocks:
            wanted = block(wanted)
        return (h - wanted.detach()).square().sum()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_pass_through_blocks_that_the_loss_does_not_depend_on_has_none(first: int) -> None:
    """Nor has it in any part of the run."""
    captured = capture(Taught(""), (torch.zeros(6, 4),))
    (whole,) = read(captured.gm, captured.hints, training=True).runs
    parted = captured.parted({whole: {"rest": first}}) if first else captured
    program = read(parted.gm, captured.hints, training=True)
    assert [part.count for part in program.runs.values()] == ([first, 3 - first] if first else [3])
    for scope, part in program.runs.items():
        assert [program.ops[port].call.outs[0].grad for port in part.ports] == [True, False]
        inside = [op for op in program.ops.values() if op.scope == scope and op.role == "op"]
        assert sum(op.graded for op in inside) == len(inside) / 2
