"""What a simulation found: plain data, seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran: on which stream of a place, from when to when (seconds from the start of the step), and what
    it was: `kind` is compute, copy, inside, the kind of a collective, or action."""

    stream: str
    name: str
    kind: str
    begin_s: float
    end_s: float
    nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a place; all its ranks have the same role.

    `compute_s`, `exposed_s` (communication with nothing beside it), `idle_s` (waiting for other places) and
    `optimizer_s` add up to the step. `hidden_s` is communication beside compute. `memory` holds (seconds, bytes)
    whenever the bytes change, `launches` is how many operators and copies are started.
    """

    place: int
    stages: tuple[int, ...]
    compute_s: float
    exposed_s: float
    hidden_s: float
    idle_s: float
    optimizer_s: float
    memory: tuple[tuple[float, float], ...] = ()
    launches: int = 0
    show: Callable[[], list[Span]] = field(default=list, repr=False, compare=False)

    @property
    def spans(self) -> list[Span]:
        """What ran when; made when it is asked for."""
        return self.show()

    @property
    def peak_bytes(self) -> float:
        """The most that is held at once."""
        return max((nbytes for _, nbytes in self.memory), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only, without spans."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "show"}
        return {**own, "peak_bytes": self.peak_bytes}


@dataclass(frozen=True, slots=True)
class Simulation:
    """One training step (or forward). `mfu` is the model's FLOPs over the peak of all devices in the plan's precision,
    recomputation not counted; `tokens_s` are tokens (samples, where the model has no sequence) per second and device;
    `launch_s` is a launch floor for each of the `launches` of the busiest place, a part of its compute (some operators
    are several kernels: at least); `predicted_s` what the search predicted."""

    model: str
    cluster: str
    ranks: int
    schedule: str
    microbatches: int
    step_s: float
    predicted_s: float
    mfu: float
    tokens_s: float
    tokens: str
    launch_s: float
    places: tuple[Place, ...]

    @property
    def bubble(self) -> float:
        """The share of the step that places wait for each other, on average."""
        return sum(p.idle_s for p in self.places) / (len(self.places) * self.step_s) if self.step_s else 0.0

    @property
    def exposed(self) -> float:
        """The share of the step that places communicate and do nothing else, on average."""
        return sum(p.exposed_s for p in self.places) / (len(self.places) * self.step_s) if self.step_s else 0.0

    @property
    def peak_bytes(self) -> float:
        """The most that a rank of any place holds at once."""
        return max(place.peak_bytes for place in self.places)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only, spans left out: they are in the trace."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "places"}
        return {
            **own,
            "bubble": self.bubble,
            "exposed": self.exposed,
            "peak_bytes": self.peak_bytes,
            "places": [place.to_dict() for place in self.places],
        }

    def save_trace(self, path: str) -> None:
        """Write the step as a trace that Perfetto and chrome://tracing open. Raises OSError where `path` cannot be
        written."""
        from autopar.simulate.trace import write_trace

        write_trace(self, path)
