"""Weights gathered again in the backward: freed in between, once per weight, through views, and never silently
stale."""

from __future__ import annotations

import time
import weakref

import pytest
import torch
from torch.nn import functional as F

from autopar.errors import RunError
from autopar.runtime import Mesh, Param, ShardedModule, count, gather, reshard
from autopar.runtime.cuts import own
from autopar.runtime.regather import regathering
from tests.helpers.ranks import on_ranks

SHAPE = (6, 5)


def _whole():
    torch.manual_seed(0)
    return torch.randn(SHAPE, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)


def _forward(x, w):
    y = F.linear(x, w)  # saves w, or a transposed view of it
    return (y @ w + (x @ w[1:4].t()).sum()).tanh().square().sum()


def _gathered(shard, x, mesh):
    w = gather(shard, "S0 -> R", grad="P -> S0", shape=SHAPE, mesh=mesh, name="w")
    alive = weakref.ref(w.untyped_storage())
    with count() as seen:
        loss = _forward(x, w)
    assert not seen
    return loss, alive, w.untyped_storage().nbytes()


def _exact():
    mesh = Mesh((2,), ("x",), "cpu")
    weight, x = _whole()
    whole = weight.clone().requires_grad_()
    _forward(x, whole).backward()
    wanted_x, x.grad = x.grad, None
    shard = own(weight, ("S0",), mesh.sizes, mesh.coord).clone().requires_grad_()
    with regathering():
        loss, alive, _ = _gathered(shard, x, mesh)
    deadline = time.monotonic() + 10  # the backend's thread lets go of its tensors a moment after the collective
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None, "the gathered weight must not live from forward to backward"
    for _ in range(2):  # a backward that keeps the graph can run again
        x.grad = shard.grad = None
        with count() as seen:
            loss.backward(retain_graph=True)
        torch.testing.assert_close(x.grad, wanted_x, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(
            shard.grad, own(whole.grad, ("S0",), mesh.sizes, mesh.coord) * 2, rtol=1e-13, atol=1e-13
        )
    return [str(c) for c in seen]


def test_gradients_are_exact_and_the_weight_is_freed_in_between():
    for seen in on_ranks(2, _exact):
        assert "all_gather axis 0 240 B w" in seen and seen.count("reduce_scatter axis 0 240 B w") == 1


def _once():
    mesh = Mesh((2,), ("x",), "cpu")
    weight, x = _whole()
    shard = own(weight, ("S0",), mesh.sizes, mesh.coord).clone().requires_grad_()
    with regathering(), count() as first:
        loss, _, _ = _gathered(shard, x, mesh)
    with count() as second:
        loss.backward()
    return [c.kind for c in first], [c.kind for c in second]


def test_one_gather_forward_and_one_backward():
    assert on_ranks(2, _once) == [(["all_gather"], ["all_gather", "reduce_scatter"])] * 2


def _outside():
    mesh = Mesh((2,), ("x",), "cpu")
    weight, x = _whole()
    shard = own(weight, ("S0",), mesh.sizes, mesh.coord).clone().requires_grad_()
    loss, alive, _ = _gathered(shard, x, mesh)
    assert alive() is not None
    with count() as seen:
        loss.backward()
    assert [c.kind for c in seen] == ["reduce_scatter"]


def test_outside_regathering_the_weight_is_kept():
    on_ranks(2, _outside)


def _stale():
    mesh = Mesh((2,), ("x",), "cpu")
    weight, x = _whole()
    shard = own(weight, ("S0",), mesh.sizes, mesh.coord).clone().requires_grad_()
    with regathering():
        loss, _, _ = _gathered(shard, x, mesh)
    with torch.no_grad():
        shard.mul_(2)
    with pytest.raises(RunError, match="weight w was modified between forward and backward"):
        loss.backward()


def test_a_changed_shard_is_an_error():
    on_ranks(2, _stale)


def _module(limit):
    class Twice(ShardedModule):
        """One weight gathered twice, one sharded on one axis and summed over the other (HSDP), one uneven."""

        MESH = Mesh((2, 2), ("x", "y"), "cpu")
        INPUTS = {"x": "S0,S0"}  # noqa: RUF012
        OUTPUTS = (("loss", "loss"),)
        PARAMS = {  # noqa: RUF012
            "a": Param((4, 4), "float64", "S0,S1"),
            "b": Param((4, 4), "float64", "R,S0", sync=(0,)),
            "c": Param((3, 4), "float64", "S0,S0"),
        }

        def forward(self, x):
            whole = {"grad": "P,P -> S0,S1", "shape": (4, 4), "mesh": self.MESH, "name": "a"}
            x = F.linear(x, gather(self.w["a"], "S0,S1 -> R,R", **whole)).tanh()
            x = F.linear(
                x, gather(self.w["b"], "R,S0 -> R,R", grad="P,P -> P,S0", shape=(4, 4), mesh=self.MESH, name="b")
            )
            x = F.linear(x, gather(self.w["a"], "S0,S1 -> R,R", **whole)).tanh()
            x = F.linear(
                x, gather(self.w["c"], "S0,S0 -> R,R", grad="P,P -> S0,S0", shape=(3, 4), mesh=self.MESH, name="c")
            )
            return (reshard(x.square().sum(), "P,P -> R,R", grad="R,R -> R,R", shape=(), mesh=self.MESH),)

    torch.manual_seed(0)
    state = {name: torch.randn(info.shape, dtype=torch.float64) for name, info in Twice.PARAMS.items()}
    x = torch.randn(8, 4, dtype=torch.float64)
    whole = {name: value.clone().requires_grad_() for name, value in state.items()}
    model = Twice().load_full(state)
    model._sync.scatters.limit_bytes = limit
    for _ in range(2):  # gradients accumulate
        y = F.linear(F.linear(F.linear(x, whole["a"]).tanh(), whole["b"]), whole["a"]).tanh()
        F.linear(y, whole["c"]).square().sum().backward()
        with count() as seen:
            model.train_step(*model.shard_batch(x))
    for name, grad in model.full_grads().items():
        torch.testing.assert_close(grad, whole[name].grad, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    steps = {name: sorted(c.kind for c in seen if c.name == name) for name in "abc"}
    # the first use needs no weight in the backward: x has no gradient
    assert steps["a"] == ["all_gather"] * 6 + ["reduce_scatter"] * 4
    assert steps["b"] == ["all_gather"] * 2 + ["all_reduce", "reduce_scatter"]
    assert steps["c"] == ["all_gather"] * 4 + ["reduce_scatter"] * 2


@pytest.mark.parametrize("limit", [1, 200, 10**9])
def test_gradients_scattered_in_the_background_are_exact(limit):
    on_ranks(4, _module, limit)


def _read_both_ways():
    class Tied(ShardedModule):
        """One weight that is read as it rests, and later gathered; between the two another one is gathered."""

        MESH = Mesh((2, 2), ("x", "y"), "cpu")
        INPUTS = {"x": "S0,R"}  # noqa: RUF012
        OUTPUTS = (("loss", "loss"),)
        PARAMS = {"a": Param((4, 4), "float64", "R,S0", sync=(0,)), "b": Param((4, 4), "float64", "S0,R")}  # noqa: RUF012

        def forward(self, x):
            x = reshard(
                F.linear(x, self.w["a"]), "S0,S1 -> S0,R", grad="S0,R -> S0,S1", shape=(8, 4), mesh=self.MESH
            ).tanh()
            x = F.linear(
                x, gather(self.w["b"], "S0,R -> R,R", grad="P,R -> S0,R", shape=(4, 4), mesh=self.MESH, name="b")
            ).tanh()
            x = F.linear(
                x, gather(self.w["a"], "R,S0 -> R,R", grad="P,R -> P,S0", shape=(4, 4), mesh=self.MESH, name="a")
            )
            return (reshard(x.square().sum(), "P,R -> R,R", grad="R,R -> R,R", shape=(), mesh=self.MESH),)

    torch.manual_seed(0)
    whole = {
        name: torch.randn(info.shape, dtype=torch.float64, requires_grad=True) for name, info in Tied.PARAMS.items()
    }
    x = torch.randn(8, 4, dtype=torch.float64)
    F.linear(F.linear(F.linear(x, whole["a"]).tanh(), whole["b"]).tanh(), whole["a"]).square().sum().backward()
    model = Tied().load_full(whole)
    # the gathered part is there, and its sum has begun, before autograd has the other one
    model._sync.scatters.limit_bytes = 1
    begun, begin = [], model._sync._start
    model._sync._start = lambda bucket: (begun.append(bool(model._sync.mixed)), begin(bucket))
    for _ in range(2):  # by the second step it is known that there are two parts
        model.zero_grad()
        model.train_step(*model.shard_batch(x))
        for name, grad in model.full_grads().items():
            torch.testing.assert_close(
                grad, whole[name].grad, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert begun == [False, True]


def test_a_part_of_a_gradient_that_comes_when_the_sum_has_begun_is_summed():
    on_ranks(4, _read_both_ways)
