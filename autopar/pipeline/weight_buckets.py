"""Which weights' collectives travel in one bucket under a solution: sums of gradients (runtime.gradsync), gathers of
leaves (runtime.leaves)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from autopar.layout import Layout, fraction
from autopar.problem.build import Model
from autopar.problem.graph import Program
from autopar.problem.leaf_gathers import in_a_row, share_ahead
from autopar.problem.nets import Link
from autopar.problem.pairs import LayoutPair, synced


class WeightBuckets:
    """The buckets of all weights of `program` under the solution `choice` of `model`."""

    def __init__(self, program: Program, model: Model, choice: Sequence[int]) -> None:
        self.program, self.model, self.choice = program, model, choice

    def leaf(self, link: Link, made: LayoutPair, asked: LayoutPair) -> Layout:
        """The layout of the leaf's gradient before it is summed over ranks, where the weight is `made` and one reader
        `asked` for it. A weight that several read is a partial sum on those axes on which all of them that leave a
        gradient, on any place, leave it so."""
        others = [other for other in self._asked[link.ref] if other.has_grad]
        if len(others) < 2:
            return synced(made, (*others, asked)[0])
        each = [synced(made, other) for other in others]
        return tuple(
            entries[0] if all(entry == entries[0] for entry in entries) else own
            for own, *entries in zip(made.back, *each, strict=True)
        )

    def leaf_bytes(self, link: Link, made: LayoutPair) -> float:
        """Bytes on a rank of the leaf of one instance of a weight."""
        return link.size_bytes * fraction(made.value, self.model.prices.sizes)

    def summed_bytes(self, made: LayoutPair, leaf: Layout) -> float:
        """Bytes on a rank of all leaves whose gradients are summed at the same time, and by the same collectives, as
        one from `leaf` to where it rests."""
        return self._summed_bytes.get((made.each, *self.model.prices.routes.kinds(leaf, made.back)), 0.0)

    def gathered_bytes(self, link: Link) -> float:
        """Bytes on a rank of the leaves that are gathered in the same bucket as that of a weight; 0 where it is
        gathered alone."""
        return self._gathered_bytes.get(link.ref, 0.0)

    @cached_property
    def share_ahead(self) -> Mapping[str, float]:
        """By scope of blocks: of the leaves gathered once per step, the share that is gathered before their block
        begins (problem.leaf_gathers). Leaves that operators outside of blocks read are waited for before the first of
        these runs."""
        leaves: dict[str, float] = {}
        for link in self._weights:
            made, scope = self._made(link), link.cluster.scope
            if scope and made.value != made.back:
                leaves[scope] = leaves.get(scope, 0.0) + self.leaf_bytes(link, made)
        return {
            scope: float(share_ahead(np.array(each), in_a_row(self.program, scope))) for scope, each in leaves.items()
        }

    @cached_property
    def _asked(self) -> Mapping[tuple[str, int], list[LayoutPair]]:
        """For each weight, the distinct layouts that its readers ask for."""
        found: dict[tuple[str, int], dict[LayoutPair, None]] = {}
        for link in self.model.links:
            if link.weight:
                found.setdefault(link.ref, {}).update(
                    dict.fromkeys(link.columns[use.asks[self.choice[use.node]]] for use in link.uses)
                )
        return {ref: list(pairs) for ref, pairs in found.items()}

    @cached_property
    def _summed_bytes(self) -> Mapping[tuple[object, ...], float]:
        """Bytes on a rank of the leaves of each kind of bucket: (whether summed after every microbatch, the collectives
        of the sum)."""
        found = dict[tuple[object, ...], float]()
        for link in self._weights:
            made = self._made(link)
            key = made.each, *self.model.prices.routes.kinds(self.leaf(link, made, self._asked[link.ref][0]), made.back)
            found[key] = found.get(key, 0.0) + link.count * self.leaf_bytes(link, made)
        return found

    @cached_property
    def _gathered_bytes(self) -> Mapping[tuple[str, int], float]:
        """For each weight, bytes on a rank of the leaves in its bucket: those that are read one after the other and are
        gathered by the same collectives, over all blocks where these are all leaves of a block."""
        buckets: dict[str, list[tuple[object, list[Link], float]]] = {}  # by scope: collectives, weights, bytes
        for link in sorted(self._weights, key=lambda link: self.program.order[link.readers[0][0].name]):
            made, here = self._made(link), buckets.setdefault(link.cluster.scope, [])
            kinds = self.model.prices.routes.kinds(made.back, made.value)
            if not kinds:
                continue
            gathers = all(kind == "all_gather" for kind, _ in kinds)
            if not gathers:  # it is moved by itself, and what comes behind it begins a bucket
                here.append((None, [], 0.0))
                continue
            _, links, before = here.pop() if here and here[-1][0] == kinds else (None, [], 0.0)
            here.append((kinds, [*links, link], before + self.leaf_bytes(link, made)))
        return {
            link.ref: nbytes * (link.count if len(here) == 1 else 1)
            for here in buckets.values()
            for _, links, nbytes in here
            for link in links
        }

    def _made(self, link: Link) -> LayoutPair:
        """The layouts in which a weight is made under the solution."""
        return link.rows[link.row[self.choice[link.producer]]]

    @property
    def _weights(self) -> list[Link]:
        """The first link of each weight."""
        return [self.model.links[index] for index in self.model.weights.values()]
