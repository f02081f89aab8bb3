"""What of a sharded module needs no ranks: a mesh of one, names, outputs, random numbers, counters."""

from __future__ import annotations

import math
import pickle
from unittest import mock

import pytest
import torch

from autopar.errors import LayoutError, RunError
from autopar.runtime import Mesh, Outputs, Param, ShardedModule, count, main
from autopar.runtime.count import record
from autopar.runtime.gradient_buckets import Bucket
from autopar.runtime.gradsync import GradSync
from autopar.runtime.outputs import by_name, leaves, pack
from autopar.runtime.regather import gather
from autopar.runtime.reshard import arrow
from autopar.runtime.rng import Rng
from tests.helpers.emitted import Plain, batch, sharded


def _plain():
    torch.manual_seed(0)
    return Plain().double()


def test_a_compiler_of_the_whole_module_is_refused():
    model = sharded((1, 1))().double().load_full(_plain().state_dict())
    local = model.shard_batch(*batch())
    for call in (torch.compile(model.train_step, backend="eager"), model.compile):
        with pytest.raises(RunError, match=r"torch.compile of a sharded module .* model.module.compile_blocks\(\)"):
            call(*local)
    model.train_step(*local)


def test_a_mesh_of_one_runs_without_ranks():
    plain, model = _plain(), sharded((1, 1))().double().load_full(_plain().state_dict())
    whole = plain(*batch())
    with pytest.raises(RunError, match="full takes what a call of the model returned, and the model was not called"):
        model.full(whole)
    whole["loss"].backward()
    loss = model.train_step(*model.shard_batch(*batch()))
    torch.testing.assert_close(loss, whole["loss"].detach())
    for name, p in plain.named_parameters():
        if p.grad is None:
            assert model.get_parameter(name).grad is None
        else:
            torch.testing.assert_close(model.get_parameter(name).grad, p.grad)
    for kind in (math.inf, 2.0):
        norms = [
            model.clip_grad_norm_(0.5, kind),
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, kind),
        ]
        torch.testing.assert_close(*norms)
        assert norms[0] > 0.5 or kind == 2.0  # the first one clips


def test_a_tied_weight_loads_under_either_of_its_names():
    state = _plain().state_dict()
    for name in ("wte.weight", "head.weight"):
        model = sharded((1, 1))().double().load_full({other: value for other, value in state.items() if other != name})
        assert all(torch.equal(value, state[other]) for other, value in model.full_state_dict().items())
    with pytest.raises(RunError, match=r"missing: wte\.weight"):
        model.load_full({other: value for other, value in state.items() if other not in ("wte.weight", "head.weight")})


class Odd(ShardedModule):
    """Names that are attributes of ours, and a backward that fails."""

    MESH = Mesh((1,), ("x",), "cpu")
    INPUTS = {"x": "R"}  # noqa: RUF012
    OUTPUTS = (("output", "y"),)
    PARAMS = {"w": Param((2,), "float32", "R"), "runs.forward": Param((2,), "float32", "R")}  # noqa: RUF012

    def forward(self, x):
        return (self.spread(x * self.w["w"] * self.w["runs.forward"], "R", (2,)),)


def test_names_of_the_model_may_be_attributes_of_ours():
    model = Odd().load_full({"w": torch.tensor([1.0, 2.0]), "runs.forward": torch.tensor([3.0, 4.0])})
    assert list(dict(model.named_parameters())) == ["w", "runs.forward"] == list(model.state_dict())
    assert model(torch.ones(2)).y.tolist() == [3, 8]
    with pytest.raises(RunError, match="returns no loss"):
        model.train_step(torch.ones(2))


def test_a_failed_backward_leaves_nothing_behind():
    model = Odd().load_full({"w": torch.ones(2), "runs.forward": torch.ones(2)})
    first = model.w["w"]  # what comes last in a backward

    def fail(grad):
        raise ValueError("on purpose")

    def step(hook):
        y = model(torch.ones(2)).y
        handle = first.register_hook(fail) if hook else None
        try:
            y.sum().backward()
        finally:
            if handle:
                handle.remove()

    with pytest.raises(ValueError, match="on purpose"):
        step(hook=True)
    model.zero_grad()
    step(hook=False)
    assert dict(model.named_parameters())["w"].grad.tolist() == [1, 1]


class Keeps(ShardedModule):
    """Two buffers that take what it is given, of which one does in evaluation too, in front of its output and
    behind."""

    MESH = Mesh((1,), ("x",), "cpu")
    INPUTS = {"x": "R"}  # noqa: RUF012
    OUTPUTS = (("mutation", "last"), ("output", "y"), ("mutation", "always"))
    CHANGING = ("always",)
    PARAMS = {"w": Param((2,), "float32", "R")}  # noqa: RUF012
    BUFFERS = {"last": Param((2,), "float32", "R"), "always": Param((2,), "float32", "R")}  # noqa: RUF012
    results = 3

    def forward(self, x):
        y = self.spread(x * self.w["w"] * self.b["last"], "R", (2,))
        return (x, y, x)[: self.results]


def test_full_takes_all_outputs_and_says_so():
    """One of several was taken for the first one, and refused for its shape."""
    model = Keeps().load_full({"w": torch.ones(2), "last": torch.ones(2), "always": torch.ones(2)})
    out = model(torch.ones(2))
    for given in ((), (out.y, out.y)):
        with pytest.raises(RunError, match=rf"all that .* returned, 1 outputs \(y\), and was given {len(given)}: "):
            model.full(given)


def _kept(model):
    return {name: value.tolist() for name, value in model.named_buffers()}


def test_buffers_have_values_of_their_own():
    """They are nobody else's, whatever becomes of what they were made of, and part of the next step, also of what only
    was looked at."""
    model = Keeps().load_full({"w": torch.tensor([1.0, 2.0]), "last": torch.ones(2), "always": torch.ones(2)})
    x = torch.tensor([3.0, 4.0])
    out = model(x)
    assert list(out) == ["y"] and out.y.tolist() == [3, 8] == [float(y) for y in model.full(out).y]
    x.zero_()
    assert _kept(model) == {"last": [3, 4], "always": [3, 4]}
    dict(model.named_buffers())["last"].fill_(5)
    assert _kept(model) == {"last": [5, 5], "always": [3, 4]}
    with torch.inference_mode():
        assert model(torch.tensor([6.0, 7.0])).y.tolist() == [30, 70]
    model(torch.tensor([2.0, 1.0])).y.sum()
    assert model.eval()(torch.tensor([1.0, 1.0])).y.tolist() == [2, 2]
    assert _kept(model) == {"last": [2, 1], "always": [1, 1]} and model.train().training


def test_a_forward_that_returns_other_values_than_it_says_is_refused():
    model = Keeps().load_full({"w": torch.ones(2), "last": torch.ones(2), "always": torch.ones(2)})
    model.results = 2
    with pytest.raises(RunError, match=r"forward returned 2 values, wanted 3: \['last', 'y', 'always'\]"):
        model(torch.ones(2))
    assert _kept(model) == {"last": [1, 1], "always": [1, 1]}


class Gathers(ShardedModule):
    """Two weights that are gathered; the backward reaches `b` first."""

    MESH = Mesh((1,), ("x",), "cpu")
    INPUTS = {"x": "R"}  # noqa: RUF012
    OUTPUTS = (("loss", "loss"),)
    PARAMS = {"a": Param((2,), "float32", "R"), "b": Param((2,), "float32", "R")}  # noqa: RUF012
    fails = False

    def forward(self, x):
        h = x * gather(self.w["a"], "R -> R", grad="R -> R", shape=(2,), mesh=self.MESH)
        if self.fails:
            h.register_hook(lambda grad: [][0])
        return ((h * gather(self.w["b"], "R -> R", grad="R -> R", shape=(2,), mesh=self.MESH)).sum(),)


def test_gradients_on_their_way_in_a_backward_that_failed_are_none_of_the_next_one():
    model = Gathers().load_full({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])})
    for model.fails in (True, False, True, False):
        model.zero_grad()
        if model.fails:
            with pytest.raises(IndexError):
                model.train_step(torch.ones(2))
        else:
            model.train_step(torch.ones(2))
            assert {name: param.grad.tolist() for name, param in model.named_parameters()} == {"a": [3, 4], "b": [1, 2]}


class OnHost(ShardedModule):
    """A weight that rests in the memory of the host, whose gradients go after every microbatch."""

    MESH = Mesh((1,), ("x",), "cpu")
    PARAMS = {"w": Param((2,), "float32", "R", host=True, each=True)}  # noqa: RUF012


def test_what_waits_for_the_host_in_a_step_that_failed_is_none_of_the_next_one():
    model = OnHost()
    (held,) = model._held.values()
    sync = GradSync.watching(model._held, model.MESH, [])
    sync.deferred = True
    for fails, parts in ((True, [1.0, 2.0]), (False, [4.0, 8.0])):
        sync.renew(model._held.values())
        for part in parts:
            held.leaf.grad = torch.full((2,), part)
            sync.flush(each=True)
            assert held.tensor.grad is None
        if not fails:
            sync.flush()
    assert held.tensor.grad.tolist() == [12, 12]


def test_sums_of_a_step_that_failed_are_waited_for():
    """All ranks take part in them, and their memory is in use until they end."""
    sync, bucket = GradSync([], Mesh((1,), ("x",), "cpu")), Bucket((), (), sums=mock.Mock())
    sync.started = [bucket]
    sync.reset()
    bucket.sums.wait.assert_called_once_with()
    assert not sync.started


def test_outputs_follow_the_structure_of_the_model():
    built = pack({"loss": 1, "rest": [0, {"deep": 2}], "none": None, "flag": True}, "abc".__getitem__)
    assert built == {"loss": "b", "rest": ["a", {"deep": "c"}], "none": None, "flag": True}
    assert isinstance(built, Outputs) and built.rest[1].deep == "c"
    assert leaves(built) == ["b", "a", "c", None, True]
    assert by_name(("loss", "")) == {"loss": 0, "output1": 1}
    with pytest.raises(AttributeError, match="no output 'logits'; outputs are loss"):
        _ = Outputs(loss=1).logits


def test_random_draws_agree_on_replicas_only():
    def draw(rng, layout=("S0", "R"), coord=(0, 0), key="k"):
        return float(torch.rand((), generator=rng.generator(key, layout, coord, torch.device("cpu"))))

    assert draw(Rng(1)) == draw(Rng(1)) == draw(Rng(1), coord=(0, 1)) == draw(Rng(1), layout=("S3", "P"))
    assert (
        len({draw(Rng(1)), draw(Rng(2)), draw(Rng(1, step=1)), draw(Rng(1), key="l"), draw(Rng(1), coord=(1, 0))}) == 5
    )
    rng = Rng(1)
    first = draw(rng), draw(rng)
    rng.advance()
    assert len({*first, draw(rng)}) == 3


def test_counters_nest_and_stop():
    with count() as outer:
        record("slice", 0, 8)
        with count() as inner:
            record("all_gather", 1, 16, "w")
    record("mask", 0, 1)
    assert list(map(str, outer)) == ["slice axis 0 8 B", "all_gather axis 1 16 B w"] and inner == outer[1:]


def test_meshes_are_shared_and_checked():
    mesh = Mesh((1, 1), ("a", "b"), "cpu")
    assert Mesh([1, 1], ["a", "b"]) is mesh and pickle.loads(pickle.dumps(mesh)) is mesh
    assert mesh.coord == (0, 0) and mesh.local(7, (0, 1)) == 7
    with pytest.raises(RunError, match="one name per axis"):
        Mesh((2,), ("a", "b"))
    with pytest.raises(LayoutError, match="no change of layout"):
        arrow("S0,R")


def test_main_trains_and_prints(tmp_path, capsys):
    torch.save(dict(zip(("ids", "labels"), batch(), strict=True)), tmp_path / "batch.pt")
    arguments = ["--batch", str(tmp_path / "batch.pt"), "--lr", "0.01"]
    once, often = main(sharded((1, 1)), arguments), main(sharded((1, 1)), [*arguments, "--steps", "5"])
    assert often < once
    assert capsys.readouterr().out.count("step") == 6
    torch.save([1], tmp_path / "batch.pt")
    with pytest.raises(RunError, match="holds a list, wanted a dict with the inputs ids, labels"):
        main(sharded((1, 1)), arguments)


@pytest.mark.parametrize("option", ["--weights", "--batch"])
@pytest.mark.parametrize("kept", [0, 0.5, None], ids=["empty", "cut short", "missing"])
def test_files_that_cannot_be_read_are_named(tmp_path, option, kept):
    path = tmp_path / "given.pt"
    torch.save(Plain().state_dict(), path)
    data = path.read_bytes()
    if kept is None:
        path.unlink()
    else:
        path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(RunError, match=rf"{option} \S+given.pt cannot be read \(.*give a whole file that torch.save"):
        main(sharded((1, 1)), [option, str(path)])
