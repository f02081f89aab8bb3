"""Gradients over two axes: each of the two collectives behind a block or a bucket of its own, exact, also after a
backward that failed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from autopar.runtime import Block, Mesh, Param, ShardedModule, count, gather, reshard
from autopar.runtime.count import record
from tests.helpers.ranks import living

WIDTH, LAYERS = 4, 5
GATHERED, SUMMED = "gathered over both axes", "summed in buckets"
FAILS = [False]  # whether the backward of layer 2 does


class Mark(torch.autograd.Function):
    """Notes when the backward comes to a layer."""

    @staticmethod
    def forward(ctx, x, name):
        """Nothing."""
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """Fails where it is to."""
        if FAILS[0] and ctx.name == "layers.2":
            raise ArithmeticError("asked for")
        record("backward", -1, 0, ctx.name)
        return grad, None


def _model(how):
    mesh = Mesh((2, 2), ("x", "y"), "cpu")
    rests = {"layout": "S0,S1"} if how == GATHERED else {"layout": "S0,R", "leaf": "R,R", "sync": (1,)}

    class Layer(Block):
        PARAMS = {"a": Param((WIDTH, WIDTH), "float64", **rests)}  # noqa: RUF012

        def forward(self, h):
            a = self.w["a"]
            if how == GATHERED:
                a = gather(
                    a, "S0,S1 -> R,R", grad="P,P -> S0,S1", shape=(WIDTH, WIDTH), mesh=mesh, name=f"{self.naming}.a"
                )
            return Mark.apply(F.linear(h, a).tanh(), self.naming)

    class Model(ShardedModule):
        MESH = mesh
        INPUTS = {"x": "S0,S0"}  # noqa: RUF012
        OUTPUTS = (("loss", "loss"),)
        RUNS = {"layers": (Layer, [f"layers.{i}" for i in range(LAYERS)])}  # noqa: RUF012

        def forward(self, h):
            for block in self.runs["layers"]:
                h = block(h)
            return (reshard(h.square().sum(), "P,P -> R,R", grad="R,R -> R,R", shape=(), mesh=mesh),)

    return Model


def _steps(how, limit_bytes, failing):
    """Four steps of SGD of one rank against one device, the third one failing first; what the last one counts, in
    order."""
    torch.manual_seed(0)
    names = [f"layers.{i}.a" for i in range(LAYERS)]
    state = {name: torch.randn(WIDTH, WIDTH, dtype=torch.float64) * 0.5 for name in names}
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    model = _model(how)().load_full(state)
    sync = model._sync
    sync.fill(list(sync.held_of.values()), 1)  # one bucket for each weight
    sync.scatters.limit_bytes = sync.sums.limit_bytes = limit_bytes
    sync.orders.ahead_bytes = 1
    alone = {name: value.clone().requires_grad_() for name, value in state.items()}
    batch = model.shard_batch(x)
    optimizers = [torch.optim.SGD(list(held), lr=1e-2) for held in (model.parameters(), alone.values())]
    for step in range(4):
        if failing and step == 2:
            FAILS[0] = True
            with pytest.raises(ArithmeticError):
                model.train_step(*batch)
            FAILS[0] = False
            model.zero_grad()
        h = x
        for name in names:
            h = F.linear(h, alone[name]).tanh()
        h.square().sum().backward()
        with count() as seen:
            model.train_step(*batch)
        for name, grad in model.full_grads().items():
            torch.testing.assert_close(
                grad, alone[name].grad, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not sync.scatters.waiting and not sync.sums.waiting and not sync.started
    return [(c.kind, c.name) for c in seen]


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize(("how", "second"), [(GATHERED, "reduce_scatter"), (SUMMED, "all_reduce")])
@pytest.mark.parametrize("limit_bytes", [1, 10**9])
def test_the_second_collective_begins_behind_the_next_block(
    how: str, second: str, limit_bytes: int, failing: bool
) -> None:
    for seen in living(4).run(_steps, how, limit_bytes, failing):
        for i in range(LAYERS):
            for later in range(LAYERS):
                until = Counter(seen[: seen.index(("backward", f"layers.{i}"))])
                begun = until["reduce_scatter", f"layers.{later}.a"] + until["all_reduce", f"layers.{later}.a"] * (
                    second == "all_reduce"
                )
                assert begun == (later > i) + (later > i + 1 and limit_bytes == 1), (i, later)
        ended = Counter(seen)
        assert all(ended["reduce_scatter", f"layers.{i}.a"] == 1 + (second == "reduce_scatter") for i in range(LAYERS))
        assert all(ended["all_reduce", f"layers.{i}.a"] == (second == "all_reduce") for i in range(LAYERS))
