"""Sums of gradients over ranks: the memory that they take beside the gradients. Called by memory.place."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.buckets import full, gradient_buckets
from autopar.cost.memory import itemsize, rests_in
from autopar.memory.buckets import copied
from autopar.memory.shares import Shares
from autopar.problem.at_rest import EACH
from autopar.problem.graph import Op


@dataclass(frozen=True)
class Sums:
    """The sums of the gradients of the parameters `synced` of one place, which has each so many times (`counts`)."""

    shares: Shares
    counts: Mapping[str, int]
    synced: Collection[str]

    @property
    def after_bytes(self) -> float:
        """The most bytes that they use in addition to what rests, after a backward: a flat copy of one bucket. For
        scattered gradients (ZeRO-1 and ZeRO-2) also the whole ones of the bucket, unless they are accumulated over
        microbatches and rest; on the CPU also the copy in which gloo's reduce-scatter sums."""
        return self._bytes(self._ops)

    @property
    def beside_bytes(self) -> float:
        """The same of those once per step that begin while the last backward goes on: of full buckets."""
        return self.begun_bytes if full(self._bucket_bytes(self._once)) else 0.0

    @property
    def begun_bytes(self) -> float:
        """The same of all those once per step."""
        return self._bytes(self._once)

    @property
    def _once(self) -> list[Op]:
        """The parameters whose gradients are summed once per step."""
        return [op for op in self._ops if EACH not in self.shares.plan.nodes[op.name].runs]

    @property
    def _ops(self) -> list[Op]:
        """The parameters, in program order: which gradients share a bucket depends on it."""
        return [op for op in self.shares.program.ops.values() if op.role == "param" and op.name in self.synced]

    def _bytes(self, ops: Sequence[Op]) -> float:
        """Bytes that the sums of the gradients of `ops` use in addition to what rests."""
        plan = self.shares.plan
        if self.shares.habits.standing:
            return 0.0  # in their buffers
        scattered = [op for op in ops if self.shares.lies((op.name, 0)).gathered]
        whole = [op for op in scattered if plan.microbatches == 1 or EACH in plan.nodes[op.name].runs]
        more = self._bucket_bytes(whole) + (self._bucket_bytes(scattered) if self.shares.on_cpu else 0.0)
        return self._bucket_bytes(ops, copies=True) + more

    def _bucket_bytes(self, ops: Sequence[Op], *, copies: bool = False) -> float:
        """Bytes of the gradients of `ops` in their largest bucket, in the dtype of parameters at rest; `copies`: of
        those that are copied for it. The gradient that fills a bucket is in it as a whole; gradients that are summed
        over other axes have buckets of their own."""
        lies = {op.name: self.shares.lies((op.name, 0)) for op in ops}
        nbytes = {
            op.name: float(
                self.shares.elements(op.call.outs[0].sizes, lies[op.name].value)
                * itemsize(rests_in(str(op.out_dtypes[0]), self.shares.plan.precision))
            )
            for op in ops
        }
        counted = {name: size if not copies or copied(lies[name], size) else 0.0 for name, size in nbytes.items()}
        buckets = gradient_buckets(
            self._in_turn(ops[::-1]), alike=lambda op: lies[op.name].gathered, nbytes=lambda op: nbytes[op.name]
        )
        return max((sum(counted[op.name] for op in members) for members in buckets), default=0.0)

    def _in_turn(self, ops: Sequence[Op]) -> Iterator[Op]:
        """The parameters among `ops` that this place holds, in order; those of a run of blocks block by block, once for
        each block of the place."""
        for _, block in itertools.groupby((op for op in ops if self.counts[op.name]), key=lambda op: op.scope):
            members = list(block)
            yield from members * max(self.counts[op.name] for op in members)
