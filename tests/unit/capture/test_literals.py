"""Literals in a model's code keep their values while it is traced on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.lift_dtype import by_default, lift
from passes import facts

LITERALS: dict[str, Callable[[Tensor], Tensor]] = {
    "a list as index": lambda h: h[:, [2, 0]],
    "lists in an index": lambda h: h[..., [1], [3]],
    "another device named": lambda h: torch.where(h > 0, h, torch.tensor(-3.0, dtype=h.dtype, device=h.device)),
    "a tensor of a list": lambda h: h * h.new_tensor([1.0, 2.0, 3.0, 4.0]),
}


class Literal(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).sum()


@pytest.mark.parametrize("name", LITERALS)
def test_a_model_on_meta_has_the_literals_of_a_real_one(name: str) -> None:
    with torch.device("meta"):
        model = Literal(LITERALS[name])
    planned, real = (
        capture(model, (torch.zeros(4, 4, device="meta"),)),
        capture(Literal(LITERALS[name]), (torch.zeros(4, 4),)),
    )
    assert not planned.notes
    assert planned.constants.keys() == real.constants.keys()
    assert all(torch.equal(value, real.constants[key]) for key, value in planned.constants.items())


ELSEWHERE = torch.linspace(0.1, 2, 4)


class Weighted(nn.Module):
    """Reads a tensor that is none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).flatten(0, 1)
        return (h * ELSEWHERE).sum() + nn.functional.binary_cross_entropy_with_logits(
            h, x.flatten(0, 1), pos_weight=ELSEWHERE + ELSEWHERE.mean()
        )


def test_tensors_from_elsewhere_are_where_all_others_are() -> None:
    captured = capture(Weighted(), (torch.zeros(4, 3, 4),))
    assert next(iter(captured.constants.values())).equal(ELSEWHERE) and captured.hints == {"b": 4}
    assert {
        value.device.type for node in captured.gm.graph.nodes if "val" in node.meta for value in facts.tensors(node)
    } == {"meta"}


class Factories(nn.Module):
    """Makes floating and complex numbers of default dtypes, of integers too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.polar(torch.ones(4, 2), torch.arange(8.0).view(4, 2))
        rotated = torch.view_as_real(torch.view_as_complex(self.linear(x).view(4, 2, 2)) * turned).flatten(1)
        centres = (torch.arange(4) + 0.5) / torch.arange(1, 5).sqrt()
        return (rotated * torch.ones(4) + torch.zeros(4, 1) + torch.full((4,), 0.5) * centres).sum()


def test_what_is_lifted_has_the_dtypes_that_it_says() -> None:
    """Bytes are counted by the dtypes that nodes have, so those must be what runs."""
    gm = lift(capture(Factories(), (torch.zeros(4, 4),)).gm)
    ran: dict[torch.fx.Node, Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            ran[node] = torch.zeros([int(n) for n in node.meta["val"].shape], dtype=node.meta["val"].dtype)
        elif node.op == "call_function" and facts.tensors(node):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), ran.__getitem__)
            with by_default(torch.float64):
                ran[node] = node.target(*args, **kwargs)
            assert ran[node].dtype == node.meta["val"].dtype, node.format_node()
    assert {value.dtype for value in ran.values()} >= {torch.float64, torch.complex128}


def test_what_is_lifted_lies_in_memory_as_it_did() -> None:
    """Whether a reshape copies, and so whether its result can be kept, is read off the order of what it reads."""

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h[:, None].expand(-1, 3, -1).reshape(-1, 4).square().mean() + h.T.exp().mean()

    captured = capture(Repeats(), (torch.zeros(4, 4),)).gm
    nodes = [
        (one, other)
        for one, other in zip(captured.graph.nodes, lift(captured).graph.nodes, strict=True)
        if one.op != "output"
    ]
    pairs = [(a, b) for one, other in nodes for a, b in zip(facts.tensors(one), facts.tensors(other), strict=True)]
    assert all(str(a.stride()) == str(b.stride()) and a.requires_grad == b.requires_grad for a, b in pairs) and any(
        0 in a.stride() for a, _ in pairs
    )
