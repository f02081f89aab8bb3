"""A proof in another process: the same as in this one, and nothing of it is left, whatever happens."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.joint import UNPROVEN, _with_bound, background_proof, fastest, plan
from autopar.joint.background_proof import BackgroundProof
from autopar.joint.prove import LOOKS, Prover, proven_s
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.verify import by_recipe, subject

Forked = Callable[[], list[BaseProcess]]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forked]:
    """What gives the processes that the test has forked and that live, on a machine with cores to spare."""
    monkeypatch.setattr(background_proof, "able", lambda: True)
    before = multiprocessing.active_children()  # ranks that other tests have

    def living() -> list[BaseProcess]:
        return [child for child in multiprocessing.active_children() if child not in before]

    yield living
    assert not living()


def inner_of(prove: bool = False) -> SearchContext:
    who = subject("hf-gpt2")
    return SearchContext(
        who.captured.gm,
        {**who.captured.hints, "b": 8},
        Request(Cluster.parse("h100:1x4"), Settings("train"), prove=prove),
    )


@cache
def step_s() -> float:
    """So far above the least work there is that some claims are looked at as closely as ever."""
    prover = Prover(inner_of(), closely=False)
    return 1.6 * min(map(prover.floor_s, prover.shapes()))


def test_two_processes_prove_what_one_does(forked: Forked) -> None:
    alone_s = proven_s(inner_of(), step_s(), closely=False)
    with BackgroundProof(inner_of()) as proof:
        assert not proof.looked
        proof.know(step_s())
        proof.know(2 * step_s())  # slower ones are not news
        (child,) = forked()
        assert (
            child.daemon
            and proof.proven_s(step_s(), None, math.inf) == pytest.approx(alone_s, rel=1e-9)
            and proof.looked
        )
        assert proof.proven_s(step_s(), None, -math.inf) == pytest.approx(alone_s, rel=1e-9)


def test_what_the_other_process_has_proven_counts_where_this_one_looks_at_nothing(
    forked: Forked,
) -> None:
    with BackgroundProof(inner_of()) as proof:
        proof.know(step_s())
        while not proof.looked and any(child.is_alive() for child in forked()):
            time.sleep(0.01)
        for child in forked():
            child.join()
        found_s = proof.proven_s(step_s(), None, -math.inf)
    assert found_s == pytest.approx(proven_s(inner_of(), step_s(), closely=False), rel=1e-9)
    assert found_s > min(proof.prover.floor_s(shape) for shape in proof.prover.shapes())


def test_where_the_other_process_dies_this_one_goes_on(forked: Forked) -> None:
    with BackgroundProof(inner_of()) as proof:
        proof.know(step_s())
        (child,) = forked()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        proof.prover.board.take(background_proof.THEIRS, step_s())  # as if that was in the middle of something
        assert proof.proven_s(step_s(), None, math.inf) == pytest.approx(
            proven_s(inner_of(), step_s(), closely=False), rel=1e-9
        )


def test_a_search_and_a_proof_take_each_first_look_once(monkeypatch: pytest.MonkeyPatch, forked: Forked) -> None:
    prover, looked = Prover(inner_of()), list[tuple[Shape, ...]]()
    together = [claim.shapes for claim in prover.all_claims if not claim.shapes[0].naive]
    bounds_s = {shapes: prover.together_s(shapes, effort=LOOKS[0][1]) for shapes in together}

    def counted(self: Prover, shapes: tuple[Shape, ...], *about: Any) -> float:
        looked.append(shapes)
        return bounds_s[shapes]

    with BackgroundProof(inner_of()) as proof:
        assert {shapes: proof.quick_s(shapes, math.inf) for shapes in together} == pytest.approx(bounds_s, rel=1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(Prover, "together_s", counted)
        alone = BackgroundProof(inner_of())
        for shapes in (*together, *together):
            assert alone.quick_s(shapes[-1:], math.inf) == max(bounds_s[shapes], min(map(prover.floor_s, shapes)))
        assert looked == together
    with BackgroundProof(inner_of()) as proof:
        (child,) = forked()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        proof.prover.board.take(background_proof.THEIRS, math.inf)  # as if that was in the middle of a first look
        assert {shapes: proof.quick_s(shapes, math.inf) for shapes in together} == pytest.approx(bounds_s, rel=1e-9)


def test_without_room_for_another_process_this_one_proves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", full)
    with BackgroundProof(inner_of()) as proof:
        proof.know(step_s())
        assert not proof.looked and proof.proven_s(step_s(), None, math.inf) == pytest.approx(
            proven_s(inner_of(), step_s(), closely=False), rel=1e-9
        )


@pytest.mark.parametrize(("left_s", "proves"), [(9.0, True), (-1.0, True), (-100.0, False)])
def test_a_search_that_took_most_of_its_time_leaves_the_rest_to_a_proof(left_s: float, proves: bool) -> None:
    """And a little more, where nobody has looked at anything beside it: the gap to the least work there is says
    little."""
    context = inner_of()
    made = by_recipe(subject("hf-gpt2"), (4,), "ddp")
    made = replace(made, predicted=replace(made.predicted, step_s=step_s()))
    context.timer.ends_at = time.monotonic() + left_s
    proven = _with_bound(context, made, BackgroundProof(context))
    floor_s = min(map(Prover(context, closely=False).floor_s, Prover(context, closely=False).shapes()))
    assert (proven.predicted.bound_s > floor_s, UNPROVEN in proven.notes) == (proves, not proves)


def test_where_there_is_nothing_to_look_at_in_time_no_longer_limit_is_advised() -> None:
    """The step is as near to the least work as anybody asks for."""
    context = inner_of()
    made = by_recipe(subject("hf-gpt2"), (4,), "ddp")
    near = replace(made, predicted=replace(made.predicted, step_s=step_s() / 1.6))
    assert UNPROVEN not in _with_bound(context, near, BackgroundProof(context)).notes


def test_the_mesh_of_the_answer_is_looked_at_too() -> None:
    who = subject("hf-gpt2")
    own = Shape(1, (2, 2, 2), 1)
    with BackgroundProof(
        SearchContext(
            who.captured.gm, {**who.captured.hints, "b": 8}, Request(Cluster.parse("h100:4x2"), Settings("train"))
        )
    ) as proof:
        assert proof._others((2, 2, 2)) == [own] and proof._others((4, 2)) == [] == proof._others(None)
        known_s = 1.1 * proof.prover.floor_s(own)
        proof.know(known_s)
        least_s = proven_s(proof.context, known_s, closely=False, only=[own])
        assert (
            proof.proven_s(known_s, (2, 2, 2), math.inf) <= least_s
            and proof.proven_s(known_s, (2, 2, 2), -math.inf) <= proof.prover.floor_s(own) < least_s
        )


def test_an_interrupt_leaves_no_process(monkeypatch: pytest.MonkeyPatch, forked: Forked) -> None:
    def slow(self: Prover, known_s: float, who: int = 0) -> bool:
        time.sleep(60.0 * (who == background_proof.THEIRS))
        return False

    def interrupted(self: BackgroundProof, *about: object) -> float:
        (child,) = forked()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)  # the whole group of processes has it
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(Prover, "look", slow)
    monkeypatch.setattr(BackgroundProof, "proven_s", interrupted)
    context = inner_of()
    with pytest.raises(KeyboardInterrupt):
        plan(context.gm, context.hints, context.request, model="m", graph_hash="")


def test_a_search_forks_once_and_a_proof_of_all_shapes_or_a_recipe_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    forks = multiprocessing.get_context("fork")
    process = forks.Process
    monkeypatch.setattr(forks, "Process", lambda **given: (begun.append(given), process(**given))[1])
    who, request = subject("hf-gpt2"), Request(Cluster.parse("h100:1x4"), Settings("train"))
    made = plan(
        who.captured.gm, {**who.captured.hints, "b": 8}, request, model=who.name, graph_hash=who.captured.graph_hash
    )
    assert len(begun) == 1 and 0 <= made.predicted.gap < 0.5
    with BackgroundProof(inner_of(prove=True)) as proof:
        proof.know(step_s())
        proof.know(math.inf)
    # the mesh is that of a place, on which nothing of one stage can be proven
    asked = replace(request, cluster=Cluster.parse("cpu:1x4"), recipe="1f1b", mesh=(2,))
    assert (
        plan(
            who.captured.gm, {**who.captured.hints, "b": 8}, asked, model=who.name, graph_hash=who.captured.graph_hash
        ).places
        == 2
    )
    assert len(begun) == 1


def test_no_process_is_forked_from_one_that_may_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not background_proof.able()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert background_proof.able() == background_proof.FORKS
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    assert not background_proof.able()


def test_a_mesh_that_cannot_be_is_refused_before_anything_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    context = inner_of()
    context.request = replace(context.request, mesh=(3,))
    monkeypatch.setattr(BackgroundProof, "_forked", lambda self: pytest.fail("forked"))
    with pytest.raises(PlanError, match="mesh 3 has 3 ranks"):
        fastest(context)
