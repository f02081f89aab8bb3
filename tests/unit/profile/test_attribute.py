"""From events to seconds: ranges, what is inside of them, and the backward by autograd's numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch.autograd import DeviceType

from autopar.profile.attribute import attributed


@dataclass
class Range:
    start: float
    end: float


@dataclass
class Event:
    name: str
    start: float
    end: float
    sequence_nr: int = -1
    thread: int = 1
    fwd_thread: int = 0  # of what the backward runs
    device_type: DeviceType = DeviceType.CPU

    @property
    def time_range(self) -> Range:
        return Range(self.start, self.end)


def test_steps_inside_of_an_operator_are_their_own() -> None:
    found = attributed(
        [
            Event("autopar op f", 0, 100),
            Event("aten::mm", 10, 40),
            Event("autopar all_reduce 0 4096", 50, 90),
            Event("aten::clone", 55, 60),
            Event("autopar slice 0 64", 200, 210),
            Event("aten::add", 300, 400),
        ]
    )
    assert found == {
        ("op", "f"): pytest.approx(60e-6),
        ("all_reduce", 0, 4096): pytest.approx(40e-6),
        ("local",): pytest.approx(10e-6),
    }


def test_the_backward_belongs_to_the_last_operator_that_began_with_its_number() -> None:
    events = [
        Event("autopar op f", 0, 50),
        Event("aten::mul", 10, 20, 7),
        Event("autopar op g", 50, 90),
        Event("aten::view", 60, 65, 7),
        Event("aten::mm", 66, 80, 8),
        Event("autograd::engine::evaluate_function: MmBackward0", 100, 130, 8, fwd_thread=1),
        Event("MmBackward0", 100, 130, 8, fwd_thread=1),
        Event("autopar reduce_scatter 1 64", 110, 120),
        Event("autograd::engine::evaluate_function: MulBackward0", 130, 150, 7, fwd_thread=1),
        Event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 150, 170, -1),
        Event("autopar sync all_reduce 0", 155, 165),
    ]
    found = attributed(events)
    assert found["op", "g"] == pytest.approx((40 + 20 + 20) * 1e-6)
    assert found["op", "f"] == pytest.approx(50e-6)
    assert found["reduce_scatter", 1, 64] == pytest.approx(10e-6) and found["sync", "all_reduce", 0] == pytest.approx(
        10e-6
    )


def test_threads_count_for_themselves() -> None:
    """On a GPU a block is run again in the thread of the backward, whose numbers begin at 0 as those of the forward
    did."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    found = attributed(
        [
            Event("autopar op first", 0, 10),
            Event("aten::mm", 1, 9, 0),
            Event("autopar op last", 10, 20),
            Event("aten::mm", 11, 19, 1),
            Event("autopar op again", 100, 110, thread=2),
            Event("aten::mm", 101, 109, 1, thread=2),
            Event(node, 120, 150, 1, thread=2, fwd_thread=1),
            Event("MmBackward0", 121, 149, 1, thread=2, fwd_thread=1),
            Event(node, 150, 190, 1, thread=2, fwd_thread=2),
            Event("MmBackward0", 151, 189, 1, thread=2, fwd_thread=2),
            Event(node, 190, 260, 0, thread=2, fwd_thread=1),
        ]
    )
    assert found == {
        ("op", "first"): pytest.approx(80e-6),
        ("op", "last"): pytest.approx(40e-6),
        ("op", "again"): pytest.approx(50e-6),
    }


def test_the_copy_of_a_range_on_a_gpu_is_none_of_its_own() -> None:
    on_gpu = Event("autopar op f", 20, 90, thread=7, device_type=DeviceType.CUDA)
    assert attributed([Event("autopar op f", 0, 100), on_gpu]) == {("op", "f"): pytest.approx(100e-6)}


def test_the_optimizer_and_other_threads() -> None:
    found = attributed(
        [Event("Optimizer.step#AdamW.step", 0, 30), Event("aten::add_", 5, 10), Event("autopar op f", 0, 9, thread=2)]
    )
    assert found == {("optimizer",): pytest.approx(30e-6), ("op", "f"): pytest.approx(9e-6)}
