"""The schedules of torch.distributed.pipelining as plain data: how many stages a place has, which these are, and what
they split. Read by all that prices, emits or checks a pipeline.

The names are torch's own, in lower case. `Schedule.place` maps a stage to its place on the pipeline axis: in a *loop*,
stage i is on place i mod p; in a *V*, the second half comes back (p = 2: stages 0 1 2 3 on places 0 1 1 0).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule.

    torch_name        its class in torch.distributed.pipelining
    virtual           the number of stages per place; None: any number
    shape             "loop" or "v"
    splits_backward   gradients of inputs and of weights are computed in separate actions (zero bubble)
    forwards_first    all forwards run before any backward, so that activations of all microbatches are kept
    """

    name: str
    torch_name: str
    virtual: int | None
    shape: str
    splits_backward: bool = False
    forwards_first: bool = False

    def place(self, stage: int, places: int) -> int:
        """The place of `stage` on a pipeline axis of `places`."""
        if self.shape == "v":
            return stage if stage < places else 2 * places - 1 - stage
        return stage % places


_TABLE = (
    Schedule("naive", "ScheduleGPipe", 1, "loop", forwards_first=True),
    Schedule("gpipe", "ScheduleGPipe", 1, "loop", forwards_first=True),
    Schedule("1f1b", "Schedule1F1B", 1, "loop"),
    Schedule("interleaved_1f1b", "ScheduleInterleaved1F1B", None, "loop"),
    Schedule("looped_bfs", "ScheduleLoopedBFS", None, "loop", forwards_first=True),
    Schedule("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", None, "loop", splits_backward=True),
    Schedule("zbv_zero_bubble", "ScheduleZBVZeroBubble", 2, "v", splits_backward=True),
    Schedule("dualpipev", "ScheduleDualPipeV", 2, "v", splits_backward=True),
)

SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _TABLE}
