"""Seconds of a step from what a table says: the time itself, tokens per second, or FLOP/s with how they were counted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from benchmarks.costmodel.tables import Line, Refused, count, number_of, positive


def step_s(line: Line, gpus: int) -> float | None:
    """The step of a line, None where nothing says it. Raises Refused where it is no time."""
    if "layer" in line["metric_name"]:
        return None
    counted = next((formula for pattern, formula in COUNTED if re.search(pattern, line["tflops_kind"])), None)
    if line["step_time_s"]:
        seconds = number_of(line["step_time_s"])
    elif line["tokens_s_gpu"]:
        seconds = _tokens(line) / (positive(line["tokens_s_gpu"], "tokens_s_gpu") * gpus)
    elif line["tflops_gpu"] and counted:
        seconds = _tokens(line) * counted(line) / (positive(line["tflops_gpu"], "tflops_gpu") * 1e12 * gpus)
    else:
        return None
    if not 0 < seconds < math.inf:
        raise Refused(f"a step of {seconds} s: step_time_s is {line['step_time_s']}")
    return seconds


def _tokens(line: Line) -> int:
    return count(line, "global_batch") * count(line, "seq_len")


def _run_again(line: Line) -> float:
    """96 L h^2 (1 + s / 6h + V / 16 L h): four passes (https://arxiv.org/abs/2104.04473, section 5.1), of the head three."""
    return 4 / 3 * _three_passes(line) - 2.0 * count(line, "hidden") * count(line, "vocab")


def _three_passes(line: Line) -> float:
    """72 L h^2 (1 + s / 6h + V / 12 L h): the same without the pass that runs again."""
    seq, layers, hidden, vocab = (count(line, key) for key in ("seq_len", "n_layers", "hidden", "vocab"))
    return 72.0 * layers * hidden**2 * (1 + seq / (6 * hidden)) + 6.0 * hidden * vocab


def _of_parameters(attention: float) -> Callable[[Line], float]:
    """6 N, and so many L h s for attention."""
    return lambda line: 6.0 * positive(line["n_params"], "n_params") + attention * count(line, "n_layers") * count(line, "hidden") * count(line, "seq_len")


COUNTED: tuple[tuple[str, Callable[[Line], float]], ...] = (
    (r"\b96 ?\*|factor 4\b", _run_again), (r"\b72\b", _three_passes), (r"6N ?\+ ?12Lhs", _of_parameters(12.0)), (r"6N ?\+ ?6Lhs|causal attention \(6s\^?2\)", _of_parameters(6.0)),
)
"""How the column says FLOPs were counted, and the FLOPs of a token by that."""
