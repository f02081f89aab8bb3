"""Problems of the shape that transformer blocks give, made from a seed: chains of nodes with weights and residual paths.

On every mesh axis a node picks one of five options and a tensor has one of five layouts; a choice is one option per axis.
A change of layout costs latency plus volume on each axis where it happens, the volume shrinking with the axes that split.
"""

from __future__ import annotations

import itertools

import numpy as np

from autopar.problem.types import Net, Node, Problem, Use

OPTIONS = 5
ALPHA_S, BETA_S = (2e-5, 5e-6, 5e-6), (4e-3, 1e-3, 5e-4)


def block(blocks: int = 1, axes: int = 2, *, groups: bool = True, memory_fraction: float = float("inf"),
          seed: int = 0) -> Problem:
    """`blocks` blocks of 21 nodes on a mesh of `axes` axes; memory limit as a share of what full replication needs."""
    rng = np.random.default_rng(seed)
    maker = _Maker(rng, axes, groups)
    hidden = maker.node("input", weight=False)
    for i in range(blocks):
        hidden = _attention(maker, hidden, f"block{i}.attention")
        hidden = _mlp(maker, hidden, f"block{i}.mlp")
    full = sum(float(n.memory_bytes.max()) for n in maker.nodes)
    return Problem(tuple(maker.nodes), tuple(maker.finish()), groups=2 * blocks if groups else 0,
                   memory_limit_bytes=full * memory_fraction, name=f"{blocks} blocks, {axes} axes")


def _attention(m: _Maker, x: int, name: str) -> int:
    normed = m.op(f"{name}.norm", [x])
    q, k, v = (m.op(f"{name}.{p}", [normed, m.node(f"{name}.{p}.weight", weight=True)]) for p in "qkv")
    attended = m.op(f"{name}.sdpa", [q, k, v])
    out = m.op(f"{name}.out", [attended, m.node(f"{name}.out.weight", weight=True)])
    return m.op(f"{name}.add", [x, out])


def _mlp(m: _Maker, x: int, name: str) -> int:
    m.group += 1
    normed = m.op(f"{name}.norm", [x])
    gate, up = (m.op(f"{name}.{p}", [normed, m.node(f"{name}.{p}.weight", weight=True)]) for p in ("gate", "up"))
    product = m.op(f"{name}.mul", [gate, up])
    down = m.op(f"{name}.down", [product, m.node(f"{name}.down.weight", weight=True)])
    out = m.op(f"{name}.add", [x, down])
    m.group += 1
    return out


class _Maker:
    """Collects nodes and who reads what."""

    def __init__(self, rng: np.random.Generator, axes: int, groups: bool) -> None:
        self.rng, self.axes, self.groups, self.group = rng, axes, groups, 0
        self.nodes: list[Node] = []
        self.weights: list[bool] = []
        self.reads: dict[int, list[int]] = {}
        self.options = np.array(list(itertools.product(range(OPTIONS), repeat=axes)))

    def node(self, name: str, *, weight: bool) -> int:
        """A node whose option 0 replicates; returns its index."""
        split = (self.options > 0).sum(1)
        work_s = 0.0 if weight else self.rng.uniform(1e-4, 2e-3)
        size = self.rng.uniform(1e8, 1e9) * (4 if weight else 1)
        cost_s = work_s / 8.0**split * self.rng.uniform(1.0, 1.05, len(split))
        labels = tuple("".join(map(str, o)) for o in self.options)
        self.nodes.append(Node(name, labels, cost_s, size / 8.0**split, 0.6 * cost_s, self.group if self.groups else -1))
        self.weights.append(weight)
        return len(self.nodes) - 1

    def op(self, name: str, inputs: list[int]) -> int:
        """A node that reads `inputs`."""
        new = self.node(name, weight=False)
        for i in inputs:
            self.reads.setdefault(i, []).append(new)
        return new

    def finish(self) -> list[Net]:
        """One net per tensor."""
        return [self._net(producer, readers) for producer, readers in self.reads.items()]

    def _net(self, producer: int, readers: list[int]) -> Net:
        rng, weight = self.rng, self.weights[producer]
        size = rng.uniform(0.2, 2.0)
        uses = tuple(Use(r, self._index([rng.permutation(OPTIONS) if rng.random() < 0.5 else np.arange(OPTIONS)
                                         for _ in range(self.axes)])) for r in readers)
        same = np.ones((OPTIONS, OPTIONS))
        np.fill_diagonal(same, 0.0)
        same[0, 1:] *= 0.5 if weight else 0.3
        shape = (len(self.options),) * 2
        cost_s = np.zeros(shape)
        split = (self.options > 0).sum(1)
        for a in range(self.axes):
            changed = same[np.ix_(self.options[:, a], self.options[:, a])]
            others = 8.0 ** (split - (self.options[:, a] > 0))
            cost_s += (changed > 0) * ALPHA_S[a] + changed * BETA_S[a] * size / others[:, None]
        cost_s[rng.random(shape) < 0.02 * (np.add.outer(np.arange(shape[0]), np.arange(shape[1])) > 0)] = np.inf
        group = self.nodes[producer].group if weight else -1
        return Net(self.nodes[producer].name, producer, np.arange(shape[0]), uses, cost_s,
                   np.where(np.isfinite(cost_s), 1e6 * (cost_s > 0), 0.0), group)

    def _index(self, per_axis: list[np.ndarray]) -> np.ndarray:
        mixed = np.stack([p[self.options[:, a]] for a, p in enumerate(per_axis)], 1)
        return np.asarray(mixed @ (OPTIONS ** np.arange(self.axes)[::-1]))
