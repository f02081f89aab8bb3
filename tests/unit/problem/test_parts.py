"""Tokens that go to their experts in parts, one from each rank of an axis that cuts the experts' width, and are
gathered there, or once to each node: not how emitted programs run."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.problem.op_algorithms import waits
from autopar.problem.settings import Settings
from autopar.rules import RULES
from autopar.rules.experts import FORWARD, rows
from autopar.rules.language import Call, Tensor
from autopar.rules.site import Site
from passes import ops

TOKENS, CHOSEN, WIDTH, EXPERTS, INSIDE = 64, 2, 32, 8, 48
SIZES = (4, 2)


def _site(width: str) -> Site:
    """Experts on the outer axis, to which tokens go; the inner one cuts what `width` says."""
    shapes = [
        (TOKENS, WIDTH),
        (TOKENS, CHOSEN),
        (TOKENS, CHOSEN),
        (EXPERTS, WIDTH, 2 * INSIDE),
        (EXPERTS, INSIDE, WIDTH),
    ]
    tensors = [Tensor(shape, index != 1, shape, index != 1, 2) for index, shape in enumerate(shapes)]
    call = Call(
        ops.experts,
        (*tensors, "halves(lambda a, b: a * b)"),
        {},
        (Tensor((TOKENS, WIDTH), True, (TOKENS, WIDTH), True, 2),),
    )
    found = [
        {option.factor.partition("/")[0]: option for option in RULES[ops.experts].options(call, ways)} for ways in SIZES
    ]
    return Site(call.ins, (found[0]["t0+e"], found[1][width]), SIZES, 0, call)


@pytest.mark.parametrize("width", ["f", "o"])
def test_rows_are_sent_in_parts_and_gathered(width: str) -> None:
    site, mesh = _site(width), Cluster.parse("h100:4x2").mesh(SIZES)
    whole, parted = (
        waits([(site, FORWARD)], mesh, Settings(tokens_in_parts=parts, rows_to="experts")) for parts in (False, True)
    )
    assert [(each.kind, each.axis) for each in whole] == [("all_to_all", 0)] * 3
    assert [(each.kind, each.axis) for each in parted] == [
        ("all_to_all", 0),
        ("all_to_all", 0),
        ("all_gather", 1),
        ("all_to_all", 0),
        ("reduce_scatter", 1),
    ]
    assert [each.nbytes for each in parted if each.axis == 0] == [
        whole[0].nbytes,
        whole[1].nbytes / 2,
        whole[2].nbytes / 2,
    ]
    assert [each.nbytes for each in parted if each.axis == 1] == [rows(site) * WIDTH * 2 * (CHOSEN - 1) / CHOSEN] * 2


def test_rows_go_once_to_each_node() -> None:
    site, mesh = _site("f"), Cluster.parse("h100:4x2").mesh(SIZES)
    each, once = (waits([(site, FORWARD)], mesh, Settings(rows_to=to)) for to in ("ranks", "nodes"))
    # numbers of rows are for one rank each
    assert once[0] == each[0] and [wait.nbytes for wait in once] == [wait.nbytes for wait in each]
    assert all(fewer.seconds <= more.seconds for fewer, more in zip(once, each, strict=True))


def test_rows_go_to_neighbours() -> None:
    """Both experts of a token are on one of 4 ranks."""
    site, mesh = _site("f"), Cluster.parse("h100:4x2").mesh(SIZES)
    apart, beside = (waits([(site, FORWARD)], mesh, Settings(in_a_row=together)) for together in (False, True))
    assert [fewer.nbytes / more.nbytes for fewer, more in zip(beside, apart, strict=True)] == pytest.approx(
        [1, 7 / 13, 7 / 13]
    )
    nodes = waits([(site, FORWARD)], mesh, Settings(rows_to="nodes", in_a_row=True))
    assert nodes == beside  # one node each, as one rank each


def test_rows_go_to_each_expert_by_themselves() -> None:
    """Of 8 experts each rank of 4 has two: both of a token are on one in 1 of 7 cases."""
    site, mesh = _site("f"), Cluster.parse("h100:4x2").mesh(SIZES)
    once, apart = (waits([(site, FORWARD)], mesh, Settings(rows_to=to)) for to in ("ranks", "experts"))
    assert apart[0] == once[0]
    assert [more.nbytes / fewer.nbytes for fewer, more in zip(once[1:], apart[1:], strict=True)] == pytest.approx(
        [CHOSEN / (13 / 7)] * 2
    )
