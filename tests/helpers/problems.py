"""Random problems for the searches: from a seed (`random_problem`) and as a hypothesis strategy (`problems`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from autopar.problem.types import Net, Node, Problem, Use


def random_problem(seed: int, *, nodes: int = 5, choices: int = 4, tight: bool = True) -> Problem:
    """A connected problem with overlap groups, lanes, shared readers, forbidden pairs and mostly a memory limit.

    Values are small integers, so that ties and dominated choices are common. Not every problem is feasible.
    """
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(0, 3))
    made = tuple(_node(rng, v, int(rng.integers(1, choices + 1)), groups) for v in range(nodes))
    nets = tuple(_net(rng, made, v, groups) for v in range(nodes - 1))
    if rng.random() < 0.5:
        nets += (_net(rng, made, 0, groups),)
    least = sum(float(n.memory_bytes.min()) for n in made)
    most = sum(float(n.memory_bytes.max()) for n in made)
    share = rng.uniform(0.0, 0.9) if tight and rng.random() < 0.8 else np.inf
    limit = np.inf if np.isinf(share) else least + share * (most - least)
    made, lanes = _lanes(np.random.default_rng((seed, 1)), made)
    return Problem(made, nets, groups, float(limit), f"random {seed}", lanes)


def _node(rng: np.random.Generator, v: int, choices: int, groups: int) -> Node:
    cost_s = rng.integers(0, 8, choices).astype(float)
    if choices > 2 and rng.random() < 0.2:
        cost_s[rng.integers(choices)] = np.inf
    hide_s = rng.integers(0, 5, choices).astype(float)
    labels = tuple(f"choice{c}" for c in range(choices))
    return Node(
        f"node{v}", labels, cost_s, rng.integers(0, 10, choices).astype(float), hide_s, int(rng.integers(-1, groups))
    )


def _lanes(rng: np.random.Generator, nodes: tuple[Node, ...]) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """Half of the problems have one stretch of two or three lanes, or another one beside it."""
    if rng.random() < 0.5:
        return nodes, ()
    lanes = (0,) * int(rng.integers(2, 4)) + (1,) * int(rng.integers(0, 3))
    return tuple(
        replace(node, lane=rng.integers(-1, len(lanes), len(node.labels))) if rng.random() < 0.7 else node
        for node in nodes
    ), lanes


def _net(rng: np.random.Generator, nodes: tuple[Node, ...], producer: int, groups: int) -> Net:
    """A net from `producer` to one to three later nodes; a node may read it twice."""
    height, width = rng.integers(1, 5, 2)
    readers = rng.integers(producer + 1, len(nodes), int(rng.integers(1, 4)))
    cost_s = rng.integers(0, 7, (height, width)).astype(float)
    cost_s[rng.random(cost_s.shape) < 0.08] = np.inf
    memory = rng.integers(0, 3, (height, width)) * float(rng.random() < 0.6)
    uses = tuple(Use(int(r), rng.integers(0, width, len(nodes[r].labels))) for r in readers)
    row = rng.integers(0, height, len(nodes[producer].labels))
    return Net(
        f"net{producer}",
        producer,
        row,
        uses,
        cost_s,
        memory,
        int(rng.integers(-1, groups)),
        shown=(0.0, 0.25, 1.0)[producer % 3],
    )


def problems(*, nodes: int = 5, choices: int = 4) -> st.SearchStrategy[Problem]:
    """As `random_problem`, from a drawn seed and drawn sizes."""
    return st.builds(
        lambda seed, n, c, tight: random_problem(seed, nodes=n, choices=c, tight=tight),
        st.integers(0, 2**32 - 1),
        st.integers(2, nodes),
        st.integers(1, choices),
        st.booleans(),
    )
