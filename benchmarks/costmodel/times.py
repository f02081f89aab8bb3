"""Seconds of a step from what a table says: the time itself, tokens per second, FLOP/s with how they were counted, or
their share of the peak."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from benchmarks.costmodel.config import Config
from benchmarks.costmodel.reruns import Rerun
from benchmarks.costmodel.tables import Line, Refused, count, number_of, positive


def step_s(
    line: Line, gpus: int, model: Config, peak_flops: float, again: Rerun, *, causal: bool = False
) -> float | None:
    """The step of a line on devices of `peak_flops` each, None where nothing says it; `again`: what runs again;
    `causal`: its software counts half of the square of scores. Raises Refused where it is no time."""
    if "layer" in line["metric_name"]:
        return None
    counted = _flops_of_token(line, model, again, causal)
    if line["step_time_s"]:
        seconds = number_of(line["step_time_s"])
    elif line["tokens_s_gpu"]:
        seconds = _tokens(line) / (positive(line["tokens_s_gpu"], "tokens_s_gpu") * gpus)
    elif line["tflops_gpu"] and counted:
        seconds = _tokens(line) * counted / (positive(line["tflops_gpu"], "tflops_gpu") * 1e12 * gpus)
    elif line["mfu_pct"] and counted and peak_flops:
        seconds = _tokens(line) * counted / (positive(line["mfu_pct"], "mfu_pct") / 100 * peak_flops * gpus)
    elif line["hfu_pct"] and peak_flops and (done := _hardware_flops(line, model, again, causal)):
        seconds = _tokens(line) * done / (positive(line["hfu_pct"], "hfu_pct") / 100 * peak_flops * gpus)
    else:
        return None
    if not 0 < seconds < math.inf:
        raise Refused(f"a step of {seconds} s: step_time_s is {line['step_time_s']}")
    return seconds


def _tokens(line: Line) -> int:
    return count(line, "global_batch") * count(line, "seq_len")


def _run_again(line: Line) -> float:
    """96 L h^2 (1 + s / 6h + V / 16 L h): four passes (https://arxiv.org/abs/2104.04473, section 5.1), of the head
    three."""
    return 4 / 3 * _three_passes(line) - 2.0 * count(line, "hidden") * count(line, "vocab")


def _three_passes(line: Line) -> float:
    """72 L h^2 (1 + s / 6h + V / 12 L h): the same without the pass that runs again."""
    seq, layers, hidden, vocab = (count(line, key) for key in ("seq_len", "n_layers", "hidden", "vocab"))
    return 72.0 * layers * hidden**2 * (1 + seq / (6 * hidden)) + 6.0 * hidden * vocab


def _of_parameters(attention: float) -> Callable[[Line], float]:
    """6 N, and so many L h s for attention."""
    return lambda line: (
        6.0 * positive(line["n_params"], "n_params")
        + attention * count(line, "n_layers") * count(line, "hidden") * count(line, "seq_len")
    )


COUNTED: tuple[tuple[str, Callable[[Line], float]], ...] = (
    (r"\b96 ?\*|factor 4\b", _run_again),
    (r"\b72\b", _three_passes),
    (r"6N ?\+ ?12Lhs", _of_parameters(12.0)),
    (r"6N ?\+ ?6Lhs|causal attention \(6s\^?2\)", _of_parameters(6.0)),
)
"""How the column says FLOPs were counted, and the FLOPs of a token by that."""


def _hardware_flops(line: Line, model: Config, again: Rerun, causal: bool) -> float | None:
    """FLOPs of a token with those of what runs again, None where that is not a share of whole blocks or attention."""
    seq = count(line, "seq_len")
    if model.latent or model.adapters or again.first or again.parts not in ((), ("attention",)):
        return None
    three, scores = model_flops(model, seq, causal=causal), _scores(model, seq, causal)
    repeated = {"none": 0.0, "selective": scores, "full": again.share * (three - 6.0 * model.hidden * model.vocab)}
    return three + repeated[again.kind] / 3


def _flops_of_token(line: Line, model: Config, again: Rerun, causal: bool) -> float | None:
    """FLOPs of a token as the line counts them, None where it does not say how. By parameters those of experts that a
    token does not meet would count too: it is by sizes then, and where the line says no more than that they are the
    model's."""
    kind = line["tflops_kind"]
    formula = next((formula for pattern, formula in COUNTED if re.search(pattern, kind)), None)
    if formula and not model.experts:
        return formula(line)
    if re.match("hardware", kind):
        return _hardware_flops(line, model, again, causal)
    of_model = formula is not None or re.match("model", kind) or (not kind and line["mfu_pct"] != "")
    return (
        model_flops(model, count(line, "seq_len"), causal=causal or ("causal" in kind and "non-causal" not in kind))
        if of_model and model.latent is None
        else None
    )


def model_flops(model: Config, seq: int, *, causal: bool) -> float:
    """FLOPs of a token in the matmuls of all passes of a model, none of which runs again; of attention those of whole
    squares of scores, as most count them, or (`causal`) of half of each. Frozen matmuls have no gradients of their
    own."""
    attention = model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    dense = (3 if model.gated else 2) * model.hidden * model.ffn
    routed = model.hidden * (3 * (model.top_k * model.expert_ffn + model.shared) + model.experts)
    with_experts = model.layers - model.dense if model.experts else 0
    weights = (
        model.layers * attention
        + (model.layers - with_experts) * dense
        + with_experts * routed
        + model.hidden * model.vocab
    )
    return (4.0 if model.adapters else 6.0) * weights + _scores(model, seq, causal)


def _scores(model: Config, seq: int, causal: bool) -> float:
    """FLOPs of a token in the products of attention, all passes."""
    return (6.0 if causal else 12.0) * model.layers * model.heads * model.head_dim * seq
