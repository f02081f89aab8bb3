"""Problems with the structure of Llama-like blocks, made from a seed: 21 nodes each (weights are nodes), choices = 5 **
axes.

On one mesh axis an operator takes one of five options, which fix the layout of what it reads and writes, as in an
einsum:

    option   reads          a weight as   writes
    0 whole  R              R             R
    1 batch  S0             G             S0       (G: replicated, its gradient is to be summed)
    2 tokens S1             G             S1
    3 column R              S0            S2
    4 row    S2             S1            P        (operators without a weight: S2 to S2)

A weight rests replicated or split. A change of layout costs latency and volume on every axis where it happens, and less
the more the other axes split. Weights' collectives hide under the block's compute (an overlap group for attention, one
for the MLP).
"""

from __future__ import annotations

import itertools

import numpy as np

from autopar.problem.types import Net, Node, Problem, Use

OPTIONS = 5
R, S0, S1, S2, P = range(5)
DEGREE = (8, 8, 4)
LATENCY_S, SECONDS_PER_UNIT = (4e-5, 1e-5, 1e-5), (8e-3, 1e-3, 1e-3)
READS, WRITES, WRITES_PLAIN = np.array([R, S0, S1, R, S2]), np.array([R, S0, S1, S2, P]), np.array([R, S0, S1, S2, S2])
PLAIN_READS = np.array([R, S0, S1, S2, S2])
ASKS_WEIGHT = np.array([R, P, P, S0, S1])  # P: whole, with a gradient to be summed
RESTS = np.array([R, S0, S1, S2, S0])
INF = float("inf")
VOLUME = np.array(
    [  # forward and backward together, in units of the whole tensor; row: has, column: wants
        [0.0, 1.0, 1.0, 1.0, 2.0],
        [1.0, 0.0, 0.25, 0.25, 2.0],
        [1.0, 0.25, 0.0, 0.25, 2.0],
        [1.0, 0.25, 0.25, 0.0, 2.0],
        [2.0, 2.0, 2.0, 2.0, 0.0],
    ]
)
NOT_SUMMED = np.array([[0.0] * 4 + [INF]] * 4 + [[0.0] * 5])  # an activation never becomes a partial sum


def block(
    blocks: int = 1, axes: int = 2, *, groups: bool = True, memory_fraction: float = INF, seed: int = 0
) -> Problem:
    """`blocks` blocks on a mesh of `axes` axes; the memory limit as a share of what replication everywhere needs."""
    maker = _Maker(np.random.default_rng(seed), axes, groups)
    hidden = maker.op("input", [])
    for i in range(blocks):
        hidden = _attention(maker, hidden, f"block{i}.attention")
        hidden = _mlp(maker, hidden, f"block{i}.mlp")
    full = sum(float(n.memory_bytes.max()) for n in maker.nodes)
    return Problem(
        tuple(maker.nodes),
        tuple(maker.nets()),
        2 * blocks if groups else 0,
        full * memory_fraction,
        f"{blocks} blocks on {axes} axes",
    )


def _attention(m: _Maker, x: int, name: str) -> int:
    normed = m.op(f"{name}.norm", [x])
    q, k, v = (m.linear(f"{name}.{p}", normed) for p in "qkv")
    out = m.linear(f"{name}.out", m.op(f"{name}.sdpa", [q, k, v]))
    return m.op(f"{name}.add", [x, out])


def _mlp(m: _Maker, x: int, name: str) -> int:
    m.group += 1
    normed = m.op(f"{name}.norm", [x])
    gate, up = m.linear(f"{name}.gate", normed), m.linear(f"{name}.up", normed)
    out = m.op(f"{name}.add", [x, m.linear(f"{name}.down", m.op(f"{name}.mul", [gate, up]))])
    m.group += 1
    return out


class _Maker:
    """Collects nodes, what they write, and who reads it how."""

    def __init__(self, rng: np.random.Generator, axes: int, groups: bool) -> None:
        self.rng, self.axes, self.groups, self.group = rng, axes, groups, 0
        self.options = np.array(list(itertools.product(range(OPTIONS), repeat=axes)))
        self.split = np.prod([np.where(self.options[:, a] > 0, DEGREE[a], 1) for a in range(axes)], axis=0)
        self.nodes: list[Node] = []
        self.writes: list[tuple[np.ndarray, float, bool]] = []
        self.reads: dict[int, list[Use]] = {}

    def op(self, name: str, inputs: list[int], work_s: float = 2e-4) -> int:
        """An operator without a weight."""
        new = self._node(name, work_s, 2e8, WRITES_PLAIN, weight=False)
        for i in inputs:
            self._read(i, new, PLAIN_READS)
        return new

    def linear(self, name: str, x: int) -> int:
        """A matmul with its weight; returns the matmul."""
        weight = self._node(f"{name}.weight", 0.0, 1.5e9, RESTS, weight=True)
        new = self._node(name, 8e-3, 2e8, WRITES, weight=False)
        self._read(x, new, READS)
        self._read(weight, new, ASKS_WEIGHT)
        return new

    def _node(self, name: str, work_s: float, size: float, writes: np.ndarray, *, weight: bool) -> int:
        scale = self.rng.uniform(0.5, 2.0)
        cost_s = work_s * scale / self.split
        labels = tuple("".join(map(str, o)) for o in self.options)
        self.nodes.append(
            Node(name, labels, cost_s, size * scale / self.split, 0.6 * cost_s, self.group if self.groups else -1)
        )
        self.writes.append((writes, scale, weight))
        return len(self.nodes) - 1

    def _read(self, producer: int, reader: int, layouts: np.ndarray) -> None:
        self.reads.setdefault(producer, []).append(Use(reader, self._mixed(layouts)))

    def _mixed(self, layouts: np.ndarray) -> np.ndarray:
        """For each choice, one number for the layouts on all axes."""
        return np.asarray(layouts[self.options] @ (OPTIONS ** np.arange(self.axes)[::-1]))

    def nets(self) -> list[Net]:
        """One net per tensor that is read."""
        out = []
        for producer, uses in self.reads.items():
            writes, size, weight = self.writes[producer]
            cost_s = self._table(size * (0.5 if weight else 1.0), weight)
            group = self.nodes[producer].group if weight else -1
            memory = np.where(np.isfinite(cost_s) & (cost_s > 0), 2e7 * size, 0.0)
            out.append(
                Net(self.nodes[producer].name, producer, self._mixed(writes), tuple(uses), cost_s, memory, group)
            )
        return out

    def _table(self, size: float, weight: bool) -> np.ndarray:
        cost_s = np.zeros((len(self.options),) * 2)
        per_axis = VOLUME if weight else VOLUME + NOT_SUMMED
        for a in range(self.axes):
            volume = per_axis[np.ix_(self.options[:, a], self.options[:, a])]
            others = np.ones(len(self.options))
            for b in range(self.axes):
                if b != a:
                    others *= np.where((self.options[:, b] > 0) & (self.options[:, b] < P), DEGREE[b], 1)
            cost_s += np.where(volume > 0, LATENCY_S[a] + volume * SECONDS_PER_UNIT[a] * size / others[:, None], 0.0)
        return cost_s
