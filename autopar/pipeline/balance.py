"""Where to cut: stages of contiguous pieces, the slowest as fast as can be, each within its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import InfeasibleError

STEPS = 40  # of the bisection: the slowest stage is known to a part in 10^12


@dataclass(frozen=True, slots=True)
class Cost:
    """What one piece (see pipeline.units) costs on a place: seconds of a microbatch (of them `forward_s` in its forward), seconds once per
    step, bytes that a microbatch keeps, bytes that rest, and bytes that are there only while it runs."""

    micro_s: float = 0.0
    once_s: float = 0.0
    kept_bytes: float = 0.0
    rest_bytes: float = 0.0
    live_bytes: float = 0.0
    forward_s: float = 0.0


def memory_bytes(costs: Sequence[Cost], in_flight: int) -> float:
    """Bytes of a stage of these pieces that keeps `in_flight` microbatches."""
    return sum(c.rest_bytes + in_flight * c.kept_bytes for c in costs) + max((c.live_bytes for c in costs), default=0.0)


def balance(costs: Sequence[Cost], in_flight: Sequence[int], limit_bytes: float) -> list[int]:
    """The positions at which stages 1, 2, ... begin; `in_flight` has one entry per stage.

    The least time of the slowest stage, by bisection: for a given time, each stage takes as many pieces as it may. Raises
    InfeasibleError with the bytes that are missing where memory allows no cut.
    """
    slowest, fastest = sum(c.micro_s for c in costs), max(c.micro_s for c in costs)
    best = _fill(costs, in_flight, limit_bytes, slowest)
    if best is None:
        whole = memory_bytes(costs, max(in_flight)) / len(in_flight)
        raise InfeasibleError(f"no cut into {len(in_flight)} stages fits: they need about {whole / 2**30:.2f} GiB each, "
                              f"{limit_bytes / 2**30:.2f} GiB are there", missing_bytes=max(0.0, whole - limit_bytes))
    for _ in range(STEPS):
        middle = (slowest + fastest) / 2
        found = _fill(costs, in_flight, limit_bytes, middle)
        if found is None:
            fastest = middle
        else:
            best, slowest = found, middle
    return best


def _fill(costs: Sequence[Cost], in_flight: Sequence[int], limit_bytes: float, limit_s: float) -> list[int] | None:
    """The cuts when each stage takes as many pieces as time and memory allow; None where pieces are left."""
    bounds, at = [], 0
    for stage, flying in enumerate(in_flight):
        behind = len(in_flight) - 1 - stage
        seconds, held, live, first = 0.0, 0.0, 0.0, at
        while at < len(costs) - behind:
            cost = costs[at]
            seconds, held, live = seconds + cost.micro_s, held + cost.rest_bytes + flying * cost.kept_bytes, max(live, cost.live_bytes)
            if held + live > limit_bytes or (seconds > limit_s * (1 + 1e-12) and at > first):
                break
            at += 1
        if at == first:
            return None
        bounds.append(at)
    return bounds[:-1] if at == len(costs) else None
