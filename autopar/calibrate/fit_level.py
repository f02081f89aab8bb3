"""From the times of collectives to the protocols of one level of a cluster.

    seconds = start_s + bytes x share / (bandwidth x efficiency) + what bytes above `spill_bytes` cost more

for each collective and each number of members by itself: what more members take is measured, not derived. The level's
bandwidth is the best rate of all, and the efficiencies are shares of it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from autopar.calibrate.fits import Fit, Fits, Impossible
from autopar.calibrate.nonnegative_fit import fit
from autopar.calibrate.samples import Sample
from autopar.cluster import Device, Level, Protocol
from autopar.cluster.types import ALGORITHMS, COLLECTIVES

LEAST_SAMPLES = 3
"""A curve is fitted to so many samples at least."""
SPILL_GAIN = 0.7
"""A knee is taken where the error with it is at most this share of the error without, the worst sample of each left
out."""

ABOVE = 2
"""Sizes that a knee has above it at least: the slope behind one with a single size is whatever that one sample says."""


LEAST_START_S = 1e-6
"""No collective starts in less: where small messages were disturbed and left out, or took no longer than by their
bytes, a fit ends at 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """A fitted collective: seconds at no bytes, per byte, and per byte above `spill_bytes`."""

    kind: str
    members: int
    start_s: float
    slope_s: float
    spill_bytes: float
    more_s: float
    samples: int
    error: float

    @property
    def rate(self) -> float:
        """Bytes per second over each rank's link."""
        return share(self.kind, self.members) / self.slope_s

    def errors(self, samples: Sequence[Sample]) -> list[float]:
        """The relative error of each of `samples`."""
        return [
            abs(
                (self.start_s + nbytes * self.slope_s + max(0.0, nbytes - self.spill_bytes) * self.more_s) / s.seconds
                - 1
            )
            for s in samples
            for nbytes in s.size
        ]

    def usual_error(self, samples: Sequence[Sample]) -> float:
        """The mean relative error over all `samples` but the worst: one that was disturbed says nothing for a curve, or
        against it."""
        errors = self.errors(samples)
        return (sum(errors) - max(errors)) / max(1, len(errors) - 1)


def limit_bytes_s(device: Device, level: Level) -> float:
    """The most bytes per second that a link of `level` can carry: on GPUs what the level says; between ranks of CPUs
    what one reads and writes at best."""
    if device.kind != "cpu":
        return level.bandwidth_bytes_s
    return max(device.memory_bandwidth_bytes_s * device.achievable_bandwidth, device.cache_bandwidth_bytes_s)


def share(kind: str, members: int) -> float:
    """The part of a collective's bytes that goes over each rank's link (`cost.comm`)."""
    ring = (members - 1) / members
    return {"all_reduce": 2 * ring, "all_gather": ring, "reduce_scatter": ring, "all_to_all": ring / members}.get(
        kind, 1.0
    )


def level(base: Level, samples: Sequence[Sample], most_bytes_s: float, source: str) -> tuple[Level, Fits]:
    """`base` with protocols of its own for each collective and number of members in `samples`.

    `most_bytes_s` is the most that a link can carry; `source` is the begin of each protocol's source. What cannot be
    fitted keeps the protocols of `base`.
    """
    fits, curves = Fits(), list[Curve]()
    for kind, members in dict.fromkeys((s.what, s.members) for s in samples):
        mine = [s for s in samples if (s.what, s.members) == (kind, members)]
        kept = fits.sensible(mine, lambda s: share(s.what, s.members) * s.size[0] / s.seconds, most_bytes_s, "bytes/s")
        curve = _curve(kind, members, kept, share(kind, members) / most_bytes_s) if len(kept) >= LEAST_SAMPLES else None
        name = f"{base.name}.{kind} on {members}"
        if curve is not None and curve.start_s < LEAST_START_S:
            wanted = f"wanted {LEAST_START_S:g} at least: no message is there in no time"
            fits.impossible.append(Impossible(f"{name}, start_s", curve.start_s, wanted))
            curve = dataclasses.replace(curve, start_s=min(p.start_s + p.hop_s for p in base.serving(kind, members)))
        if (
            curve is not None
            and fits.possible(name, curve.start_s, key="start_s")
            and fits.possible(f"{name}, rate", curve.rate, key="bandwidth_bytes_s")
        ):
            # of what is written, which may start later or carry less than the best fit
            curve = dataclasses.replace(curve, error=statistics.fmean(curve.errors(kept)))
            curves.append(curve)
            fits.add(Fit(name, curve.start_s, curve.samples, curve.error, "start in seconds"))
    return (_fitted(base, curves, source) if curves else base), fits


def _fitted(base: Level, curves: Sequence[Curve], source: str) -> Level:
    """`base` with a protocol for each of `curves`; other collectives keep theirs, at the rates that they had."""
    fitted = {(c.kind, c.members) for c in curves}
    groups = tuple(n for n in range(2, base.size + 1) if base.size % n == 0)
    rest = [
        (p, kind, n, base.pair_bandwidth_bytes_s(n) * p.efficiency)
        for kind in COLLECTIVES
        for n in groups
        if (kind, n) not in fitted
        for p in base.serving(kind, n)
    ]
    bandwidth = max([curve.rate for curve in curves] + [rate for *_, rate in rest])
    protocols = (
        *(_protocol(c, bandwidth, source) for c in curves),
        *(_kept(p, kind, n, rate / bandwidth) for p, kind, n, rate in rest),
    )
    return dataclasses.replace(
        base,
        bandwidth_bytes_s=bandwidth,
        topology="switch",
        protocols=protocols,
        source=f"{source}; the best of all collectives",
    )


def _curve(kind: str, members: int, samples: Sequence[Sample], least_s: float) -> Curve | None:
    """The curve through `samples`, of at least `least_s` per byte."""
    seconds, sizes = [s.seconds for s in samples], sorted({s.size[0] for s in samples})
    plain: Curve | None = None
    bent: list[Curve] = []
    for knee in (0, *sizes[1:-ABOVE]):
        rows = [(1.0, s.size[0], *((max(0, s.size[0] - knee),) if knee else ())) for s in samples]
        (start, slope, *more), error = fit(rows, seconds)
        if slope + sum(more) > 0:
            more_s = max(0.0, slope + sum(more) - max(slope, least_s))
            found = Curve(kind, members, start, max(slope, least_s), float(knee), more_s, len(samples), error)
            plain, bent = (found, bent) if not knee else (plain, [*bent, found])
    best = min(bent, key=lambda curve: curve.error, default=None)
    if (
        best is not None
        and best.more_s > 0
        and (plain is None or best.usual_error(samples) < SPILL_GAIN * plain.usual_error(samples))
    ):
        return best
    return plain


def _protocol(curve: Curve, bandwidth: float, source: str) -> Protocol:
    algorithm = "direct" if curve.kind in ALGORITHMS["direct"] else "ring"
    quality = f"{source}; {curve.samples} sizes, mean error {100 * curve.error:.1f} %"
    spills = (
        {"spill_bytes": curve.spill_bytes, "spill": min(1000.0, 1 + curve.more_s / curve.slope_s)}
        if curve.more_s
        else {}
    )
    return Protocol(
        f"{curve.kind}_{curve.members}",
        algorithm,
        curve.start_s,
        0.0,
        max(1e-3, curve.rate / bandwidth),
        quality,
        (curve.kind,),
        curve.members,
        **spills,
    )


def _kept(protocol: Protocol, kind: str, members: int, efficiency: float) -> Protocol:
    """What `protocol` says of one collective, on a level where its rate is `efficiency` of the bandwidth."""
    return dataclasses.replace(
        protocol,
        name=f"{protocol.name}_{kind}_{members}",
        kinds=(kind,),
        members=members,
        efficiency=max(1e-3, efficiency),
    )
