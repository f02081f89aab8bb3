"""Later steps of a model that keeps Python's own values: which of them are tried, and that another one is refused."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.noting_numbers import NEAR, Comparison, noting, plain
from autopar.capture.step_counts import counts, state_of
from autopar.errors import CaptureError


class Keeping(nn.Module):
    """A squared error of what `keep` makes of a map; it has attributes of several kinds to keep something in."""

    def __init__(self, keep: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(4, 4), keep
        self.steps, self.left, self.progress, self.phase = 0, 5, 0.0, "first"
        self.kept, self.there, self.seen = {"steps": 0}, SimpleNamespace(steps=0), list[int]()
        self.scales = itertools.cycle([1.0, 1.0, 2.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(self, self.linear(x)).square().mean()


def at_one_step(model: Any, x: Tensor) -> Tensor:
    model.steps += 1
    return x * 2.0 if model.steps == 100 else x


def far_away(model: Any, x: Tensor) -> Tensor:
    model.steps += 1
    return x * 2.0 if model.steps == 123_457 else x


def one_of_some(model: Any, x: Tensor) -> Tensor:
    model.steps += 1
    return x * 2.0 if model.steps in [50, 70] else x


def between(model: Any, x: Tensor) -> Tensor:
    model.steps += 1
    return x * 2.0 if 1000 < model.steps < 2000 else x


def in_a_dict(model: Any, x: Tensor) -> Tensor:
    model.kept["steps"] += 1
    return x * 2.0 if model.kept["steps"] > 100 else x


def in_an_object(model: Any, x: Tensor) -> Tensor:
    model.there.steps += 1
    return x * 2.0 if model.there.steps >= 100 else x


def down(model: Any, x: Tensor) -> Tensor:
    model.left = max(model.left - 1, 0)
    return x if model.left else x * 2.0


def in_parts(model: Any, x: Tensor) -> Tensor:
    model.progress += 1 / 64
    return x * 2.0 if model.progress >= 1 and round(model.progress) == 3 else x


def odd_turns(model: Any, x: Tensor) -> Tensor:
    model.steps += 1
    return x * 2.0 if model.steps % 37 == 23 else x


def behind_another(model: Any, x: Tensor) -> Tensor:
    """What is asked only where another condition holds."""
    model.steps += 1
    if model.steps > 300 and model.steps * 2 == 1402:
        return x * 2.0
    return x


def by_length(model: Any, x: Tensor) -> Tensor:
    model.seen.append(1)
    return x * 2.0 if len(model.seen) > 100 else x


def in_turns(model: Any, x: Tensor) -> Tensor:
    model.phase = {"first": "second", "second": "third", "third": "first"}[model.phase]
    return x * 2.0 if model.phase == "first" else x


def of_an_iterator(model: Any, x: Tensor) -> Tensor:
    return x * next(model.scales)


STEPS = 0


def in_a_global(model: Any, x: Tensor) -> Tensor:
    global STEPS
    STEPS += 1
    return x * 2.0 if STEPS > 100 else x


class Schedule:
    """Counts in an attribute of its class."""

    steps = 0

    def __call__(self, x: Tensor) -> Tensor:
        Schedule.steps += 1
        return x * 2.0 if self.steps > 100 else x


def in_a_class(model: Any, x: Tensor) -> Tensor:
    return Schedule()(x)


def in_a_closure() -> Callable[[Any, Tensor], Tensor]:
    steps = 0

    def in_a_cell(model: Any, x: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return x * 2.0 if steps > 100 else x

    return in_a_cell


def in_a_default(model: Any, x: Tensor, kept: list[int] = [0]) -> Tensor:  # noqa: B006
    kept[0] += 1
    return x * 2.0 if kept[0] > 100 else x


def on_a_function(model: Any, x: Tensor) -> Tensor:
    vars(on_a_function)["steps"] = vars(on_a_function).get("steps", 0) + 1
    return x * 2.0 if vars(on_a_function)["steps"] > 100 else x


OUTSIDE = (in_a_global, in_a_class, in_a_closure(), in_a_default, on_a_function)
OTHERS = (
    *OUTSIDE,
    at_one_step,
    far_away,
    one_of_some,
    between,
    in_a_dict,
    in_an_object,
    down,
    in_parts,
    odd_turns,
    behind_another,
)
OTHER_STATES = (by_length, in_turns, of_an_iterator)


@pytest.mark.parametrize("keep", [*OTHERS, *OTHER_STATES], ids=lambda keep: keep.__name__)
def test_a_later_step_that_differs_is_refused(keep: Callable[[Any, Tensor], Tensor]) -> None:
    model = Keeping(keep)
    why = "it counts its steps" if keep in OTHERS else "its (attributes change|lists grow)"
    with pytest.raises(CaptureError, match=rf"{why}.* computes something else than the first one, .*test_step_counts"):
        capture(model, (torch.randn(8, 4),))
    assert (model.steps, model.left, model.kept["steps"], model.phase, model.seen) == (0, 5, 0, "first", [])
    assert (STEPS, Schedule.steps, in_a_default.__defaults__, vars(on_a_function)) == (0, 0, ([0],), {})


LAST: Any = None


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size)


def remembers(model: Any, x: Tensor) -> Tensor:
    global LAST
    x = x if LAST is None else x + LAST
    LAST = x.detach()
    return x


def test_what_is_kept_outside_is_as_before_afterwards() -> None:
    """A run without values would leave tensors without values."""
    with pytest.raises(CaptureError, match=r"its second step computes something else .* from add"):
        capture(Keeping(remembers), (torch.randn(8, 4),))
    capture(Keeping(lambda model, x: x * table(4)), (torch.randn(8, 4),))
    assert LAST is None and table(4).tolist() == [0, 1, 2, 3]


class Made(OrderedDict[str, Any]):
    """As transformers' table of activations: an item is made when it is read."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()

    def items(self) -> Any:
        raise AssertionError("this makes all of them")


ACTIVATIONS = Made(relu=nn.ReLU, gelu=nn.GELU)


def test_tables_that_make_what_is_read_of_them_stay_as_they_are() -> None:
    """They were refilled with what they had made: the next model that read them failed. And all items were read, which
    imports all of transformers' models."""
    model = Keeping(lambda model, x: ACTIVATIONS["relu"](x))
    state_of(model)
    capture(model, (torch.randn(8, 4),))
    assert list(ACTIVATIONS.values()) == [nn.ReLU, nn.GELU]


def test_what_is_no_number_is_no_count() -> None:
    """A table of floats with a nan, as transformers has one, made later steps of every model be tried."""
    with mock.patch.dict(globals(), STEPS=math.nan):
        model = Keeping(lambda model, x: x + 0 * len(str(STEPS)))
        state = state_of(model)
        assert any(map(math.isnan, state.numbers.values())) and counts([state] * 3) == {}


def test_only_streams_that_are_read_move(tmp_path: Path) -> None:
    """The thread of tqdm's bars holds the stream that they are written to: once there was one, six further steps of
    every model of transformers were tried, a third of the time of its capture."""

    def moves(held: Any) -> bool:
        model = Keeping(lambda model, x: x)
        model.scales = held
        return state_of(model).rest != state_of(model).rest

    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        assert not moves(log)
        with (tmp_path / "log").open(encoding="utf-8") as read:
            assert moves(read)
    assert not moves(log) and not moves(sys.stderr) and moves(iter([]))


def toggles(model: Any, x: Tensor) -> Tensor:
    x = nn.functional.dropout(x, 0.5, model.training)
    model.train(not model.training)
    return x


def test_a_model_whose_steps_train_and_evaluate_by_turns_is_refused() -> None:
    with pytest.raises(CaptureError, match="its steps leave the model in training and in evaluation by turns"):
        capture(Keeping(toggles), (torch.randn(8, 4),))


def stays_frozen(model: Any, x: Tensor) -> Tensor:
    """As a frozen part that train() has set to training."""
    model.linear.eval()
    return x


def only_tells(model: Any, x: Tensor) -> Tensor:
    model.steps += 1
    model.there.steps += 1
    if model.steps % 100 == 0:
        model.phase = f"step {model.steps}"
    model.seen.append(model.steps)
    if len(model.seen) > 50:
        model.seen.pop(0)
    return x


def changes_nothing(model: Any, x: Tensor) -> Tensor:
    """The branches of a count do the same."""
    model.steps += 1
    if model.steps > 100:
        return x * 2.0
    return x * 2.0


def fails_late(model: Any, x: Tensor) -> Tensor:
    """There are fewer steps than are tried: what fails then is no other step."""
    model.steps += 1
    return x * ([2.0] * 1000)[model.steps]


@pytest.mark.parametrize(
    "keep", [only_tells, changes_nothing, fails_late, stays_frozen], ids=lambda keep: keep.__name__
)
def test_a_count_that_changes_nothing_is_captured(keep: Callable[[Any, Tensor], Tensor]) -> None:
    assert capture(Keeping(keep), (torch.randn(8, 4),)).hints == {"b": 8}


COMPARED = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
COMPUTED: tuple[Callable[[Any], Any], ...] = (
    lambda n: n,
    lambda n: n % 7,
    lambda n: n // 5,
    lambda n: 3 * n - 2,
    lambda n: n / 8 + 0.5,
    lambda n: 100 - n,
    lambda n: min(n, 40),
    lambda n: abs(20 - n),
    lambda n: round(n * 0.3) % 4,
    lambda n: -n,
)


@pytest.mark.parametrize("seed", range(40))
def test_a_comparison_turns_where_it_is_another_one(seed: int) -> None:
    """Against all later steps, one by one; a number that is compared on the way has turns of its own."""
    rng = random.Random(seed)
    compute, how, against = rng.choice(COMPUTED), rng.choice(COMPARED), rng.randrange(-20, 60)
    start, by = rng.randrange(30), rng.choice([1, 2, 0.5])
    noted: list[Comparison] = []
    now = how(compute(noting(start, lambda steps: start + steps * by, noted)), against)
    assert now is how(compute(start), against)
    wanted = next((n for n in range(1, 300) if how(compute(start + n * by), against) is not now), None)
    turns = [steps for each in noted if (steps := each.turns()) is not None]
    assert wanted is None or (turns and min(turns) <= wanted)
    if len(noted) == 1 and wanted is not None:
        assert turns == [wanted]


def test_where_far_numbers_meet_is_found() -> None:
    noted: list[Comparison] = []
    count = noting(10, lambda steps: 10 + 3 * steps, noted)
    assert count != 10 + 3 * (NEAR * 1000) and not count * 2 > NEAR * 100
    assert [each.turns() for each in noted] == [NEAR * 1000, (NEAR * 50 - 10) // 3 + 1]
    assert isinstance(count + 1, int) and type(plain(count + 1)) is int and repr(count / 4) == "2.5"
    assert (count * torch.ones(2)).tolist() == [10.0, 10.0] and {10: "ten"}[count] == "ten"
