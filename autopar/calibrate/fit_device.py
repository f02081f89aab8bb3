"""From the times of one rank to the constants of its device.

matmul      seconds = c + flops / (peak x shape_factor)             a CPU's peak by dtype, its tile; a GPU's share
            of its known peak
memory      seconds = c + cached / cache bandwidth + rest / bandwidth
arithmetic  seconds = c + flops / vector_flops
optimizer   seconds = update_s + bytes of one pass / (bandwidth x update)
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from autopar.calibrate.background import ALONE, BEHIND, OVER
from autopar.calibrate.fits import Fit, Fits
from autopar.calibrate.nonnegative_fit import fit
from autopar.calibrate.samples import Sample
from autopar.cluster import Device
from autopar.cost.compute import RAMP, best_factor, narrow_share, shape_factor
from passes.annotate_flops import ATTENTION_BACKWARD

TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tile sizes of a CPU that are tried (Device.tile)."""
CORE_FLOPS = {"float64": 200e9, "float32": 400e9}
"""The most FLOP/s that one thread can do: two 512-bit multiply-adds per cycle at 6 GHz. Others: MATRIX_FLOPS."""

MATRIX_FLOPS = 12e12
"""The same of matrix instructions: 2048 per cycle."""

CORE_BYTES_S = 1e12
"""The most bytes per second that one thread can read and write: three 512-bit moves per cycle at 5 GHz, from its first
cache."""

NOTHING_HIDES = 0.95
"""Contention from which on nothing is gained by what runs in the background."""

ONE_PASS = 7 * 4
"""Bytes per element of one pass of AdamW in float32: reads weight, gradient and two states, writes all but the gradient
(`Prices.update_s`)."""


def device(base: Device, samples: Sequence[Sample], ranks: int = 1) -> tuple[Device, Fits]:
    """`base` with what `samples` of `ranks` ranks say; what they do not say stays. The fits say how well each constant
    explains its samples."""
    fits = Fits()
    made = base
    for step in (_launch, _memory, _matmuls, _arithmetic, _attention, _update, _actions, _contention):
        made = dataclasses.replace(made, **step(made, samples, fits))
    made = dataclasses.replace(made, **_alone(made, samples, fits, ranks))
    return made, fits


def _of(samples: Sequence[Sample], *what: str) -> list[Sample]:
    return [sample for sample in samples if sample.what in what]


def _launch(base: Device, samples: Sequence[Sample], fits: Fits) -> dict[str, Any]:
    found = fits.sensible(_of(samples, "launch"), lambda s: 1 / s.seconds, 1e8, "operators/s")
    if not found:
        return {}
    # a GPU waits for its host there
    value, name = statistics.median(s.seconds for s in found), "launch_s" if base.kind == "cpu" else "dispatch_s"
    if not fits.possible(name, value):
        return {}
    fits.add(
        Fit(name, value, len(found), 0.0, "operators with next to nothing to do, forward and backward by autograd")
    )
    return {name: value}


def _memory(base: Device, samples: Sequence[Sample], fits: Fits) -> dict[str, Any]:
    limit = CORE_BYTES_S if base.kind == "cpu" else base.memory_bandwidth_bytes_s
    found = fits.sensible(_of(samples, "copy", "add"), lambda s: s.size[0] / s.seconds, limit, "bytes/s")
    if len(found) < 3:
        return {}
    seconds, sizes = [s.seconds for s in found], sorted({s.size[0] for s in found})
    tries = []
    for cache in (0, *(sizes[1:-2] if base.kind == "cpu" else ())):
        rows = [(1.0, *((min(s.size[0], cache),) if cache else ()), max(0, s.size[0] - cache)) for s in found]
        (_, *per_byte), error = fit(rows, seconds)
        if all(per_byte) and per_byte == sorted(per_byte):
            tries.append((error, cache, [1 / each for each in per_byte]))
    if not tries:
        return {}
    error, cache, rates = min(tries)
    names = ("cache_bandwidth_bytes_s", "memory_bandwidth_bytes_s")[-len(rates) :]
    if not all(fits.possible(name, rate, limit) for name, rate in zip(names, rates, strict=True)):
        return {}
    fits.add(Fit("memory_bandwidth_bytes_s", rates[-1], len(found), error, "copies and sums of float32 tensors"))
    if base.kind == "cuda":
        return {"achievable_bandwidth": max(1e-3, min(1.0, rates[-1] / base.memory_bandwidth_bytes_s))}
    cached = {"cache_bytes": int(cache), "cache_bandwidth_bytes_s": rates[0] if cache else 0.0}
    return {"memory_bandwidth_bytes_s": rates[-1], "achievable_bandwidth": 1.0, **cached}


def _matmuls(base: Device, samples: Sequence[Sample], fits: Fits) -> dict[str, Any]:
    measured = {}
    for dtype in dict.fromkeys(
        s.what.split()[1]
        for s in samples
        if s.what.startswith("matmul ") and "beside" not in s.what and "alone" not in s.what
    ):
        limit = base.flops(dtype) if base.kind == "cuda" else _most_flops(dtype)
        found = fits.sensible(_of(samples, f"matmul {dtype}"), lambda s: _flops(s) / s.seconds, limit, "FLOP/s")
        if len(found) >= 3:
            measured[dtype] = found
    return _shares(base, measured, fits) if base.kind == "cuda" else _peaks(base, measured, fits)


def _most_flops(dtype: str) -> float:
    return CORE_FLOPS.get(dtype, MATRIX_FLOPS)


def _peaks(base: Device, measured: dict[str, list[Sample]], fits: Fits) -> dict[str, Any]:
    """Of a CPU: one tile, and the peak of each dtype."""
    if "float32" not in measured:
        return {}
    error, tile = min((_rate(measured["float32"], dataclasses.replace(base, tile=tile))[1], tile) for tile in TILES)
    made = dataclasses.replace(base, tile=tile)
    peaks = {}
    for dtype, found in measured.items():
        rate, error = _rate(found, made)
        if rate and fits.possible(f"peak_flops.{dtype}", rate, _most_flops(dtype)):
            peaks[dtype] = rate
            fits.add(Fit(f"peak_flops.{dtype}", rate, len(found), error, "linear layers without bias"))
    if "float32" not in peaks:  # the shapes of matmuls say nothing of others, either
        fits.found = [each for each in fits.found if each.name.partition(".")[0] != "peak_flops"]
        return {}
    return {"tile": tile, "peak_flops": {**peaks}, "achievable": 1.0, "achievable_of": {}, "best_shape": None}


def _rate(found: Sequence[Sample], base: Device) -> tuple[float, float]:
    """FLOP/s at the best shape, and the error."""
    rows = [(1.0, _flops(s) / _factor(s, base)) for s in found]
    (_, per_flop), error = fit(rows, [s.seconds for s in found])
    return (1 / per_flop if per_flop else 0.0), error


def _shares(base: Device, measured: dict[str, list[Sample]], fits: Fits) -> dict[str, Any]:
    """Of a GPU: the share of each dtype's peak that the best matmul reaches."""
    shares = {}
    for dtype, found in measured.items():
        rows = [(1.0, _flops(s) * best_factor(base) / (_factor(s, base) * base.flops(dtype))) for s in found]
        (_, slower), error = fit(rows, [s.seconds for s in found])
        if slower and fits.possible(f"achievable_of.{dtype}", min(1.0, 1 / slower)):
            shares[dtype] = min(1.0, 1 / slower)
            fits.add(Fit(f"achievable_of.{dtype}", shares[dtype], len(found), error, "linear layers without bias"))
    usual = shares.get("bfloat16", shares.get("float16", base.achievable))
    return {"achievable": usual, "achievable_of": {**base.achievable_of, **shares}, "sustained": 1.0} if shares else {}


def _factor(sample: Sample, base: Device) -> float:
    m, n, k = map(float, sample.size)
    return shape_factor(m, n, k, 1.0, base)


def _flops(sample: Sample) -> float:
    m, n, k = sample.size
    return 2.0 * m * n * k


def _arithmetic(base: Device, samples: Sequence[Sample], fits: Fits) -> dict[str, Any]:
    if base.kind != "cpu":  # bound by memory there
        return {}
    found = fits.sensible(
        _of(samples, "gelu", "softmax", "tanh", "layer_norm"),
        lambda s: s.size[0] / s.seconds,
        CORE_FLOPS["float32"],
        "FLOP/s",
    )
    if len(found) < 3:
        return {}
    (_, per_flop), error = fit([(1.0, s.size[0]) for s in found], [s.seconds for s in found])
    if not per_flop or not fits.possible("vector_flops", 1 / per_flop, CORE_FLOPS["float32"]):
        return {}
    fits.add(Fit("vector_flops", 1 / per_flop, len(found), error, "GELU, softmax, tanh and norms"))
    return {"vector_flops": 1 / per_flop}


def _attention(base: Device, samples: Sequence[Sample], fits: Fits) -> dict[str, Any]:
    """Shares of the peak, over what short sequences leave of them (`Prices`)."""
    dtype = "float32" if base.kind == "cpu" else "bfloat16"
    shares = []
    for way, factor in (("forward", 1.0), ("backward", float(ATTENTION_BACKWARD))):
        found = fits.sensible(
            _of(samples, f"attention {way}"), lambda s: s.size[0] * s.size[1] / s.seconds, 1e12, "tokens/s"
        )
        found = [s for s in found if s.seconds > base.launch_s]
        if not found:
            return {}
        each = []
        for sample in found:
            batch, tokens = sample.size
            flops = factor * 0.5 * 2 * batch * 8 * tokens * tokens * 128
            each.append(
                flops
                / (sample.seconds - base.launch_s)
                / base.flops(dtype)
                * (tokens + 2 * RAMP * base.tile)
                / tokens
                / narrow_share(base, 64)
            )
        share = min(1.0, statistics.median(each))
        shares.append(share)
        fits.add(
            Fit(
                f"attention {way}",
                share,
                len(each),
                statistics.median(abs(share / one - 1) for one in each),
                "causal, 8 heads of 64",
            )
        )
    return {"attention": tuple(shares)}


def _update(base: Device, samples: Sequence[Sample], fits: Fits) -> dict[str, Any]:
    found = fits.sensible(
        _of(samples, "update"),
        lambda s: s.size[0] * ONE_PASS / s.seconds,
        CORE_BYTES_S if base.kind == "cpu" else 1e14,
        "bytes/s",
    )
    if len(found) < 3:
        return {}
    (each_s, per_byte), error = fit([(1.0, s.size[0] * ONE_PASS) for s in found], [s.seconds for s in found])
    if not fits.possible("update_s", each_s):
        return {}
    bandwidth = base.memory_bandwidth_bytes_s * base.achievable_bandwidth
    share = min(1.0, max(1e-3, 1 / (per_byte * bandwidth))) if per_byte else 1.0
    fits.add(
        Fit("update_s", each_s, len(found), error, "torch.optim.AdamW on DTensors"),
        Fit("update", share, len(found), error, "the same"),
    )
    return {"update_s": each_s, "update": share}


def _actions(base: Device, samples: Sequence[Sample], fits: Fits) -> dict[str, Any]:
    """Every further microbatch is one action forward and one backward."""
    found = fits.sensible(_of(samples, "schedule"), lambda s: s.size[0] / s.seconds, 1e7, "microbatches/s")
    if len(found) < 2:
        return {}
    (_, each_s), error = fit([(1.0, s.size[0]) for s in found], [s.seconds for s in found])
    if not fits.possible("action_s", each_s / 2):
        return {}
    fits.add(Fit("action_s", each_s / 2, len(found), error, "torch's GPipe with next to nothing in each stage"))
    return {"action_s": each_s / 2}


def _contention(base: Device, samples: Sequence[Sample], fits: Fits) -> dict[str, Any]:
    """What a collective in the background adds to compute, over what it takes by itself. One that adds nearly as much
    hides nothing."""
    known = [s for s in samples if s.what.startswith((ALONE, OVER, BEHIND))]
    found = fits.sensible(known, lambda s: 1 / s.seconds, 1e8, "runs/s")
    by_case = [[s for s in found if s.what.startswith(what)] for what in (ALONE, OVER, BEHIND)]
    alone_s, over_s, behind_s = (sum(s.seconds for s in each) for each in by_case)
    if len(found) < len(known) or behind_s <= alone_s:
        return {}
    share = min(1.0, max(0.0, (over_s - alone_s) / (behind_s - alone_s)))
    share = share if share < NOTHING_HIDES else 1.0
    errors = [
        abs((alone.seconds + share * (behind.seconds - alone.seconds)) / over.seconds - 1)
        for alone, over, behind in zip(*by_case, strict=True)
    ]
    fits.add(
        Fit(
            "contention",
            share,
            len(found),
            statistics.fmean(errors),
            "collectives while matmuls run, and in front of them",
        )
    )
    return {"contention": share}


def _alone(base: Device, samples: Sequence[Sample], fits: Fits, ranks: int) -> dict[str, Any]:
    """All ranks together are no slower than one: more than as many times as fast as beside the others is one on its own
    never."""
    alone = fits.sensible(_of(samples, "matmul alone"), lambda s: 1 / s.seconds, 1e8, "matmuls/s")
    if base.kind != "cpu" or not alone:
        return {}
    least_s = alone[0].seconds
    beside = fits.sensible(
        _of(samples, "matmul beside others"), lambda s: s.seconds / least_s, float(ranks), "times as long as alone"
    )
    if not beside:
        return {}
    ratio = max(1.0, beside[0].seconds / least_s)
    fits.add(Fit("alone", ratio, 2, 0.0, "a matmul on all ranks, and on one while the others wait"))
    return {"alone": ratio}
