"""Temporary memory of recurrent networks on a CPU, in addition to what they keep (passes/recurrent.py), for one
direction of one layer at a time.

The product of the input at all positions with the first matrix is computed at once: `gates`. Plain operators then go
from position to position, and concatenate the results of both directions. oneDNN's LSTM works in the memory of the
gates, forward and backward, with a copy of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.memory.local import Bytes, Local, taken
from autopar.rules.arguments import named
from passes.recurrent import ONEDNN, line

aten = torch.ops.aten

STATES = 6
"""States of one position that the backward of oneDNN's LSTM has in addition to those that it keeps."""


@dataclass(frozen=True)
class Layer:
    """One direction of the last layer on one rank: bytes of its result (`given`), of its gates, weights, and states of
    one position; how many directions there are (`ways`), and whether oneDNN runs it (`fused`)."""

    given: float
    gates: float
    weights: float
    state: float
    ways: int
    fused: bool

    @staticmethod
    def of(local: Local) -> Layer:
        """The layer of a call of lstm, gru or rnn."""
        ways, params = 2 if local.given("bidirectional") else 1, local.given("params")
        count = ways * local.given("num_layers")
        rows, numbers = params[1].sizes
        fused = local.op.target is aten.lstm.input and local.op.out_dtypes[0] in ONEDNN and rows == 4 * numbers
        gates = line(rows, local.op.call.outs[0].itemsize) if fused else rows
        return Layer(
            local.out / ways,
            local.out / ways * gates / numbers,
            sum(local.ins[-len(params) :]) / count,
            local.outs[1] / count,
            ways,
            fused,
        )


def _forward(local: Local) -> float:
    """Forward of lstm, gru or rnn. Plain operators have the results of both directions before they concatenate them.
    oneDNN's LSTM keeps these for its backward, so that they are counted there, and allocates its result last."""
    layer = Layer.of(local)
    if layer.fused:
        return max(0.0, layer.gates + layer.weights - local.out * (layer.ways > 1))
    return layer.gates + local.out * (layer.ways > 1)


def _backward(local: Local) -> float:
    """Backward of lstm, gru or rnn. Plain operators free more of what was kept than they allocate. oneDNN's LSTM has,
    in addition to the gates, the gradient of each layer's input from each direction, needed or not."""
    layer = Layer.of(local)
    if not layer.fused:
        return 0.0
    inward = 0.0 if local.grad(0) else layer.given if local.given("num_layers") > 1 else local.ins[0]
    return layer.gates + layer.weights + STATES * layer.state + inward + (layer.ways - 1) * layer.given


def _reset(local: Local) -> float:
    """A GRU cell: the candidate, its difference from the state, and the in-place product, which is kept; where nothing
    is kept, the products with the gates."""
    return (3 if local.extra else 7) * local.out


def _both(local: Local) -> float:
    """Forward of an LSTM cell: the products of input and state, four gates each, before the results exist."""
    return max(0.0, 8 * local.out - sum(local.outs) - local.extra)


def _cell_back(early: int, gates: int) -> Bytes:
    """The backward of a cell: `early` states at the beginning; at the end all gradients and those of the gates, when
    nothing of what was kept remains. Negative where more was kept."""

    def nbytes(local: Local) -> float:
        given, made = (
            sum(local.outs),
            sum(nbytes for nbytes, each in zip(local.ins, local.op.call.ins, strict=True) if each.grad),
        )
        return max(early * local.out, made + gates * local.out - local.extra) - given - made

    return nbytes


CPU: dict[Any, tuple[Bytes, Bytes]] = {
    **dict.fromkeys(named("gru.input lstm.input rnn_relu.input rnn_tanh.input"), (_forward, _backward)),
    **dict.fromkeys(named("rnn_relu_cell.default rnn_tanh_cell.default"), (taken("2o"), _cell_back(2, 1))),
    aten.gru_cell.default: (_reset, _cell_back(3, 3)),
    aten.lstm_cell.default: (_both, _cell_back(4, 4)),
}
"""Operator -> (forward, backward) on a CPU."""
