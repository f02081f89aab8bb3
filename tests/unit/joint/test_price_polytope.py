"""One pass as prices against how long it takes: no mixture of what computes, waits and moves in the background is said
to take longer than it does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.joint.cutting_planes import Cutting, Level
from autopar.joint.price_polytope import first_prices
from autopar.joint.relaxed import Relaxed, Sums
from autopar.joint.relaxed_steps import alone
from autopar.joint.shape_bounds import Alone
from autopar.problem.hiding import Load, together_s
from autopar.problem.pass_quantities import COMPUTE, SHOWN, WAITED
from autopar.problem.pass_tables import BACKWARD, PassTables
from tests.unit.joint.test_relaxed import alone_on
from tests.unit.joint.test_wait_cases import own_spans

KEY = ("", BACKWARD)  # nothing of it begins elsewhere
MESHES = [("h100:2x4", (2, 4)), ("h100:2x4", (2, 2, 2)), ("h100:2x2", (4,))]

seconds = st.one_of(st.just(0.0), st.floats(0.01, 2.0))
shares = st.one_of(st.just(1.0), st.floats(0.1, 1.0))
loads = st.lists(st.tuples(seconds, shares, seconds, shares), min_size=3, max_size=3)


def pass_of(
    here: Alone, compute_s: float, each: list[tuple[float, float, float, float]]
) -> tuple[Relaxed, Sums, float]:
    """A pass that computes for so long and has by axis (seconds of waits, their share of the link, and the same of the
    background): what is relaxed, its sums, and the seconds that it takes."""
    tables, waited, behind = here.passing, list[Load](), list[Load]()
    sums = np.zeros(tables.width + 1)
    sums[tables.width], sums[COMPUTE] = 1.0, compute_s
    for axis, (waits_s, takes, behind_s, wants) in enumerate(each[: tables.axes]):
        level = tables.link[axis]
        sums[WAITED] += waits_s
        sums[tables.waits(axis)], sums[tables.links_waited(axis)] = waits_s, takes * waits_s
        sums[tables.behind(axis)], sums[tables.links_behind(axis)] = behind_s, wants * behind_s
        waited += [Load(axis, waits_s, {level: takes})] * (waits_s > 0)
        behind += [Load(axis, behind_s, {level: wants})] * (behind_s > 0)
    sums[SHOWN] = compute_s + sums[WAITED]
    relaxed = replace(alone(tables, here.plain, np.inf), times={KEY: 1.0})
    return (
        relaxed,
        Sums({KEY: sums}, 0.0, np.zeros(0)),
        together_s(compute_s, waited, behind, tables.model.prices.contention),
    )


def least_s(relaxed: Relaxed, sums: Sums) -> float:
    """Seconds that are proven of a pass."""
    return Cutting([Level(relaxed, [sums])], lambda *asked: pytest.fail("nothing is to be solved")).most_s()


@pytest.mark.parametrize(("cluster", "mesh"), MESHES)
@given(compute_s=st.floats(0.1, 4.0), each=loads, wide=st.sampled_from([1.001, 1.3, 4.0]))
def test_no_pass_is_said_to_take_longer(
    cluster: str, mesh: tuple[int, ...], compute_s: float, each: list[tuple[float, float, float, float]], wide: float
) -> None:
    relaxed, sums, took_s = pass_of(alone_on("hf-llama", cluster, mesh)[0], compute_s, each)
    plain_s = least_s(relaxed, sums)
    case_s = least_s(replace(relaxed, spans=own_spans(relaxed, sums, wide)), sums)
    assert plain_s * (1 - 1e-6) <= case_s <= took_s * (1 + 1e-6)
    first_s = float(first_prices(relaxed)[KEY] @ sums.passes[KEY])
    assert first_s <= plain_s * (1 + 1e-6) and plain_s >= float(sums.passes[KEY][SHOWN]) * (1 - 1e-6)


def test_waits_are_slowed_by_what_is_behind_them_on_their_link() -> None:
    """Two seconds of tensor parallelism, three of gathers on the same link, ten of compute: known but for a tenth."""
    here = alone_on("hf-llama", "h100:2x4", (2, 4))[0]
    relaxed, sums, took_s = pass_of(here, 10.0, [(0.0, 1.0, 0.0, 1.0), (2.0, 1.0, 6.0, 1.0)])
    plain_s, case_s = least_s(relaxed, sums), least_s(replace(relaxed, spans=own_spans(relaxed, sums, 1.001)), sums)
    hidden = took_s - 12.0
    assert hidden > 1.0
    assert plain_s - 12.0 < 0.85 * hidden < 0.9 * hidden < case_s - 12.0


def test_nothing_need_run_under_the_waits_of_a_stage() -> None:
    """The same of a stage of a pipeline, which is priced in program order: all gathers may run under its compute."""
    here = alone_on("hf-llama", "h100:2x4", (2, 4))[0]
    tables = PassTables(here.plain, here.forward, sums_at_end=True, linked=True)
    stage: Any = SimpleNamespace(passing=tables, plain=here.plain)
    relaxed, sums, _ = pass_of(stage, 10.0, [(0.0, 1.0, 0.0, 1.0), (2.0, 1.0, 6.0, 1.0)])
    case_s = least_s(replace(relaxed, spans=own_spans(relaxed, sums, 1.001)), sums)
    assert case_s <= 12.0 + 6.0 * here.plain.prices.contention + 1e-6
