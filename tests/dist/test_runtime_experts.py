"""Layers of experts on real ranks against one device, in float64: values, gradients, and what is sent."""

from __future__ import annotations

import math

import pytest
import torch

from autopar.runtime import Mesh, count
from autopar.runtime.algorithms import experts_on_ranks
from autopar.runtime.collectives import all_reduce
from autopar.runtime.cuts import own
from passes import ops
from tests.helpers.ranks import on_ranks

GATED = "halves(lambda first, second: F.silu(first) * second)"
OWN, DISPATCH, TOKENS = "own", "dispatch", "tokens"
ROLES = [((2,), (OWN,)), ((2,), (DISPATCH,)), ((4,), (DISPATCH,)), ((4,), (OWN,)), ((2, 2), (DISPATCH, DISPATCH)), ((2, 2), (DISPATCH, OWN)),
         ((2, 2), (OWN, DISPATCH)), ((2, 2), (TOKENS, DISPATCH)), ((2, 2), (DISPATCH, TOKENS))]
TOKEN_COUNT, K, D, F, E = 10, 2, 3, 4, 8


def _route(how):
    """Expert numbers: any, all tokens to expert 0, or some to none (number E and above)."""
    numbers = torch.randint(0, E, (2, TOKEN_COUNT // 2, K))
    return {"any": numbers, "one": numbers * 0, "none": torch.randint(0, 2 * E, numbers.shape)}[how]


def _layer(sizes, roles, how):
    mesh = Mesh(sizes, ("x", "y")[:len(sizes)], "cpu")
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

    local = [cut(x, layout).requires_grad_() for x, layout in ((hidden, tokens), (gates, tokens), (up, weights), (down, weights))]
    with count() as seen:
        got = experts_on_ranks(lambda rows, ends: ops.expert_rows(rows, local[2], local[3], ends, ops.inner_of(GATED)), local[0], cut(chosen, tokens),
                               local[1], experts=E, axes=axes, dispatch=tuple(a for a in axes if roles[a] == DISPATCH), mesh=mesh)
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
        [("all_to_all", a) for a in dispatched for _ in range(2)] + [("all_to_all", a) for a in reversed(dispatched)]
        + [("all_to_all", a) for a in dispatched] + [("all_to_all", a) for a in reversed(dispatched)]] * len(seen)


def test_rows_are_counted_as_balanced_routing_sends_them():
    """Also where all rows go to one rank: the sum over the ranks is what really is sent."""
    seen = on_ranks(2, _layer, (2,), (DISPATCH,), "one")
    counts, rows = 2 * 2 * E * 8, [2 * n * 2 * K * D * 8 for n in (3, 2)]  # 5 tokens of each of 2 sequences: 3 and 2
    assert [[nbytes for _, _, nbytes in rank] for rank in seen] == [[counts, *[n] * 4] for n in rows]
