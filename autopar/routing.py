"""How many rows a layer of experts sends where routing is balanced: what is priced, and what the runtime counts. Used
by rules.experts and runtime.algorithms.experts_on_ranks.

A token that goes to k of E experts is wanted by every part of them that has one of the k. It goes there once, whatever
the number of its experts there (as DeepEP does between nodes: https://github.com/deepseek-ai/DeepEP).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import cache


@cache
def parts_of_token(experts: int, copies: int, parts: int) -> float:
    """Of `parts` equal parts of `experts`, how many have one of the `copies` different experts of a token, any of which
    is as likely: on the mean parts (1 - C(E - E/parts, k) / C(E, k)), at most k. Parts may be fractions of an
    expert."""
    share = experts / parts
    missed = math.prod(max(0.0, 1.0 - share / (experts - i)) for i in range(min(copies, experts)))
    return min(float(copies), parts * (1.0 - missed))


@cache
def parts_of_run(experts: int, copies: int, parts: int) -> float:
    """The same of `copies` experts that lie next to each other, as gates of benchmarks give them out: token i has those
    from i k on, and the first ones behind the last (NVIDIA-NeMo/Automodel, components/moe/layers.py, FakeBalancedGate:
    arange(tokens k) % experts)."""
    starts = range(0, experts, math.gcd(experts, copies))
    return sum(
        len({(start + i) % experts * parts // experts for i in range(min(copies, experts))}) for start in starts
    ) / len(starts)


def rows_sent(
    tokens: float,
    experts: int,
    copies: int,
    sizes: Sequence[int],
    own: int = 1,
    of: Callable[[int, int, int], float] = parts_of_token,
) -> list[float]:
    """Rows that leave a rank of `tokens` along each of several axes, one behind the other, those for itself counted:
    the first axis has `sizes[0]` parts of the experts, each of which has `sizes[1]`, and so on. This rank sends to one
    of `own` parts only: no token goes to an expert of the others. `of` says how many parts have experts of a token."""
    parts = itertools.accumulate(sizes, operator.mul, initial=own)
    return [tokens * of(experts, copies, count) / own for count in itertools.islice(parts, 1, None)]
