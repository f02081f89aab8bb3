"""Gathers that begin ahead: learned in the first step, one block in front in both directions, exact, and as many as
before."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from autopar.runtime import Block, Mesh, Param, ShardedModule, count, gather, remat, reshard
from autopar.runtime.collectives import start_all_gather, start_all_reduce
from autopar.runtime.count import record
from tests.helpers.ranks import living

WIDTH, LAYERS = 4, 4
RERUN, PLAIN, TURNED = "run again", "kept", "turned, and cast"


def _model(how):
    """Blocks of two gathered weights, one of which ranks sum over as well (HSDP); marks say when a block computes,
    forward and back. `TURNED`: the first one is read with its dims the other way round, the second one rests in another
    dtype."""
    mesh = Mesh((2, 2), ("x", "y"), "cpu", behind=(0, 1))
    square = {"shape": (WIDTH, WIDTH), "mesh": mesh}

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            record("forward", -1, 0, name)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            record("backward", -1, 0, ctx.name)
            return grad, None

    class Layer(Block):
        PARAMS = {  # noqa: RUF012
            "a": Param((WIDTH, WIDTH), "float64", "S0,S1"),
            "b": Param((WIDTH, WIDTH), "float32" if how == TURNED else "float64", "R,S0", sync=(0,)),
        }

        def forward(self, h):
            if how == TURNED:
                a = gather(
                    self.w["a"], "S1,S0 -> R,R", grad="P,P -> S1,S0", name=f"{self.naming}.a", dims=(1, 0), **square
                )
                h = Mark.apply((h @ a).tanh(), self.naming)
                b = gather(
                    self.w["b"],
                    "R,S0 -> R,R",
                    grad="P,P -> P,S0",
                    name=f"{self.naming}.b",
                    casts=(torch.float64,),
                    **square,
                )
                return F.linear(h, b).tanh()
            a = gather(self.w["a"], "S0,S1 -> R,R", grad="P,P -> S0,S1", name=f"{self.naming}.a", **square)
            h = Mark.apply(F.linear(h, a).tanh(), self.naming)
            b = gather(self.w["b"], "R,S0 -> R,R", grad="P,P -> P,S0", name=f"{self.naming}.b", **square)
            return F.linear(h, b).tanh()

    class Model(ShardedModule):
        MESH = mesh
        INPUTS = {"x": "S0,S0"}  # noqa: RUF012
        OUTPUTS = (("loss", "loss"),)
        PARAMS = {  # noqa: RUF012
            "first": Param((WIDTH, WIDTH), "float64", "S0,S1"),
            "last": Param((WIDTH, WIDTH), "float64", "R,S1", sync=(0,)),
        }
        RUNS = {"layers": (Layer, [f"layers.{i}" for i in range(LAYERS)])}  # noqa: RUF012

        def forward(self, x):
            h = F.linear(
                x, gather(self.w["first"], "S0,S1 -> R,R", grad="P,P -> S0,S1", name="first", again=False, **square)
            )
            for block in self.runs["layers"]:
                h = remat(block, h) if how == RERUN else block(h)
            last = gather(self.w["last"], "R,S1 -> R,R", grad="P,P -> P,S1", name="last", **square)
            loss = F.linear(h, last).square().sum() + self.w["last"].square().sum() / 2  # autograd has a part of it too
            return (reshard(loss, "P,P -> R,R", grad="R,R -> R,R", shape=(), mesh=mesh),)

    torch.manual_seed(0)
    return Model


def _alone(state, x):
    whole = {name: value.double().clone().requires_grad_() for name, value in state.items()}
    h = F.linear(x, whole["first"])
    for i in range(LAYERS):
        h = F.linear(F.linear(h, whole[f"layers.{i}.a"]).tanh(), whole[f"layers.{i}.b"]).tanh()
    (F.linear(h, whole["last"]).square().sum() + whole["last"].square().sum()).backward()
    return {name: value.grad for name, value in whole.items()}


def _steps(how, limit_bytes):
    """Three steps of one rank, each compared with one device, with what it counted in order."""
    kind = _model(how)
    dtypes = {
        name: getattr(torch, info.dtype) for name, info in {**kind.PARAMS, **kind.RUNS["layers"][0].PARAMS}.items()
    }
    state = {
        name: (torch.randn(WIDTH, WIDTH, dtype=torch.float64) * 0.5).to(dtypes[name.rpartition(".")[2]])
        for name in ("first", *(f"layers.{i}.{w}" for i in range(LAYERS) for w in "ab"), "last")
    }
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    wanted = _alone(state, x)
    model = kind().load_full(state)
    model._sync.orders.ahead_bytes = limit_bytes
    found = []
    for _ in range(3):
        model.zero_grad()
        with count() as seen:
            model.train_step(*model.shard_batch(x))
        for name, grad in model.full_grads().items():
            close = 1e-12 if grad.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(
                grad.double(), wanted[name], rtol=close, atol=close, msg=lambda m, n=name: f"{n}: {m}"
            )
        found.append([(c.kind, c.name) for c in seen])
    return found


@pytest.mark.parametrize("how", [PLAIN, RERUN, TURNED])
@pytest.mark.parametrize("limit_bytes", [1, 300, 10**9])
def test_one_block_ahead_and_exact(how: str, limit_bytes: int) -> None:
    for first, second, third in living(4).run(_steps, how, limit_bytes):
        assert Counter(first) == Counter(second) == Counter(third) and second == third
        for step, ahead, soon in (
            (first, -1, -1),
            (second, {1: 1, 300: 2}.get(limit_bytes, LAYERS), {1: 1, 300: 1}.get(limit_bytes, LAYERS)),
        ):
            # over two axes: the first collective begins one block before the second
            early = max(ahead, soon + (soon > 0))
            for i in range(LAYERS):
                begun = Counter(
                    name for kind, name in step[: step.index(("forward", f"layers.{i}"))] if kind == "all_gather"
                )
                # the last layer of which it has begun; b is not needed yet
                wanted = {"a": max(i, i + soon), "b": max(i - 1, i + ahead)}
                for j in range(LAYERS):
                    assert begun[f"layers.{j}.b"] == (j <= wanted["b"]), (i, j, ahead)
                    assert begun[f"layers.{j}.a"] == (j <= wanted["a"]) + (j <= max(wanted["a"], i + early)), (
                        i,
                        j,
                        ahead,
                    )
                until = Counter(step[: step.index(("backward", f"layers.{i}"))])  # both directions: as many again
                for j in range(i) if ahead > 0 else ():
                    assert until["all_gather", f"layers.{j}.b"] == 1 + (j >= i - ahead), (i, j, ahead)
                    assert until["all_gather", f"layers.{j}.a"] == 2 + (j >= i - soon) + (j >= i - early), (i, j, ahead)


def _changing():
    """Parameters frozen and thawed between steps, evaluation in between, two forwards before a backward."""
    kind = _model(PLAIN)
    names = ("first", *(f"layers.{i}.{w}" for i in range(LAYERS) for w in "ab"), "last")
    state = {name: torch.randn(WIDTH, WIDTH, dtype=torch.float64) * 0.5 for name in names}
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    wanted = _alone(state, x)
    model = kind().load_full(state)
    batch = model.shard_batch(x)

    def right(factor: float, frozen: str = "") -> None:
        for name, grad in model.full_grads().items():
            if name == frozen:
                assert grad is None
            else:
                torch.testing.assert_close(
                    grad, factor * wanted[name], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
                )
        model.zero_grad()

    for frozen in ("", "layers.1.a", "layers.1.a", "", ""):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name != frozen)
        with torch.no_grad():
            before = model(*batch)
        assert torch.equal(
            model.train_step(*batch), next(iter(before.values())) if isinstance(before, dict) else before[0]
        )
        right(1.0, frozen)
    (sum(next(iter(v.values())) if isinstance(v := model(*batch), dict) else v[0] for _ in range(2))).backward()
    right(2.0)
    model.train_step(*batch)
    right(1.0)


def test_what_changes_between_steps_is_learned_anew() -> None:
    living(4).run(_changing)


def _crossing(_):
    """Two ranks begin what is in the background and what is not in different orders."""
    mesh = Mesh((2,), ("z",), "cpu", behind=(0,))
    mine = torch.full((3,), float(mesh.coord[0] + 1), dtype=torch.float64)
    begin = [lambda: start_all_gather(mine, 0, mesh, behind=True), lambda: start_all_reduce(10 * mine, 0, mesh)]
    begun = [begin[1](), begin[0]()][::-1] if mesh.coord[0] else [start() for start in begin]
    return [finish().tolist() for finish in begun[::-1]], mesh.group(0, behind=True) is mesh.group(0)


def test_what_compute_waits_for_does_not_wait_for_the_background() -> None:
    """In one group the two would take each other's data, or wait forever."""
    for (summed, gathered), same in living(2).run(_crossing, None):
        assert summed == [30.0] * 3
        assert gathered == [[1.0] * 3, [2.0] * 3]
        assert not same
