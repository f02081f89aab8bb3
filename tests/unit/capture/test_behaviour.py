"""What capture promises beside the graph: nothing of the model is touched, sizes are symbolic, names and structure
survive."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture import export as exporting
from autopar.errors import CaptureError
from passes import facts
from passes.interpret import Interpret
from tests.helpers.blocks import Stack, batch, blocks
from tests.helpers.captures import output_names


class Net(nn.Module):
    """Logits [b, s, 11] of ids [b, s], tied to the embedding; `temperature` is a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("shift", torch.arange(8.0), persistent=False)

    def forward(self, ids, *, temperature=None):
        logits = self.head(self.embed(ids) * self.frozen + self.shift + torch.tensor([0.5]))
        return {
            "logits": logits if temperature is None else logits / temperature,
            "extra": (logits.sum(), [logits.mean()]),
        }


def loss_fn(outputs, labels):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def ids(rows=4, length=6):
    generator = torch.Generator().manual_seed(rows * 100 + length)
    return torch.randint(11, (rows, length), generator=generator), torch.randint(
        11, (rows, length), generator=generator
    )


def weights(model, captured):
    return dict(model.named_parameters()) | dict(model.named_buffers()) | dict(captured.constants)


def placeholders(captured):
    return {n.meta["fqn"]: n for n in captured.gm.graph.nodes if n.meta.get("role") in ("param", "buffer", "constant")}


@pytest.mark.parametrize("sizes", [(4, 6), (1, 6), (6, 6), (2, 1), (1, 1)])
def test_a_loss_outside_the_model_at_any_size(sizes):
    model = Net().double()
    captured = capture(model, ids(*sizes), loss_fn=loss_fn)
    assert output_names(captured)[0] == "loss"
    for at in (sizes, (3, 5), (7, 4)):
        if sizes[1] == 1 and at[1] != 1:
            continue  # a sequence of one token is captured as such
        tokens, labels = ids(*at)
        got = Interpret(captured.gm, weights(model, captured)).run_named(
            dict(zip(captured.input_names, (tokens, labels), strict=True))
        )
        torch.testing.assert_close(got[0], loss_fn(model(tokens), labels), rtol=1e-12, atol=1e-12)


def test_sizes_are_symbols_and_hints_are_the_users_sizes():
    captured = capture(Net(), ids(4, 6), loss_fn=loss_fn)
    assert dict(captured.hints) == {"b": 4, "s": 6}
    shapes = [tuple(map(str, facts.shape(n))) for n in captured.gm.graph.nodes if n.meta.get("role") == "input"]
    assert shapes == [("b", "s"), ("b", "s")]


def test_an_example_batch_of_one_stays_a_symbol_that_any_batch_fits():
    """torch.export makes a constant of a size of 1."""
    net = Net()
    captured = capture(net, ids(1, 6), loss_fn=loss_fn)
    assert dict(captured.hints) == {"b": 1, "s": 6}
    held = {**dict(net.named_parameters(remove_duplicate=False)), **captured.constants}
    for rows in (1, 4):
        given = dict(zip(captured.input_names, ids(rows, 6), strict=True))
        (loss,) = [
            v
            for v, about in zip(Interpret(captured.gm, held).run_named(given), captured.gm.meta["outputs"], strict=True)
            if about["kind"] == "loss"
        ]
        torch.testing.assert_close(loss, loss_fn(net(ids(rows, 6)[0]), ids(rows, 6)[1]))


def test_tied_frozen_and_constant_tensors():
    model = Net()
    captured = capture(model, ids(), loss_fn=loss_fn)
    held = placeholders(captured)
    assert captured.aliases == {"head.weight": "embed.weight"}
    assert "head.weight" not in held
    assert held["embed.weight"].meta["requires_grad"] and not held["frozen"].meta["requires_grad"]
    literals = [name for name, node in held.items() if node.meta["role"] == "constant"]
    assert all(name in captured.constants for name in [*literals, "shift"])
    assert captured.fleeting == ("shift",)


def test_the_structure_of_the_outputs_is_kept():
    captured = capture(Net(), ids()[:1], mode="inference")
    assert captured.structure == {"logits": 0, "extra": (1, (2,))}
    assert output_names(captured) == ("logits", "extra.0", "extra.1.0")


def test_keyword_inputs_in_any_order():
    model = Net().double()
    temperature = torch.full((4, 1, 1), 2.0, dtype=torch.float64)
    captured = capture(model, (), {"temperature": temperature, "ids": ids()[0]}, mode="inference")
    got = Interpret(captured.gm, weights(model, captured)).run_named({"ids": ids()[0], "temperature": temperature})
    torch.testing.assert_close(got[0], model(ids()[0], temperature=temperature)["logits"], rtol=1e-12, atol=1e-12)
    assert set(captured.input_names) == {"ids", "temperature"}


def test_dims_named_by_the_user():
    captured = capture(Net(), ids()[:1], mode="inference", dynamic_shapes=(({0: "rows"},), {}))
    assert dict(captured.hints) == {"rows": 4}
    captured = capture(Net(), ids()[:1], mode="inference", dynamic_shapes=(({0: torch.export.Dim("n"), 1: "t"},), {}))
    assert dict(captured.hints) == {"n": 4, "t": 6}


@pytest.mark.parametrize("given", [(), (({0: "rows"}, {0: "rows"}, {0: "rows"}), {}), (({5: "rows"},), {}), "rows"])
def test_dims_that_do_not_fit_the_inputs(given):
    with pytest.raises(CaptureError, match=r"dynamic_shapes.*wanted"):
        capture(Net(), ids()[:1], mode="inference", dynamic_shapes=given)


def test_a_dim_that_the_model_fixes_is_static_and_said():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(6, 8))
            self.embed = nn.Embedding(11, 8)

        def forward(self, tokens):
            return (self.embed(tokens) + self.table).sum()

    captured = capture(Fixed(), ids()[:1])
    assert dict(captured.hints) == {"b": 4}
    (note,) = captured.notes
    assert note.startswith("s is static")
    shapes = [tuple(map(str, facts.shape(n))) for n in captured.gm.graph.nodes if n.meta.get("role") == "input"]
    assert shapes == [("b", "6")]


def test_inputs_of_one_batch_have_one_size_where_nothing_compares_them():
    """Two views of the same samples, one behind the other, as contrastive losses have them."""

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(8, 4)

        def forward(self, one, other):
            found = torch.nn.functional.normalize(torch.cat([self.map(one), self.map(other)]), dim=-1)
            return (found @ found.T).exp().sum().log()

    captured = capture(Views(), (torch.randn(4, 8), torch.randn(4, 8)))
    assert {
        str(size)
        for node in captured.gm.graph.nodes
        if facts.is_tensor(node)
        for size in facts.shape(node)
        if not isinstance(size, int)
    } == {"b", "2*b"}


def test_nothing_of_the_model_is_touched():
    model = Stack(blocks("rrrrrr"))
    calls = []
    model.layers[2].register_forward_hook(lambda *_: calls.append(1))
    model.eval()
    model.layers[1].train()
    before = copy.deepcopy(model.state_dict())
    identities = [id(p) for p in model.parameters()]
    flags = [m.training for m in model.modules()]
    hooks = [dict(m._forward_hooks) for m in model.modules()]
    capture(model, batch())
    assert [id(p) for p in model.parameters()] == identities
    assert [m.training for m in model.modules()] == flags
    assert [dict(m._forward_hooks) for m in model.modules()] == hooks
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_forward_hooks_are_part_of_the_model():
    model = Stack(blocks("rr")).double()
    model.layers[1].register_forward_hook(lambda module, args, result: result * 3)
    captured = capture(model, tuple(t.double() for t in batch()))
    x, y = (t.double() for t in batch(5))
    got = Interpret(captured.gm, weights(model, captured)).run_named(
        dict(zip(captured.input_names, (x, y), strict=True))
    )
    torch.testing.assert_close(got[0], model(x, y)["loss"], rtol=1e-12, atol=1e-12)


def test_a_part_that_evaluates_in_a_model_that_trains_stays_so():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)).train()
    model[1].eval()
    captured = capture(model, (torch.zeros(3, 4), torch.zeros(3, 4)), loss_fn=lambda out, y: ((out - y) ** 2).mean())
    assert len([n for n in captured.gm.graph.nodes if "dropout" in str(n.target)]) == 1


def test_a_model_on_meta_inside_a_meta_context():
    with torch.device("meta"):
        captured = capture(Stack(blocks("rrrrr")), batch())
        whole = capture(Net(), ids(), loss_fn=loss_fn)
    assert captured.constants == {} and captured.hints["b"] == 6
    assert whole.constants["shift"].tolist() == list(range(8)) and not whole.notes


def test_the_hash_is_of_what_is_computed():
    plain = capture(Stack(blocks("rrrrr")), batch()).graph_hash
    assert capture(Stack(blocks("rrrrr")), batch(9)).graph_hash == plain
    with torch.device("meta"):
        assert capture(Stack(blocks("rrrrr")), batch()).graph_hash == plain
    others = [Stack(blocks("rrrrrr")), Stack(blocks("rrrrt")), Stack(blocks("rrrrr")).double()]
    assert len({plain, *(capture(model, batch()).graph_hash for model in others[:2])}) == 3


def test_a_graph_is_the_same_with_torchs_cache_of_fake_tensors_and_without_it(monkeypatch):
    def made():
        gm = capture(Net(), ids(), loss_fn=loss_fn).gm
        return [
            (str(n.target), len(n.all_input_nodes), [(t.shape, t.dtype) for t in facts.tensors(n)])
            for n in gm.graph.nodes
            if n.op == "call_function"
        ]

    without = made()
    monkeypatch.setattr(exporting, "CACHED_MODULES", 0)
    assert [str(item) for item in made()] == [str(item) for item in without]


def test_code_of_a_graph_is_there_when_it_is_asked_for():
    assert "torch.ops.aten.linear.default" in capture(Net(), ids(), loss_fn=loss_fn).gm.code


def test_no_loss_in_train_mode():
    with pytest.raises(
        CaptureError, match=r"Logits gives no scalar loss in train mode, got outputs .*logits.*loss_fn="
    ):
        capture(Logits(), ids()[:1])


def test_without_a_loss_buffers_are_not_called_outputs() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return self.linear(x)

    with pytest.raises(CaptureError, match=r"got outputs output float32\[b, 4\]:"):
        capture(Counted(), (torch.ones(2, 4),))


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, tokens):
        return {"logits": self.net(tokens)["logits"]}


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:  # the line that cannot be exported
            return self.linear(x).sum()
        return x.sum()


def test_a_model_that_cannot_be_exported_names_the_line():
    with pytest.raises(
        CaptureError, match=r"(?s)Branches cannot be exported: .*test_behaviour.py:\d+: if x.sum\(\) > 0.*rewrite"
    ):
        capture(Branches(), (torch.zeros(3, 4),))


class TwoMasks(Branches):
    def forward(self, x, y):
        return nn.functional.mse_loss(self.linear(x)[y > 0], x[y + 1 > 1])


def test_the_error_is_the_models_and_not_that_of_guessed_sizes():
    """Of labels the second dim is taken for the sequence, of floating inputs first not: then masks do not fit."""
    with pytest.raises(CaptureError, match=r"(?s)TwoMasks cannot be exported: .*depends on the values.*mask once"):
        capture(TwoMasks(), (torch.zeros(3, 5, 4), torch.zeros(3, 5, dtype=torch.long)))


class Wrong(nn.Module):
    def forward(self, x):
        return (x @ torch.ones(5, 5)).sum()


def test_an_error_of_the_model_itself_names_its_line():
    with pytest.raises(
        CaptureError, match=r"(?s)Wrong does not run on these inputs.*test_behaviour.py:\d+: return \(x @"
    ):
        capture(Wrong(), (torch.zeros(3, 4),))


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, "'ids'"),
        ((torch.zeros(2, 2),) * 3, {}, "too many positional"),
        ((), {"tokens": torch.zeros(2, 2)}, "'ids'.* got 0 .*tokens"),
    ],
)
def test_inputs_that_forward_does_not_take(args, kwargs, text):
    with pytest.raises(CaptureError, match=rf"Net does not take these inputs.*{text}.*forward\(ids, \*, temperature"):
        capture(Net(), args, kwargs, mode="inference")


class Scaled(nn.Module):
    """Takes plain arguments, and has its own names for inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, images, scale=1.0, mask=None, *, deep=False):
        return self.linear(images) * scale


def test_names_of_inputs_and_weights_are_the_users_where_the_loss_is_outside():
    captured = capture(
        Scaled(),
        (torch.zeros(6, 4), 2.0, torch.zeros(6, 4)),
        {"deep": True},
        loss_fn=lambda out, wanted: ((out - wanted) ** 2).mean(),
    )
    assert captured.input_names == ("images", "wanted")
    assert [n.name for n in captured.gm.graph.nodes if n.op == "placeholder"] == [
        "p_linear_weight",
        "p_linear_bias",
        "images",
        "wanted",
    ]
    assert captured.fixed == {"scale": (1, 2.0), "deep": (3, True)}
    calls = [node.meta for node in captured.gm.graph.nodes if node.op == "call_function"]
    line = Scaled.forward.__code__.co_firstlineno + 1
    assert f"test_behaviour.py:{line}" in {meta["source"] for meta in calls}
    assert not any("/torch/" in meta.get("stack_trace", "") for meta in calls)
    same = capture(
        Scaled(), (torch.zeros(6, 4), torch.zeros(6, 4)), loss_fn=lambda out, images: ((out - images) ** 2).mean()
    )
    assert same.input_names == ("images", "images_target") and same.fixed == {}


class ReadsData(nn.Module):
    """Reads what it trains as `.data`, without gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        return (h * (1 + self.linear.weight.data.abs().mean()) + h.data.tanh()).square().mean()


def test_data_is_detached():
    model, x = ReadsData(), torch.randn(4, 8)
    captured = capture(model, (x,))
    assert not captured.constants
    (got,) = Interpret(captured.gm, weights(model, captured)).run_named({captured.input_names[0]: x})
    wanted, held = model(x), list(model.parameters())
    assert torch.allclose(got, wanted)
    for mine, theirs in zip(torch.autograd.grad(got, held), torch.autograd.grad(wanted, held), strict=True):
        assert torch.allclose(mine, theirs)
