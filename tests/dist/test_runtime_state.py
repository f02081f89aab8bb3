"""State in and out: checkpoints that load under another layout, whole tensors, batches, mutated buffers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn import functional as F

from autopar.errors import RunError
from autopar.runtime import Mesh, Param, ShardedModule, count, gather, reshard
from autopar.runtime.gradsync import GradSync
from tests.helpers.emitted import Plain, batch, sharded
from tests.helpers.ranks import on_new_ranks, on_ranks

WHOLE = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)


def _plain():
    torch.manual_seed(0)
    return Plain().double()


def _optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _trained(steps):
    plain = _plain()
    optimizer = _optimizer(plain)
    for _ in range(steps):
        optimizer.zero_grad()
        plain(*batch())["loss"].backward()
        optimizer.step()
    return plain


def _step(model, optimizer):
    optimizer.zero_grad()
    model.train_step(*model.shard_batch(*batch()))
    optimizer.step()


def _compare(model, plain, tolerance):
    for name, value in model.full_state_dict().items():
        if not name.endswith("qkv.bias"):  # its keys' part has gradient 0, which AdamW scales up from rounding
            torch.testing.assert_close(
                value, plain.state_dict()[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def _saved(folder):
    model = sharded((2, 2))().double().load_full(_plain().state_dict())
    optimizer = _optimizer(model)
    _step(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}, checkpoint_id=folder)


def _loaded(sizes, folder):
    model = sharded(sizes)().double()
    for p in model.parameters():
        p.detach().zero_()
    optimizer = _optimizer(model)
    state = {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # the unused parameter has no optimizer state yet
    dcp.load(state, checkpoint_id=folder, planner=planner)
    model.load_state_dict(state["model"])
    model.load_optimizer_state_dict(optimizer, state["optimizer"])
    _compare(model, _trained(1), 1e-9)
    _step(model, optimizer)
    _compare(model, _trained(2), 1e-9)


def test_checkpoint_of_model_and_optimizer_continues_under_another_mesh(tmp_path):
    folder = str(tmp_path / "saved")
    on_ranks(4, _saved, folder)
    on_ranks(4, _loaded, (1, 4), folder)
    on_ranks(2, _loaded, (2, 1), folder)


def _placed(layout):
    class Model(ShardedModule):
        MESH = Mesh((2,), ("rank",), "cpu")
        PARAMS = {"w": Param((4, 3), "float64", layout)}  # noqa: RUF012  as emitted code states it

    return Model().load_full({"w": WHOLE})


def _of_one_rank(folder, layout):
    """Save what rests on one rank, and load it where it rests with `layout`, and back."""
    placed, other = _placed("O1"), _placed(layout)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (placed, other)]
    for model, optimizer in zip((placed, other), optimizers, strict=True):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 2
        optimizer.step()
    wanted = other.full_state_dict()["w"]
    assert torch.equal(placed.full_state_dict()["w"], wanted) and not torch.equal(wanted, WHOLE)
    for number, (one, its) in enumerate(zip((placed, other), optimizers, strict=True)):
        then = _placed((layout, "O1")[number])
        its_own = torch.optim.AdamW(then.parameters(), 1e-2)
        saved, state = (
            {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
            for model, optimizer in ((one, its), (then, its_own))
        )
        assert torch.equal(saved["model"]["w"].full_tensor(), wanted)
        dcp.save(saved, checkpoint_id=f"{folder}{number}")
        dcp.load(state, checkpoint_id=f"{folder}{number}")
        then.load_state_dict(state["model"])
        then.load_optimizer_state_dict(its_own, state["optimizer"])
        assert torch.equal(then.full_state_dict()["w"], wanted)
        moment = then.optimizer_state_dict(its_own)["state"]["w"]["exp_avg"]
        torch.testing.assert_close(moment.full_tensor(), 0.1 * 2 * WHOLE, rtol=1e-12, atol=0)


@pytest.mark.parametrize("layout", ["S0", "R", "O1"])
def test_checkpoint_of_what_rests_on_one_rank(layout, tmp_path):
    on_ranks(2, _of_one_rank, str(tmp_path / "saved"), layout)


def _whole_tensors():
    plain, model = _plain(), sharded((2, 2))().double()
    assert not model.load_state_dict(plain.state_dict()).missing_keys
    got = model.full_state_dict()
    assert all(torch.equal(got[name], value) for name, value in plain.state_dict().items())
    broken = dict(plain.state_dict(), unused=torch.ones(4), extra=torch.ones(1))
    del broken["layers.1.up.weight"]
    with pytest.raises(
        RunError, match=r"missing: layers.1.up.weight; unknown: extra; wrong shape: unused: got \(4,\), wanted \(3,\)"
    ):
        model.load_full(broken)
    with pytest.raises(RunError, match=r"wrong shape: .*unused: got a int, wanted \(3,\)"):
        model.load_full({**plain.state_dict(), "unused": 1})
    with pytest.raises(RunError, match=r"unused: got \(3,\) on the meta device, without values, wanted \(3,\)"):
        model.load_full({**plain.state_dict(), "unused": torch.ones(3, device="meta")})
    wrapped = {f"_orig_mod.{name}": value for name, value in plain.state_dict().items()}
    with pytest.raises(RunError, match=r"names are there with '_orig_mod.' in front, .* give \{name.removeprefix\("):
        model.load_full(wrapped)
    del wrapped["_orig_mod.layers.1.up.weight"]
    with pytest.raises(RunError) as caught:
        model.load_full(wrapped)
    assert "in front" not in str(caught.value)  # one is missing with the prefix, too
    with pytest.raises(RunError, match="state is a list; wanted a state dict of the model"):
        model.load_full([plain])
    assert all(torch.equal(model.full_state_dict()[name], value) for name, value in plain.state_dict().items())


def test_whole_tensors_load_and_bad_ones_are_named():
    on_ranks(4, _whole_tensors)


def _unloaded():
    model = sharded((2, 2))()
    assert all(tensor.full_tensor().isnan().all() for tensor in model.parameters())
    assert model.train_step(*model.shard_batch(*batch())).isnan()
    model = sharded((2, 2))().load_full(_plain().state_dict())
    assert model.train_step(*model.shard_batch(*batch())).isfinite()


def test_weights_that_nothing_was_loaded_into_are_nan():
    """They were what the memory held: mostly zeros, on which a run that forgot its checkpoint trained without a
    word."""
    on_ranks(4, _unloaded)


def _other_states():
    plain, model = _plain(), sharded((2, 2))().double()
    model.load_full(plain.state_dict())
    optimizer = _optimizer(model)
    _step(model, optimizer)
    state, numbered = model.optimizer_state_dict(optimizer), optimizer.state_dict()
    before = {name: value["exp_avg"].full_tensor() for name, value in state["state"].items()}
    for made, wrong, said in (
        (optimizer, numbered, r"state is by number \([0-9, ]*...\), as optimizer.state_dict\(\) gives it"),
        (optimizer, None, "state is a NoneType; wanted what optimizer_state_dict"),
        (optimizer, {"model": 1}, r"state is a dict of \['model'\]; wanted"),
        (
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            state,
            "of another kind of optimizer than SGD: group 0 has .*betas.* and no .*momentum",
        ),
        (
            optimizer,
            torch.optim.SGD(model.parameters()).state_dict() | {"state": {}},
            "of another kind of optimizer than AdamW: group 0 has .*momentum.* and no .*betas",
        ),
        (_optimizer(plain), state, r"tensors that the optimizer steps are no parameters of the compiled model"),
        ("adamw", state, "optimizer is a str; wanted"),
    ):
        with pytest.raises(RunError, match=said):
            model.load_optimizer_state_dict(made, wrong)
    with pytest.raises(
        RunError,
        match=r"no parameters of the compiled model, .*make the optimizer of the compiled model's parameters\(\)",
    ):
        model.optimizer_state_dict(_optimizer(plain))
    del state["param_groups"][0]["maximize"]  # as another version of torch, which has not all options, saved it
    fresh = _optimizer(model)
    model.load_optimizer_state_dict(fresh, state)
    assert fresh.param_groups[0]["maximize"] is False and {
        name: torch.equal(value["exp_avg"].full_tensor(), before[name])
        for name, value in model.optimizer_state_dict(fresh)["state"].items()
    } == dict.fromkeys(before, True)
    _step(model, fresh)


def test_states_that_are_of_no_optimizer_of_the_model_are_refused():
    on_ranks(4, _other_states)


def _dampened():
    def made(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    plain, model, resumed = _plain(), sharded((2, 2))().double(), sharded((2, 2))().double()
    for one in (model, resumed):
        one.load_full(plain.state_dict())
    wanted, optimizer = made(plain), made(model)
    for step in range(3):  # each by a new optimizer, that of the first step from a state in which nothing has stepped
        fresh = made(resumed)
        resumed.load_optimizer_state_dict(fresh, model.optimizer_state_dict(optimizer))
        model, optimizer, resumed = resumed, fresh, model
        wanted.zero_grad()
        plain(*batch())["loss"].backward()
        wanted.step()
        _step(model, optimizer)
        resumed.load_full(model.full_state_dict())
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(
                value,
                plain.state_dict()[name],
                rtol=1e-12,
                atol=1e-12,
                msg=lambda text, name=name, step=step: f"{name}, step {step}: {text}",
            )


def test_momentum_that_dampens_begins_with_the_whole_gradient():
    """A state from before the first step had momentum of zeros, with which what goes on from it takes a part of its
    first gradient."""
    on_ranks(4, _dampened)


def _batches():
    model = sharded((2, 2))().load_full(_plain().state_dict())
    ids, labels = batch(5)
    with pytest.raises(RunError, match=r"'ids': dim 0 of size 5 does not divide by the 2 ranks .*use 4 or 6"):
        model.shard_batch(ids, labels)
    with pytest.raises(RunError, match="'ids' is on the meta device and has no values: give a batch that has"):
        model.shard_batch(ids[:4].to("meta"), labels[:4])
    with pytest.raises(RunError, match="missing inputs labels"):
        model(ids)
    with pytest.raises(RunError, match="'mask' is not an input"):
        model(ids, labels, mask=1)
    rows = 2 + model.MESH.coord[0]
    with pytest.raises(RunError, match="do not fit together"):
        model(ids[:rows], labels[:rows])


def test_bad_batches_are_errors_on_every_rank():
    on_ranks(4, _batches)


def _gradients(sums):
    """The numbers of elements that all-reduces of more than a loss have summed."""
    return [size for call in sums.call_args_list if (size := call.args[0].numel()) > 1]


def _buckets(limit):
    class Two(ShardedModule):
        MESH = Mesh((2, 2), ("x", "y"), "cpu")
        INPUTS = {"x": "S0,R"}  # noqa: RUF012
        OUTPUTS = (("loss", "loss"),)
        PARAMS = {  # noqa: RUF012
            f"w{i}": Param((4, 4), "float64", "R,R", sync=(0,) if i % 2 else (0, 1), each=i > 3) for i in range(6)
        }

        def forward(self, x):
            for i in range(5):  # w5 is not used
                x = F.linear(x, self.w[f"w{i}"]) * (1.0 if i % 2 else 0.5)
            return (reshard(x.square().sum(), "P,R -> R,R", grad="R,R -> R,R", shape=(), mesh=self.MESH),)

    torch.manual_seed(0)
    state = {f"w{i}": torch.randn(4, 4, dtype=torch.float64) for i in range(6)}
    x = torch.randn(4, 4, dtype=torch.float64)
    model = Two().load_full(state)
    model._sync = GradSync(list(model._held.values()), model.MESH, bucket_bytes=limit)
    # which begins with its last gradient: those of every microbatch wait for none of the end of a step
    for bucket in model._sync.buckets:
        assert len({held.info.each for held in bucket.members}) == 1
    for held in model._held.values():
        held.renew(model.MESH)
        model._sync.attach(held)
    started, finish = [], model._sync._finish
    model._sync._finish = lambda: (started.append(len(_gradients(sums))), finish())
    whole = {k: v.clone().requires_grad_() for k, v in state.items()}
    for _ in range(2):
        y = x
        for i in range(5):
            y = F.linear(y, whole[f"w{i}"]) * (1.0 if i % 2 else 0.5)
        y.square().sum().backward()
        with count() as seen, mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
            model.train_step(*model.shard_batch(x))
    used = [sum(held.name != "w5" for held in bucket.members) for bucket in model._sync.buckets]
    together = [16 * n for bucket, n in zip(model._sync.buckets, used, strict=True) if n for _ in bucket.moves]
    assert sorted(_gradients(sums)) == sorted(together)  # one for each bucket and axis
    full = sum(len(bucket.members) == n for bucket, n in zip(model._sync.buckets, used, strict=True))
    assert min(started) >= full > 0  # before the backward ends
    grads = model.full_grads()
    for i in range(5):  # sync over axis 1 as well sums the two equal replicas
        torch.testing.assert_close(grads[f"w{i}"], whole[f"w{i}"].grad * (1 if i % 2 else 2), rtol=1e-12, atol=1e-12)
    assert grads["w5"] is None
    synced = sorted((c.name, c.axis, c.bytes) for c in seen if c.name)
    assert synced == sorted((f"w{i}", axis, 128) for i in range(5) for axis in ((0,) if i % 2 else (0, 1)))


@pytest.mark.parametrize("limit", [1, 200, 10**9])
def test_gradients_are_exact_for_every_size_of_bucket(limit):
    on_ranks(4, _buckets, limit)


def _mutating():
    class Norm(ShardedModule):
        MESH = Mesh((2,), ("x",), "cpu")
        INPUTS = {"x": "S0"}  # noqa: RUF012
        OUTPUTS = (("output", "y"), ("mutation", "mean"))
        STRUCTURE = ("y", 0, None, False)
        PARAMS = {"w": Param((3,), "float64", "R", sync=(0,))}  # noqa: RUF012
        BUFFERS = {"mean": Param((3,), "float64", "R")}  # noqa: RUF012

        def forward(self, x):
            total = reshard(x.sum(0), "P -> R", grad=None, shape=(3,), mesh=self.MESH)
            y = (x * self.w["w"] * self.b["mean"]).sum(0)
            return self.spread(y, "P", (3,)), 0.5 * self.b["mean"] + total

    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = torch.ones(3, dtype=torch.float64)
    model = Norm().load_full({"mean": mean, "w": mean})
    for _ in range(3):
        part = model.shard_batch(x)[0]
        tag, y, nothing, done = model(part)
        assert tag == "y" and nothing is None and done is False
        torch.testing.assert_close(y.detach(), (x * mean).sum(0))
        *_, found, nothing, done = model.full((tag, y, nothing, done))
        assert nothing is None and done is False
        torch.testing.assert_close(found, y.detach())
        y.sum().backward()
        torch.testing.assert_close(model.full_grads()["w"], x.sum(0) * mean)
        model.zero_grad()
        mean = 0.5 * mean + x.sum(0)
        torch.testing.assert_close(model.state_dict()["mean"], mean)


def test_mutated_buffers_and_the_structure_of_outputs():
    on_ranks(2, _mutating)


def test_another_number_of_ranks_is_an_error():
    with pytest.raises(RunError, match="got 2, wanted 4"):
        on_new_ranks(2, sharded((2, 2)))
    with pytest.raises(RunError, match="is not initialised"):
        sharded((2, 2))()


def _strides():
    class Uneven(ShardedModule):
        MESH = Mesh((4,), ("x",), "cpu")
        INPUTS = {"x": "S0"}  # noqa: RUF012
        OUTPUTS = (("loss", "loss"),)
        PARAMS = {"w": Param((6, 10), "float64", "S1"), "v": Param((10, 6), "float64", "R", sync=(0,))}  # noqa: RUF012

        def forward(self, x):
            w = gather(self.w["w"], "S1 -> R", grad="P -> S1", shape=(6, 10), mesh=self.MESH, name="w")
            return (reshard((x @ w @ self.w["v"]).square().sum(), "P -> R", grad="R -> R", shape=(), mesh=self.MESH),)

    generator = torch.Generator().manual_seed(0)
    state = {n: torch.randn(*p.shape, dtype=torch.float64, generator=generator) for n, p in Uneven.PARAMS.items()}
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    whole = {n: t.clone().requires_grad_() for n, t in state.items()}
    model = Uneven().load_full(state)
    mine, theirs = torch.optim.AdamW(model.parameters(), fused=True), torch.optim.AdamW(whole.values())
    for _ in range(2):
        (x @ whole["w"] @ whole["v"]).square().sum().backward()
        model.train_step(*model.shard_batch(x))
        assert [p.grad.to_local().stride() for p in model.parameters()] == [
            p.to_local().stride() for p in model.parameters()
        ]
        mine.step()
        theirs.step()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, whole[name].detach(), rtol=1e-12, atol=1e-12)


def test_gradients_lie_in_memory_as_their_parameters_so_that_fused_optimizers_are_exact():
    on_ranks(4, _strides)
