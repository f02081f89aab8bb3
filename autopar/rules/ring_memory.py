"""Memory of ring attention (autopar.runtime.algorithms.ring_attention) on one rank: what its backward keeps, and what
exists only while it runs.

What is alive at once, in bytes, beside what the rank is given and what the backward keeps. Results and gradients of
operands are counted where they are made, so they are taken off here.

    forward     rows go to the ranks that work on them: what is sent, beside what comes and is kept
                rounds: the sum so far, keys and values at hand and on their way, and one part with its share of the sum
                rows go back
    backward    as the forward, with the gradients of keys and values: those of this rank's part, those that it has
                sent on, and those that are on their way to it
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.rules.ring import KEY, MASK, QUERY, VALUE, in_halves, keys_bytes, result_bytes
from autopar.rules.site import Keeping, Site

WIDE = 4  # bytes of an element of sums, at least


@dataclass(frozen=True, slots=True)
class _Ring:
    """Bytes of local tensors: the query, keys and values together, the result; and where no fused kernel runs the
    scores of a rank's rows with the keys of another, which are sums too. `wide` is the bytes of an element of sums over
    those of an operand; `halves`: ranks work on two halves of chunks; `repeated` is the bytes of keys and values that
    are repeated for each head of their group."""

    query: float
    keys: float
    result: float
    scores: float
    wide: float
    halves: bool
    repeated: float
    ways: int
    biased: bool

    @classmethod
    def of(cls, site: Site) -> _Ring:
        """The ring of a call."""
        query, key, value = (site.operands[i] for i in (QUERY, KEY, VALUE))
        masks = site.operands[MASK:]
        rows, width = len(query.shape) - 2, len(query.shape) - 1
        fused = not masks and query.sizes[width] == value.sizes[width]
        wide = max(1.0, WIDE / query.itemsize)
        scores = wide * site.local_bytes(QUERY) * site.local(KEY, rows) / query.sizes[width]
        grouped = len(query.shape) > 2 and query.sizes[-3] != key.sizes[-3]
        return cls(
            site.local_bytes(QUERY),
            keys_bytes(site),
            result_bytes(site),
            0.0 if fused else scores,
            wide,
            bool(in_halves(site)),
            (site.local_bytes(QUERY) + result_bytes(site)) * grouped,
            site.ways,
            any(mask.grad for mask in masks),
        )

    @property
    def cast(self) -> bool:
        """Whether sums are of another dtype than operands."""
        return self.wide > 1

    @property
    def part(self) -> float:
        """The most while the rank's rows attend to the keys at hand: contiguous queries and the result, or three
        tensors of scores."""
        return self.repeated + (3 * self.scores or (not self.halves) * self.query + self.result)

    def part_back(self, share: float) -> float:
        """The most while a `share` of the rank's rows has its gradients made. Fused: contiguous operands, gradients,
        and the gradient of the result once more; of groups in 16 bits later the sums over their heads. Else three
        tensors of scores, or two with the gradients, that of the query before and after it is scaled."""
        keys = self.repeated or self.keys
        if self.scores:
            scores = share * self.scores * (1 + self.biased / 2)
            return self.repeated + max(3 * scores, 2 * scores + self.wide * (keys + 2 * share * self.query))
        copies = 0.0 if self.halves and share == 1 else share * (self.query + (1 + self.halves) * self.result)
        made = share * (self.query + self.result) + keys
        summed = share * self.query + keys + self.wide * (self.keys + self.repeated / 2)
        return self.repeated + max(copies + made, summed if self.repeated and self.cast else 0.0)


def kept(site: Site) -> Keeping:
    """Queries, keys and values of the rows that a rank works on (its own, unless rows go to other ranks); masks,
    the result, and for each row the logarithm of the sum of its exponentials."""
    count, query = len(site.operands), site.operands[QUERY]
    rows, masks_and_result = (QUERY, KEY, VALUE), tuple(range(MASK, count + 1))
    sums_bytes = site.local(QUERY, *range(len(query.shape) - 1)) * max(WIDE, query.itemsize)
    if in_halves(site):
        return Keeping(masks_and_result, rows, sums_bytes)
    return Keeping((*rows, *masks_and_result), (), sums_bytes)


def forward_bytes(site: Site) -> float:
    """Bytes in the forward, at most."""
    ring = _Ring.of(site)
    sent = (ring.query + ring.keys) * ring.halves
    merged = ring.result + ring.wide * ring.result * (1 + ring.cast)
    rounds = ring.wide * ring.result + min(ring.ways, 2) * ring.keys + max(ring.part, merged)
    returned = (ring.wide + ring.cast + 3) * ring.result * ring.halves
    return max(0.0, max(sent, rounds, returned) - ring.result)


def backward_bytes(site: Site) -> float:
    """Bytes in the backward, at most."""
    ring = _Ring.of(site)
    made = ring.query + ring.keys
    sent = 7 * ring.result * ring.halves
    first = min(ring.ways, 2) * ring.keys + ring.part_back(1.0)
    later = (2 if ring.ways > 2 else 1) * ring.keys + 2 * ring.wide * ring.keys
    later += ring.part_back(0.5 if ring.halves else 1.0)
    rounds = (1 + ring.halves) * ring.result + ring.wide * made + (max(first, later) if ring.ways > 1 else first)
    returned = (ring.wide + ring.cast + 3) * made * ring.halves
    return max(0.0, max(sent, rounds, returned) - made)
