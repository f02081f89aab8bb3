"""What a draw follows from, and what it does not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from autopar.runtime.rng import Rng, current, in_block, using

COORDS = list(itertools.product(range(2), range(2)))


def seed_of(rng: Rng, key: str = "drop", coord: tuple[int, ...] = (0, 0), *, once: bool = False) -> int:
    return rng.generator(key, ("S0", "R"), coord, torch.device("cpu"), once=once).initial_seed()


def test_a_draw_is_another_one_wherever_something_differs_that_it_follows_from() -> None:
    seen = []
    for seed, step, evaluation, microbatch, block in itertools.product(range(2), repeat=5):
        for key, shard in itertools.product("ab", range(2)):
            rng = replace(Rng(seed, step, evaluation), microbatch=microbatch, block=block)
            seen += [seed_of(rng, key, (shard, 0)) for _ in range(2)]  # two calls
    assert len(set(seen)) == len(seen) == 256


def test_an_evaluation_draws_other_numbers_and_leaves_those_of_the_next_step() -> None:
    def drawn(counts: list[bool]) -> list[int]:
        rng, seen = Rng(), []
        for one in counts:
            rng.advance(counts=one)
            seen.append(seed_of(rng))
        return seen

    first, *evaluations, second, other = drawn([True, False, False, True, False])
    assert [first, second] == drawn([True, True])
    assert len({first, *evaluations, second, other}) == 5


def test_replicas_draw_the_same_and_so_do_microbatches_of_what_is_the_same_for_all() -> None:
    seeds = {coord: seed_of(Rng(), coord=coord) for coord in COORDS}
    assert seeds[0, 0] == seeds[0, 1] != seeds[1, 0] == seeds[1, 1]
    assert len({seed_of(Rng().of(number), once=True) for number in range(4)}) == 1
    assert len({seed_of(Rng().of(number)) for number in range(4)}) == 4


def test_calls_count_for_each_operator_in_each_block_of_each_microbatch() -> None:
    """Whatever else is drawn between, and whoever else has drawn in another stage."""
    whole = Rng(seed=3, step=5)
    seed_of(whole)
    assert seed_of(whole.of(1)) == seed_of(replace(Rng(3, 5), microbatch=1))
    with using(whole):
        with in_block(2):
            inside = seed_of(current())
        assert current().block == 0 and whole.calls["drop", 2] == 1
    assert inside == seed_of(replace(Rng(3, 5), block=2))
    again = whole.copy()
    assert seed_of(again) == seed_of(whole), "a copy counts by itself"
