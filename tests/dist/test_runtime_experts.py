"""Layers of experts on real ranks against one device, in float64: values, gradients, and what is sent."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from autopar.routing import rows_sent
from autopar.rules import RULES
from autopar.rules.experts import INSIDE
from autopar.rules.language import Call, Tensor
from autopar.rules.site import Site
from autopar.runtime import Mesh, count
from autopar.runtime.algorithms import experts_on_ranks
from autopar.runtime.collectives import all_reduce
from autopar.runtime.cuts import own
from passes import ops
from tests.helpers.kept import keeping
from tests.helpers.ranks import on_ranks

GATED = "halves(lambda first, second: F.silu(first) * second)"
OWN, DISPATCH, TOKENS = "own", "dispatch", "tokens"
ROLES = [
    ((2,), (OWN,)),
    ((2,), (DISPATCH,)),
    ((4,), (DISPATCH,)),
    ((4,), (OWN,)),
    ((2, 2), (DISPATCH, DISPATCH)),
    ((2, 2), (DISPATCH, OWN)),
    ((2, 2), (OWN, DISPATCH)),
    ((2, 2), (TOKENS, DISPATCH)),
    ((2, 2), (DISPATCH, TOKENS)),
]
TOKEN_COUNT, K, D, F, E = 10, 2, 3, 4, 8


def _route(how):
    """Expert numbers: any, all tokens to expert 0, or some to none (number E and above)."""
    numbers = torch.randint(0, E, (2, TOKEN_COUNT // 2, K))
    return {"any": numbers, "one": numbers * 0, "none": torch.randint(0, 2 * E, numbers.shape)}[how]


def _layer(sizes, roles, how):
    mesh = Mesh(sizes, ("x", "y")[: len(sizes)], "cpu")
    torch.manual_seed(0)
    shapes = ((2, TOKEN_COUNT // 2, D), (2, TOKEN_COUNT // 2, K), (E, D, 2 * F), (E, F, D))
    hidden, gates, up, down = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    chosen, pull = _route(how), torch.randn(shapes[0], dtype=torch.float64)
    wanted = ops.experts(hidden, chosen, gates, up, down, GATED)
    wanted.backward(pull)
    tokens = tuple("R" if role == OWN else "S1" for role in roles)
    weights = tuple("R" if role == TOKENS else "S0" for role in roles)
    axes = tuple(a for a, role in enumerate(roles) if role != TOKENS)

    def cut(x, layout):
        return own(x.detach(), layout, mesh.sizes, mesh.coord).clone()

    local = [
        cut(x, layout).requires_grad_()
        for x, layout in ((hidden, tokens), (gates, tokens), (up, weights), (down, weights))
    ]
    with count() as seen:
        got = experts_on_ranks(
            lambda rows, ends: ops.expert_rows(rows, local[2], local[3], ends, ops.inner_of(GATED)),
            local[0],
            cut(chosen, tokens),
            local[1],
            experts=E,
            axes=axes,
            dispatch=tuple(a for a in axes if roles[a] == DISPATCH),
            mesh=mesh,
        )
        got.backward(cut(pull, tokens))

    def total(x, role):
        for axis, here in enumerate(roles):
            x = all_reduce(x, axis, mesh) if here == role else x
        return x

    def close(x, y):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)

    close(total(got.detach(), OWN), cut(wanted, tokens))
    for part, whole in zip(local[:2], (hidden, gates), strict=True):
        close(total(part.grad, OWN), cut(whole.grad, tokens))
    for part, whole in zip(local[2:], (up, down), strict=True):
        close(total(part.grad, TOKENS), cut(whole.grad, weights))
    return [(c.kind, c.axis, c.bytes) for c in seen]


@pytest.mark.parametrize(("sizes", "roles"), ROLES)
@pytest.mark.parametrize("how", ["any", "one", "none"])
def test_experts(sizes, roles, how):
    """Sizes where tokens do not divide are among them: 5 over 4 ranks leaves one rank without tokens."""
    seen = on_ranks(math.prod(sizes), _layer, sizes, roles, how)
    dispatched = [a for a, role in enumerate(roles) if role == DISPATCH]
    assert [[(kind, axis) for kind, axis, _ in rank] for rank in seen] == [
        [("all_to_all", a) for a in dispatched for _ in range(2)]
        + [("all_to_all", a) for a in reversed(dispatched)]
        + [("all_to_all", a) for a in dispatched]
        + [("all_to_all", a) for a in reversed(dispatched)]
    ] * len(seen)


def _kept(dtype):
    """Bytes that the forward of experts on two ranks leaves, weights and gates apart, and those that are predicted."""
    mesh, tokens, width = Mesh((2,), ("x",), "cpu"), 64, 16
    shapes = ((tokens, width), (tokens, 2), (E // 2, width, 4 * width), (E // 2, 2 * width, width))
    hidden, gates, up, down = (torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes)
    chosen = torch.stack([torch.arange(tokens) % (E // 2), E // 2 + torch.arange(tokens) % (E // 2)], 1)
    with keeping([hidden, gates, up, down, chosen]) as kept:
        made = experts_on_ranks(
            lambda rows, ends: ops.expert_rows(rows, up, down, ends, ops.inner_of(GATED)),
            hidden,
            chosen,
            gates,
            experts=E,
            axes=(0,),
            dispatch=(0,),
            mesh=mesh,
        )
        assert made.requires_grad
        held = kept.nbytes()
    whole = ((2 * tokens, width), (2 * tokens, 2), (2 * tokens, 2), (E, *shapes[2][1:]), (E, *shapes[3][1:]))
    operands = tuple(
        Tensor(shape, i != 1, (), i != 1, 8 if i == 1 else dtype.itemsize) for i, shape in enumerate(whole)
    )
    call = Call(ops.experts, (*operands, GATED), {}, (operands[0],))
    option = next(option for option in RULES[ops.experts].options(call, 2) if option.run == "expert_dispatch")
    return held, INSIDE[ops.experts].kept_bytes(Site(operands, (option,), (2,), call=call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_experts_on_ranks_keep_is_counted(dtype):
    """Where each token has one expert on each rank: sums of rows keep no rows."""
    for held, predicted in on_ranks(2, _kept, dtype):
        assert predicted == pytest.approx(held, rel=0.01)


def test_rows_are_counted_as_balanced_routing_sends_them():
    """Also where all tokens go to one rank: 5 tokens of each of 2 sequences, of which the ranks have 3 and 2."""
    seen = on_ranks(2, _layer, (2,), (DISPATCH,), "one")
    counts, numbers, gates, row = 2 * 2 * 8, K * 8, K * 8, D * 8
    for rank, tokens in zip(seen, (6, 4), strict=True):
        (sent,) = rows_sent(tokens, E, K, [2])
        assert [nbytes for _, _, nbytes in rank] == [
            counts,
            *(round(2 * sent * width) for width in (numbers + gates + row, row, row, gates + row)),
        ]


def _sent(chosen):
    """How many rows leave each rank of 2 x 2, along each axis, for tokens of which all choose `chosen`."""
    mesh, rows, module = Mesh((2, 2), ("x", "y"), "cpu"), [], sys.modules[experts_on_ranks.__module__]
    hidden, gates = torch.randn(TOKEN_COUNT, D), torch.rand(TOKEN_COUNT, len(chosen))

    def seen(parts, shapes, axis, mesh, real=module.all_to_all):
        rows.append((axis, sum(map(len, parts))))
        return real(parts, shapes, axis, mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "all_to_all", seen)
        experts_on_ranks(
            lambda rows, ends: rows,
            hidden,
            torch.tensor(chosen).expand(TOKEN_COUNT, -1),
            gates,
            experts=E,
            axes=(0, 1),
            dispatch=(0, 1),
            mesh=mesh,
        )
    return rows[1], rows[3], rows[4], rows[5]


@pytest.mark.parametrize(
    ("chosen", "outer", "ranks"),
    [
        ((0, 1), 1, 1),
        ((0, 2), 1, 2),
        ((0, 4), 2, 2),
        ((0, 2, 4, 6), 2, 4),
        ((0, 1, 2, 3, 4, 5, 6, 7), 2, 4),
        ((9, 3), 1, 1),
    ],
)
def test_tokens_go_once_to_a_coordinate(chosen, outer, ranks):
    """Each of 2 x 2 ranks has two of 8 experts: to how many coordinates of the outer axis a token goes, and to how many
    ranks in all; its results come back the same way."""
    seen = on_ranks(4, _sent, chosen)
    assert all([axis for axis, _ in rank] == [0, 1, 1, 0] for rank in seen)
    totals = [sum(rows) for rows in zip(*([rows for _, rows in rank] for rank in seen), strict=True)]
    assert totals == [4 * TOKEN_COUNT * times for times in (outer, ranks, ranks, outer)]


def _mixed():
    """Tokens of bfloat16 with gates of float32: the result of both, the dtypes of the gradients, and how far all are
    from one device."""
    mesh = Mesh((2,), ("x",), "cpu")
    torch.manual_seed(0)
    hidden, up, down = (
        torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((TOKEN_COUNT, D), (E, D, 2 * F), (E, F, D))
    )
    gates, chosen = torch.rand(TOKEN_COUNT, K, requires_grad=True), torch.randint(0, E, (TOKEN_COUNT, K))
    wanted = ops.experts(hidden, chosen, gates, up, down, GATED)
    wanted.sum().backward()
    local = [
        own(x.detach(), ("S0",), mesh.sizes, mesh.coord).clone().requires_grad_() for x in (hidden, gates, up, down)
    ]
    got = experts_on_ranks(
        lambda rows, ends: ops.expert_rows(rows, local[2], local[3], ends, ops.inner_of(GATED)),
        local[0],
        own(chosen, ("S0",), mesh.sizes, mesh.coord),
        local[1],
        experts=E,
        axes=(0,),
        dispatch=(0,),
        mesh=mesh,
    )
    got.sum().backward()
    pairs = [
        (got.detach(), wanted.detach()),
        *((part.grad, whole.grad) for part, whole in zip(local, (hidden, gates, up, down), strict=True)),
    ]
    return [
        (
            here.dtype == there.dtype,
            float((here - (cut := own(there, ("S0",), mesh.sizes, mesh.coord))).abs().max() / cut.abs().max()),
        )
        for here, there in pairs
    ]


def test_results_travel_in_the_dtype_of_tokens():
    for rank in on_ranks(2, _mixed):
        assert all(alike and error < 2e-2 for alike, error in rank), rank
