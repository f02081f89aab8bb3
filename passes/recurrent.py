"""Recurrent layers of torch.nn, each one operator: their FLOPs, and what they keep for the backward on CPUs.

Each layer multiplies its input at all positions by one matrix, and its state at each position by another, separately
for each direction. The results of a layer are the input of the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.facts import Size
from passes.saved import Saved

aten = torch.ops.aten

GATES: dict[Any, int] = {aten.gru.input: 3, aten.lstm.input: 4, aten.rnn_relu.input: 1, aten.rnn_tanh.input: 1}
"""Operators -> rows of a matrix per element of the state."""

CELLS = (aten.gru_cell.default, aten.lstm_cell.default, aten.rnn_relu_cell.default, aten.rnn_tanh_cell.default)
"""Operators for one position of one layer."""

ONEDNN = (torch.float32, torch.bfloat16)
"""dtypes in which oneDNN computes an LSTM on CPUs (RNN.cpp, use_mkldnn; the narrow one where the machine has
instructions for it)."""

WIDE = torch.float32.itemsize


@dataclass(frozen=True)
class Network:
    """One call: its numbers of positions and samples, and the matrices and all weights of each layer and direction."""

    node: fx.Node
    steps: Size
    samples: Size
    states: tuple[fx.Node, ...]
    layers: tuple[tuple[tuple[fx.Node, ...], ...], ...]

    @property
    def data(self) -> fx.Node:
        """The input of the first layer."""
        return edit.tensor_operands(self.node)[0]

    def nbytes(self, numbers: Size) -> Size:
        """Bytes of `numbers` elements at each position of each sample."""
        return facts.dtype(self.data).itemsize * self.rows * numbers

    @property
    def rows(self) -> Size:
        """The number of positions of all samples together."""
        return self.steps * self.samples

    def sizes(self, weights: tuple[fx.Node, ...]) -> tuple[Size, Size, Size]:
        """For one direction of a layer: the width of its input, of its state, and of its result, which is narrower
        where the state is projected."""
        (_, wide), (rows, given) = (facts.shape(matrix) for matrix in matrices(weights)[:2])
        return wide, rows // GATES[self.node.target], given


def network(node: fx.Node) -> Network:
    """The layers of a call."""
    given = edit.args_of(node)
    samples, steps, _ = (
        facts.shape(given["input"]) if given["batch_first"] else [facts.shape(given["input"])[dim] for dim in (1, 0, 2)]
    )
    params, ways = tuple(given["params"]), 2 if given["bidirectional"] else 1
    each = len(params) // (given["num_layers"] * ways)
    apart = [params[start : start + each] for start in range(0, len(params), each)]
    states = given["hx"] if isinstance(given["hx"], (list, tuple)) else (given["hx"],)
    return Network(
        node,
        steps,
        samples,
        tuple(states),
        tuple(tuple(apart[start : start + ways]) for start in range(0, len(apart), ways)),
    )


def matrices(weights: tuple[fx.Node, ...]) -> list[fx.Node]:
    """The matrix of the input, that of the state, and that of a projection if there is one."""
    return [weight for weight in weights if facts.rank(weight) == 2]


def flops(node: fx.Node) -> Size:
    """Each matrix times each position of each sample."""
    found = network(node)
    return (
        2
        * found.rows
        * sum(facts.numel(matrix) for layer in found.layers for weights in layer for matrix in matrices(weights))
    )


def backward_flops(node: fx.Node, carries: Mapping[fx.Node, bool]) -> Size:
    """Per matrix as many FLOPs as in the forward for its gradient, and again for the gradient of what it multiplies.
    The input has a gradient above another layer that trains, or if its own producer has one. States have one from the
    second position on; the first state only where it is trained."""
    found = network(node)
    inward, first = carries[found.data], any(carries[state] for state in found.states)
    total: Size = 0
    for layer in found.layers:
        trains = inward or first or any(carries[weight] for weights in layer for weight in weights)
        for weights in layer:
            across, along, *projected = matrices(weights)
            total = total + 2 * found.rows * sum(
                facts.numel(matrix) for matrix in (across, along, *projected) if carries[matrix]
            )
            total = total + 2 * found.rows * facts.numel(across) * int(inward)
            if trains:
                total = (
                    total
                    + 2 * (found.rows - (0 if first else found.samples)) * facts.numel(along)
                    + 2 * found.rows * sum(map(facts.numel, projected))
                )
        inward = trains
    return total


def _cell(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The two products of a cell: (operand, matrix) of each."""
    given = edit.args_of(node)
    state = given["hx"]
    yield given["input"], given["w_ih"]
    yield state[0] if isinstance(state, (list, tuple)) else state, given["w_hh"]


def _samples(rows: fx.Node) -> Size:
    return facts.shape(rows)[0] if facts.rank(rows) == 2 else 1


def cell_flops(node: fx.Node) -> Size:
    """Both matrices times each sample."""
    return sum(2 * _samples(rows) * facts.numel(matrix) for rows, matrix in _cell(node))


def cell_backward_flops(node: fx.Node, carries: Mapping[fx.Node, bool]) -> Size:
    """For each product, the FLOPs of the forward for each of its two operands that has a gradient."""
    return sum(
        2 * _samples(rows) * facts.numel(matrix) * (carries[rows] + carries[matrix]) for rows, matrix in _cell(node)
    )


def saved_on_cpu(node: fx.Node, grads: list[bool]) -> Saved:
    """What a network keeps on a CPU: oneDNN's workspace for an LSTM without projection in ONEDNN dtypes, else plain
    operators at each position."""
    found = network(node)
    projects = any(len(matrices(weights)) > 2 for layer in found.layers for weights in layer)
    fused = node.target is aten.lstm.input and facts.dtype(found.data) in ONEDNN and not projects
    positions, extra = (_kept_by_onednn if fused else _kept_by_positions)(found, grads[0])
    # what comes in there, and what it was multiplied with if some is dropped
    between = (1 + _drops(found)) * sum(found.nbytes(found.sizes(layer[0])[0]) for layer in found.layers[1:])
    copied = _turned(found)
    if copied and not fused:
        extra = extra + (len(found.layers[0]) - 1) * facts.nbytes(found.data)  # each direction makes its own
    return Saved(positions if not copied else positions[1:], (0,) if copied else (), extra + between)


def _kept_by_positions(found: Network, inward: bool) -> tuple[tuple[int, ...], Size]:
    """Plain operators: all operands but biases, and but the matrices of the input where that has no gradient; gates and
    states at each position."""
    kept = [
        matrix
        for depth, layer in enumerate(found.layers)
        for weights in layer
        for matrix in matrices(weights)[0 if depth or inward else 1 :]
    ]
    operands = edit.tensor_operands(found.node)
    positions = tuple(place for place, operand in enumerate(operands) if place <= len(found.states) or operand in kept)
    return positions, sum(_position_by_position(found, weights) for layer in found.layers for weights in layer)


def _kept_by_onednn(found: Network, inward: bool) -> tuple[tuple[int, ...], Size]:
    """oneDNN: all operands, a workspace per layer and direction, and the result of each direction. The last layer's is
    the result of the call, unless two directions are concatenated; another layer's is the input of the next one, unless
    directions are concatenated or dropout is between."""
    operands = tuple(range(len(edit.tensor_operands(found.node))))
    extra = sum(_workspace(found, weights) for layer in found.layers for weights in layer)
    if len(found.layers[0]) > 1:
        return operands, extra + sum(
            found.nbytes(found.sizes(weights)[2]) for layer in found.layers for weights in layer
        )
    return (*operands, len(operands)), extra + sum(
        found.nbytes(found.sizes(layer[0])[2]) for layer in found.layers[:-1] if _drops(found)
    )


def _turned(found: Network) -> bool:
    """Whether the input is not contiguous with positions first, so that the kernel copies it."""
    held = facts.value(found.data)
    sizes, strides = ([facts.example(found.node, size) for size in numbers] for numbers in (held.shape, held.stride()))
    tensor = torch.empty_strided(sizes, strides, device="meta")
    return not (tensor.transpose(0, 1) if edit.args_of(found.node)["batch_first"] else tensor).is_contiguous()


def _drops(found: Network) -> bool:
    """Whether there is dropout between layers."""
    given = edit.args_of(found.node)
    return bool(given["train"] and given["dropout"])


def _position_by_position(found: Network, weights: tuple[fx.Node, ...]) -> Size:
    """Gates, and states before and after them; the states before the first position are operands. A projection keeps
    its input."""
    _, hidden, given = found.sizes(weights)
    several: dict[Any, tuple[Size, Size]] = {
        aten.gru.input: (6 * hidden + given, given),
        aten.lstm.input: (6 * hidden + given + hidden * (len(matrices(weights)) - 2), hidden + given),
    }
    each, before = several.get(found.node.target, (hidden, 0))
    return facts.dtype(found.data).itemsize * found.samples * (found.steps * each - before)


def _workspace(found: Network, weights: tuple[fx.Node, ...]) -> Size:
    """oneDNN 3's workspace, without page rounding: gates and outputs of each position; states for one position more
    than there are, before and after the layer; room for their gradients in float32; and the last states, which are
    results."""
    itemsize = facts.dtype(found.data).itemsize
    wide, hidden, _ = found.sizes(weights)
    assert isinstance(wide, int) and isinstance(hidden, int)  # as those of weights are
    across = max(wide, hidden)
    position = itemsize * (line(4 * hidden, itemsize) + line(hidden, itemsize))
    state = itemsize * 2 * (line(across, itemsize) + hidden) + WIDE * (4 * line(across, WIDE) + 2 * hidden)
    return found.samples * (found.steps * position + (found.steps + 1) * state + itemsize * 2 * hidden)


def line(numbers: int, itemsize: int) -> int:
    """Elements per row in oneDNN's memory: padded to whole cache lines, and one line more where it would be a multiple
    of 256 elements, so that rows do not map to the same cache set."""
    line = 64 // itemsize
    rounded = -(-numbers // line) * line
    return rounded + line if rounded % 256 == 0 else rounded
