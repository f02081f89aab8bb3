"""The communication of a plan: every reshard with its reason, bytes and price, and what it costs per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.buckets import BUCKET_BYTES
from autopar.cluster import Cluster
from autopar.codegen.context import Context
from autopar.codegen.edges import Reshard
from autopar.codegen.tally import Tally
from autopar.layout import fraction
from autopar.plan import Plan
from autopar.problem.graph import Op, Program
from autopar.problem.prices import Prices
from autopar.problem.settings import Settings

ROLES = {
    "edge": "",
    "feed": "into the first block",
    "carry": "from block to block",
    "sync": "once per step, in buckets",
}

Buckets = tuple[float, ...]  # bytes on a rank that travel together, forward and backward; none: alone


@dataclass(frozen=True, slots=True)
class Row:
    """One reshard. `count` is how often it runs in a step, on all places together; `step_s` is forward and backward,
    all times that it runs and runs again, with nothing hidden; `reason` holds the collectives with bytes and the price
    of one run."""

    scope: str
    tensor: str
    src: str
    dst: str
    role: str
    count: int
    step_s: float
    reason: str
    readers: tuple[str, ...]
    where: str


def prices_of(plan: Plan, place: int = 0) -> Prices:
    """The prices that `plan` was made with, on one of its places."""
    places = Cluster.from_dict(dict(plan.cluster)).places(plan.places, plan.mesh)
    return Prices(places.mesh(place), places.device(place), Settings.of(plan))


def reshards(program: Program, plan: Plan) -> list[Row]:
    """All reshards of a plan, in the order of the graph; changes that cost nothing (slices) have step_s 0."""
    context, kinds = (
        Context(program, plan, {}),
        Cluster.from_dict(dict(plan.cluster)).places(plan.places, plan.mesh).kinds,
    )
    prices, tallies = (
        [prices_of(plan, place) for place in kinds],
        [Tally(program, plan, place) for place in range(plan.places)],
    )
    found, together = (
        [(reshard, _keys(reshard, context.sizes)) for reshard in context.edges.reshards],
        dict[object, float](),
    )
    for reshard, keys in found:
        for key, wider in zip(keys, (1.0, _wider(reshard, context, prices[0])), strict=False):
            together[key] = (
                together.get(key, 0.0)
                + wider * program.bytes_of(reshard.ref) * fraction(reshard.dst.value, context.sizes) * reshard.count
            )
    return [
        _row(
            reshard,
            context,
            prices,
            tallies,
            tuple(
                [
                    min(full, together[key])
                    for full, key in zip((program.bucket_bytes, BUCKET_BYTES), keys, strict=False)
                ]
            ),
        )
        for reshard, keys in found
    ]


def _wider(reshard: Reshard, context: Context, prices: Prices) -> float:
    """Bytes of the gradient of what is resharded per byte of that: those of parameters are summed in the dtype in which
    these rest."""
    return prices.gradient_bytes(context.program.ops[reshard.ref[0]], 1.0) if reshard.role == "sync" else 1.0


def _keys(reshard: Reshard, sizes: tuple[int, ...]) -> Sequence[object]:
    """What parameters have in common that go in the same buckets once per step: leaves that rest alike (the model's own
    and the blocks' apart), and gradients with the same collectives; nothing for what is no such way."""
    if reshard.role != "sync":
        return ()
    return ("leaves", bool(reshard.scope), reshard.src, reshard.dst), (
        "gradients",
        reshard.each,
        *((step.kind, step.axis) for step in reshard.backward(sizes)),
    )


def _row(
    reshard: Reshard, context: Context, prices: Sequence[Prices], tallies: Sequence[Tally], buckets: Buckets
) -> Row:
    producer, count, step_s = context.program.ops[reshard.ref[0]], 0, 0.0
    readers = [context.program.ops[name] for name in reshard.readers]
    for each, runs, first, parts in (run for tally in tallies for run in tally.reshards([reshard])):
        size = tallies[0].bytes_of(reshard.ref, parts)
        step_s += (runs - first) * _once_s(each, size, context, prices, buckets) + (
            first * _once_s(each.in_first, size, context, prices, buckets) if first else 0.0
        )
        # the way back of gradients after every microbatch is no run of its own
        count += runs if each.src.value == reshard.src.value else 0
    return Row(
        reshard.scope,
        label(producer),
        str(reshard.src),
        str(reshard.dst),
        reshard.role,
        count,
        step_s,
        context.reason(reshard),
        tuple(label(op) for op in readers),
        next((op.where for op in (*readers, producer) if op.where), ""),
    )


def _once_s(reshard: Reshard, size_bytes: float, context: Context, prices: Sequence[Prices], buckets: Buckets) -> float:
    """Seconds of one run on a value of so many bytes, forward and backward, on the slowest of the places that `prices`
    are of; where its block is run again, forward twice."""
    twice = [reshard, reshard.onward] if reshard.replay == "again" else [reshard]
    return max(
        sum(seconds(each, size_bytes, one, context.sizes, buckets, _wider(each, context, one)) for each in twice)
        for one in prices
    )


def seconds(
    reshard: Reshard,
    size_bytes: float,
    prices: Prices,
    sizes: tuple[int, ...],
    buckets: Buckets = (),
    wider: float = 1.0,
) -> float:
    """Seconds of one run of a reshard of a tensor of `size_bytes`, forward and backward, with nothing hidden; of what
    goes in `buckets` its share, where the gradient has `wider` bytes per byte of the tensor."""
    src, dst = reshard.src, reshard.dst
    if any(buckets):
        ways = [
            (src.value, dst.value, 1.0, buckets[0]),
            *([(dst.back, src.back, wider, buckets[1])] if reshard.gradient else []),
        ]
        return sum(
            load.seconds
            for here, there, times, bytes_ in ways
            for load in prices.routes.loads(here, there, times * size_bytes, bytes_)
        )
    return float(prices.table_s([src], [dst], size_bytes, [reshard.regathers(sizes)])[0, 0])


def label(op: Op) -> str:
    """The short name of an Op: a parameter's own name, otherwise the node's name without its block."""
    return op.fqn if op.role == "param" else op.name.rsplit("/", 1)[-1]
