"""Seconds of collectives on one mesh axis, and of the steps of a reshard.

A collective over an axis is run by one of several *ways*: an algorithm with one protocol on each level that the axis
spans.

    seconds(way) = max of starts + sum over levels of hops x hop_s + max over levels of moved bytes / (bandwidth x
    efficiency)
                   + what bytes above `spill_bytes` cost more, on the level where that is most

Levels are pipelined chunk by chunk, as NCCL does it, so the slowest level sets the rate and the hops of all levels add
up. The library picks the fastest way for each size (NCCL's own model, src/graph/tuning.cc), so a price is the minimum
over the ways: slow small messages come from the protocols, not from a fudge factor. Ways, with N devices on the axis:

    ring     all-reduce 2 (N-1) hops and 2 (N-1)/N of the bytes, the others half of that; an outer level carries the
             same bytes divided by the members inside each of its parts, because each of them brings its own link
    tree     double binary tree on the levels that have one, a chain inside; all-reduce 2 hops per tree level, 2x the
             bytes
    switch   the switch adds (NVLink SHARP): each device sends the tensor once; within one level only
    direct   all-to-all and sends: each pair talks directly

Groups that run side by side on other coordinates do not compete, because bandwidths are per device
(cluster.types.Level).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from autopar.buckets import PACKED
from autopar.cluster import Mesh, MeshAxis, Protocol, Span
from autopar.cluster.types import COLLECTIVES, Device
from autopar.errors import ClusterError
from autopar.layout import LOCAL, Step, fraction, in_order, is_placed, is_shard


@dataclass(frozen=True)
class Part:
    """What one level does in one way: `hops` in a row, and `share` of the bytes over each device's link."""

    span: Span
    protocol: Protocol
    hops: int
    share: float

    @property
    def slope_s(self) -> float:
        """Seconds per byte of the collective."""
        return self.share / (self.span.bandwidth_bytes_s * self.protocol.efficiency)


Way = tuple[Part, ...]


def collective_s(kind: str, nbytes: float, axis: MeshAxis) -> float:
    """Seconds of one collective. `nbytes` is what one group of the axis holds together, before or after:

        all_reduce, broadcast   the tensor, which each rank has whole
        all_gather              the gathered output
        reduce_scatter          the input, which each rank has whole
        all_to_all              the whole exchanged tensor: N x the local one; each rank sends (N-1)/N^2 of it
        send                    the tensor that goes to the neighbour on the axis
        mask                    the local tensor, read and written
        slice                   what stays on the rank, copied, so that the whole can go; nothing for O<c>, which takes
                                or leaves all

    0 on an axis of one device. Raises ClusterError on an unknown kind.
    """
    if axis.size == 1:
        return 0.0
    if kind in LOCAL:
        return copy_s(nbytes, axis.device)
    return min(line.seconds(nbytes) for line in affine(kind, axis))


def sent_once(axis: MeshAxis, reached: Callable[[int], float]) -> MeshAxis:
    """The axis for all-to-alls in which a row may be for several ranks, and is sent once to each part of a level and
    forwarded inside of it (as DeepEP does: https://github.com/deepseek-ai/DeepEP).

    `reached(n)`: of n equal parts of the axis, how many a row is for on average. A level between n parts carries
    reached(n) / reached(ranks) of the bytes, which is expressed by a higher bandwidth.
    """
    parts = itertools.accumulate((span.size for span in axis.spans[:-1]), operator.mul)
    faster = [
        replace(
            span,
            level=replace(
                span.level, bandwidth_bytes_s=span.level.bandwidth_bytes_s * reached(axis.size) / reached(count)
            ),
        )
        for span, count in zip(axis.spans, parts, strict=False)
    ]
    return replace(axis, spans=(*faster, axis.spans[-1]))


def link_shares(kind: str, nbytes: float, axis: MeshAxis) -> dict[str, float]:
    """By level of the cluster, the share of its link that a collective takes while it runs: all of the slowest level's,
    less where starts and hops are most of its seconds; none on an axis of one device."""
    if axis.size == 1:
        return {}
    way, line = min(_priced_ways(kind, axis), key=lambda priced: priced[1].seconds(nbytes))
    whole_s = line.seconds(nbytes)
    return {part.span.level.name: min(1.0, part.slope_s * nbytes / whole_s) if whole_s > 0 else 0.0 for part in way}


@lru_cache(maxsize=4096)
def _priced_ways(kind: str, axis: MeshAxis) -> tuple[tuple[Way, Line], ...]:
    """The ways that may be the fastest for some size, each with its price."""
    return tuple((way, way_line(way)) for way in fastest_ways(kind, axis))


def copy_s(nbytes: float, device: Device) -> float:
    """Seconds to read and write `nbytes` once on the device."""
    return device.launch_s + device.memory_s(2 * nbytes)


def steps_s(steps: Sequence[Step], full_bytes: float, mesh: Mesh) -> float:
    """Seconds of a reshard; `full_bytes` is the size of the global tensor. Collectives do not overlap each other."""
    return sum(step_s(step, full_bytes, mesh) for step in steps)


def step_s(step: Step, full_bytes: float, mesh: Mesh) -> float:
    """Seconds of one step of a tensor that travels by itself, with the local copies around its collective
    (`copies_s`)."""
    nbytes = group_bytes(step, full_bytes, mesh.sizes)
    return collective_s(step.kind, nbytes, mesh.axes[step.axis]) + copies_s(step, full_bytes, mesh)


def group_bytes(step: Step, full_bytes: float, sizes: tuple[int, ...]) -> float:
    """The `nbytes` of `collective_s` for a step on a tensor of `full_bytes` in all."""
    if step.kind == "all_gather":
        return full_bytes * fraction(step.after, sizes)
    if step.kind == "slice":
        return 0.0 if is_placed(step.after[step.axis]) else full_bytes * fraction(step.after, sizes)
    times = sizes[step.axis] if step.kind == "all_to_all" else 1
    return full_bytes * fraction(step.before, sizes) * times


def copies_s(step: Step, full_bytes: float, mesh: Mesh) -> float:
    """Seconds of the local copies that put the chunks of a collective in order (runtime.moves): collectives cut and
    join along dim 0; any other dim, or sections, takes a copy before (`after`) or after (`before`)."""
    if mesh.sizes[step.axis] == 1 or step.kind not in ("all_gather", "reduce_scatter", "all_to_all"):
        return 0.0
    copies = _reordered(step)
    return copies * copy_s(_copied_bytes(step, full_bytes, mesh), mesh.device) if copies else 0.0


def bucket_copies_s(step: Step, full_bytes: float, mesh: Mesh, share: float | None) -> float:
    """As `copies_s`, with those that put a tensor into a bucket and take it out (runtime.coalesced). `share`: that of
    the bytes of its flat buffer; None: it has collectives of its own.

    What is summed is a copy, since autograd may still need the gradient itself. One kernel copies all tensors into a
    flat buffer; what has to be reordered for a reduce-scatter is copied before, one tensor at a time. What comes out of
    an all-gather there lies in pieces, which one copy of each tensor joins.
    """
    if mesh.sizes[step.axis] == 1 or step.kind not in PACKED or (share is None and step.kind != "all_reduce"):
        return copies_s(step, full_bytes, mesh)
    sent_bytes = full_bytes * fraction(step.before, mesh.sizes)
    packing_s = (1.0 if share is None else share) * mesh.device.launch_s + mesh.device.memory_s(2 * sent_bytes)
    if step.kind == "all_gather":
        return packing_s + copy_s(_copied_bytes(step, full_bytes, mesh), mesh.device)
    return packing_s + copies_s(step, full_bytes, mesh)


def _copied_bytes(step: Step, full_bytes: float, mesh: Mesh) -> float:
    """Bytes of the larger of what a step reads and writes on a rank."""
    return full_bytes * fraction(step.after if step.kind == "all_gather" else step.before, mesh.sizes)


def _reordered(step: Step) -> int:
    """How many of the two ends of a step cut or join along another dim than 0, or in sections."""
    return sum(is_shard(entry) and not in_order(entry) for entry in (step.before[step.axis], step.after[step.axis]))


class Line(NamedTuple):
    """The price of one way as data: `start_s`, seconds per byte, and `more_s` per byte above `spill_bytes`."""

    start_s: float
    slope_s: float
    spill_bytes: float = 0.0
    more_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Seconds of a collective of `nbytes`."""
        return self.start_s + self.slope_s * nbytes + self.more_s * max(0.0, nbytes - self.spill_bytes)


@lru_cache(maxsize=4096)
def affine(kind: str, axis: MeshAxis) -> tuple[Line, ...]:
    """The price as data, of each way that is ever the fastest, smallest start first."""
    return tuple(way_line(way) for way in fastest_ways(kind, axis))


def way_line(way: Way) -> Line:
    """The price of a way as data."""
    more_s, spill_bytes = max((part.slope_s * (part.protocol.spill - 1), part.protocol.spill_bytes) for part in way)
    return Line(way_start_s(way), way_slope_s(way), spill_bytes, more_s)


def fastest_ways(kind: str, axis: MeshAxis) -> tuple[Way, ...]:
    """The ways that no other way beats at every size, smallest start first; those whose bytes may spill are all
    kept."""
    kept: list[Way] = []
    for way in sorted(ways(kind, axis), key=lambda way: (way_start_s(way), way_slope_s(way))):
        spills = any(part.protocol.spill > 1 for each in (way, *kept[-1:]) for part in each)
        if not kept or spills or way_slope_s(way) < way_slope_s(kept[-1]):
            kept.append(way)
    return tuple(kept)


def way_slope_s(way: Way) -> float:
    """Seconds per byte of a way."""
    return max(part.slope_s for part in way)


def way_start_s(way: Way) -> float:
    """Seconds of a way at zero bytes."""
    return max(part.protocol.start_s for part in way) + sum(part.hops * part.protocol.hop_s for part in way)


def ways(kind: str, axis: MeshAxis) -> tuple[Way, ...]:
    """Every way to run `kind` on an axis of two or more devices. Raises ClusterError on an unknown kind."""
    if kind not in COLLECTIVES:
        raise ClusterError(
            f"mesh axis {axis.name!r}: there is no collective {kind!r}; known: {', '.join(COLLECTIVES + LOCAL)}"
        )
    return tuple(itertools.chain.from_iterable(way(kind, axis.spans) for way in (_rings, _trees, _switches, _directs)))


def _product(kind: str, spans: Sequence[Span], rows: Sequence[tuple[str, int, float]]) -> list[Way]:
    """All ways whose part on each span uses that row's algorithm; none where a level does not have it."""
    options = [
        [Part(span, p, hops, share) for p in span.level.serving(kind, span.size) if p.algorithm == algorithm]
        for span, (algorithm, hops, share) in zip(spans, rows, strict=True)
    ]
    return list(itertools.product(*options))


def _inside(spans: Sequence[Span]) -> list[int]:
    """For each span, how many devices of the axis lie inside one of its parts."""
    return [math.prod(span.size for span in spans[index + 1 :]) for index in range(len(spans))]


def _rings(kind: str, spans: tuple[Span, ...]) -> list[Way]:
    """The ways by rings on all levels."""
    total, outside = math.prod(span.size for span in spans), 1
    rounds = 2 if kind == "all_reduce" else 1
    bytes_share = 1.0 if kind == "broadcast" else rounds * (total - 1) / total
    rows = []
    for span, inside in zip(spans, _inside(spans), strict=True):
        rows.append(("ring", rounds * outside * (span.size - 1), bytes_share / inside))
        outside *= span.size
    return _product(kind, spans, rows)


def _trees(kind: str, spans: tuple[Span, ...]) -> list[Way]:
    """The ways by double binary trees."""
    if kind not in ("all_reduce", "broadcast"):
        return []
    rounds = 2 if kind == "all_reduce" else 1
    rows = []
    for span, inside in zip(spans, _inside(spans), strict=True):
        tree = any(p.algorithm == "tree" for p in span.level.serving(kind, span.size))
        depth = math.ceil(math.log2(span.size)) if tree else span.size - 1
        rows.append(("tree" if tree else "ring", rounds * depth, float(rounds) / inside))
    return _product(kind, spans, rows) if any(row[0] == "tree" for row in rows) else []


def _switches(kind: str, spans: tuple[Span, ...]) -> list[Way]:
    """The ways by reduction in the switch."""
    return _product(kind, spans, [("switch", 1, 1.0)]) if kind == "all_reduce" and len(spans) == 1 else []


def _directs(kind: str, spans: tuple[Span, ...]) -> list[Way]:
    """The ways in which each pair of devices talks directly."""
    if kind == "send":
        return _product(kind, spans[:1], [("direct", 1, 1.0)])
    if kind != "all_to_all":
        return []
    total = math.prod(span.size for span in spans)
    peers = [inside * (span.size - 1) for span, inside in zip(spans, _inside(spans), strict=True)]
    return _product(kind, spans, [("direct", count, count / total**2) for count in peers])
