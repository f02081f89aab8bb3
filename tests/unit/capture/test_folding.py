"""Runs of alike blocks are shortened where that is proven to change nothing, and captured one by one where it is
not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu

from autopar.capture import block_runs, capture
from autopar.capture.chain import is_chain
from autopar.capture.shadow import shadow
from passes.interpret import Interpret
from tests.helpers.blocks import (
    Block,
    ByNumber,
    CallsPart,
    Collects,
    Counted,
    Heads,
    LooksInside,
    MaskOfOne,
    MasksByPlace,
    Mean,
    MeanAtRest,
    Middle,
    ReadsIndex,
    Scales,
    Stack,
    Twice,
    batch,
    blocks,
)


def at_rest(model):
    """The model with its layers set to evaluation."""
    model.layers.eval()
    return model


CHAINS = {
    "plain": (lambda: Stack(blocks("r" * 7)), [7]),
    "deeper": (lambda: Stack(blocks("r" * 30)), [30]),
    "pattern": (lambda: Stack(blocks("rrt" * 5)), [5]),
    "pattern of six": (lambda: Stack(blocks("rrrrrt" * 4)), [4]),
    "first differ": (lambda: Stack(blocks("tr" + "r" * 6)), [7]),
    "last differs": (lambda: Stack(blocks("r" * 6 + "t")), [6]),
    "two runs": (lambda: Stack(blocks("r" * 6 + "t" * 5)), [6, 5]),
    "pattern and rest": (lambda: Stack(blocks("rt" * 4 + "r")), [4]),
    "by number": (lambda: ByNumber(blocks("r" * 6)), [6]),
    "masks by place": (lambda: MasksByPlace(blocks("rt" * 5)), [5]),
    "looks inside": (lambda: LooksInside(blocks("r" * 6)), [6]),
}
NO_CHAINS = {
    "masks do not follow the pattern": (lambda: MasksByPlace(blocks("r" * 6)), "fed"),
    "mask of one": (lambda: MaskOfOne(blocks("r" * 6)), "fed"),
    "mean": (lambda: Mean(blocks("r" * 6)), "outer code depends on the number of blocks"),
    "mean at rest": (lambda: at_rest(MeanAtRest(blocks("r" * 6))), "outer code depends on the number of blocks"),
    "part of one": (lambda: CallsPart(blocks("r" * 6)), "outer code calls a part of a block"),
    "collects": (lambda: Collects(blocks("r" * 6)), "outer code depends on the number of blocks"),
    "middle": (lambda: Middle(blocks("r" * 6)), "outer code depends on the number of blocks"),
    "scales": (lambda: Scales(blocks("r" * 6)), "outer code depends on the number of blocks"),
    "reads its index": (lambda: Stack(blocks("r" * 6, ReadsIndex)), "blocks read their own number (ReadsIndex.index)"),
    "as many as there are": (lambda: Counted(blocks("r" * 6)), "the model does not run with fewer of them"),
    "twice": (lambda: Twice(blocks("r" * 6)), "not called once each"),
    "by number, with a gap": (lambda: ByNumber(blocks("r" * 6 + "t")), ""),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_shortened_and_stay_exact(name):
    make, counts = CHAINS[name]
    model = make().double()
    captured = capture(model, batch())
    assert [n.meta["repeat"] for n in captured.gm.graph.nodes if "repeat" in n.meta] == counts
    assert not captured.notes
    assert_same(captured, model)


@pytest.mark.parametrize("name", NO_CHAINS)
def test_what_is_no_chain_is_captured_whole(name):
    make, why = NO_CHAINS[name]
    model = make().double()
    captured = capture(model, batch())
    (note,) = captured.notes
    assert note.startswith("blocks of layers are captured one by one: ") and why in note
    assert_same(captured, model)


def test_lists_that_are_no_chains_leave_the_others_shortened():
    model = Heads(blocks("r" * 9)).double()
    captured = capture(model, batch())
    assert max(n.meta.get("repeat", 0) for n in captured.gm.graph.nodes) == 9
    assert [note.partition(" are captured one by one: ")[0] for note in captured.notes] == [
        "blocks of heads",
        "blocks of sides.*",
    ]
    assert_same(captured, model)


def test_blocks_of_a_model_that_runs_at_one_size_alone_are_shortened():
    """Outer code has a row for each sample, where chains are first tried at a size of their own."""

    class Rows(Stack):
        def walk(self, h):
            return super().walk(h + self.rows)

    model = Rows(blocks("r" * 7))
    model.rows = torch.nn.Parameter(torch.randn(9, 8))
    captured = capture(model, batch(9))
    assert [n.meta["repeat"] for n in captured.gm.graph.nodes if "repeat" in n.meta] == [7]
    assert not any("one by one" in note for note in captured.notes)


def assert_same(captured, model):
    weights = dict(model.named_parameters()) | dict(captured.constants)
    for rows in (6, 9):
        x, y = batch(rows)
        x, y = x.double(), y.double()
        loss, out = Interpret(captured.gm, weights).run_named(dict(zip(captured.input_names, (x, y), strict=True)))
        wanted = model(x, y)
        torch.testing.assert_close(out, wanted["out"], rtol=1e-12, atol=1e-12)
        parameters = list(model.parameters())
        for got, right in zip(
            torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted["loss"], parameters), strict=True
        ):
            torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_weights_that_nothing_reads_are_weights_of_their_blocks():
    """All of them, also of blocks that are not captured."""
    model = Stack(blocks("rt" * 4 + "r"))
    for number, layer in enumerate(model.layers):
        layer.register_parameter("spare", torch.nn.Parameter(torch.full((2,), float(number))))
    gm = capture(model, batch()).gm
    held = [
        node.meta.get("fqns", [node.meta["fqn"]])
        for part in (gm, *gm.children())
        for node in part.graph.find_nodes(op="placeholder")
        if "fqn" in node.meta
    ]
    assert sorted(name for names in held for name in names) == sorted(dict(model.named_parameters()))
    assert all(
        "layers.0." not in name for node in gm.graph.find_nodes(op="placeholder") for name in [node.meta.get("fqn", "")]
    )


def test_the_graph_does_not_grow_with_depth():
    sizes = [len(capture(Stack(blocks("r" * depth)), batch()).gm.graph.nodes) for depth in (5, 50)]
    assert sizes[0] == sizes[1]


def test_what_is_exported_does_not_grow_with_depth():
    model = Stack(blocks("t" + "rt" * 20 + "r" * 9))
    runs = block_runs.find(model)
    assert [(run.start, run.period, run.count) for run in runs] == [(0, 2, 21), (42, 1, 8)]
    kept = block_runs.kept(runs, "layers", 50)
    assert len(kept) < 14
    short = shadow(model, {"layers": kept})
    assert is_chain(model, short, runs, *meta()) == ""


def meta():
    return tuple(t.to("meta") for t in batch()), {}


def test_kept_children_have_the_numbers_under_which_they_are_shown():
    run = block_runs.AlikeRun("layers", 2, 2, 10)
    assert run.kept == {2: 2, 3: 3, 4: 4, 5: 5, 6: 20, 7: 21}
    assert block_runs.kept([run], "layers", 24) == {0: 0, 1: 1, **run.kept, 22: 22, 23: 23}
    assert [run.shown_as(n) for n in (2, 3, 4, 5, 6, 21)] == [2, 3, 4, 5, 4, 5]


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks: setattr(blocks[3], "scale", 0.5),
        lambda blocks: setattr(blocks[3], "options", {"scale": 0.5}),
        lambda blocks: blocks[3].linear.bias.requires_grad_(False),
        lambda blocks: blocks[3].register_forward_hook(lambda module, args, result: result * 2),
        lambda blocks: blocks[3].eval(),
        lambda blocks: setattr(blocks[3], "linear", torch.nn.Linear(8, 8, bias=False)),
        lambda blocks: setattr(blocks[5].linear, "weight", blocks[1].linear.weight),
    ],
    ids=["attribute", "dict", "frozen", "hook", "mode", "shape", "tied"],
)
def test_one_block_that_differs_ends_the_run(change):
    made = blocks("r" * 8)
    change(made)
    model = Stack(made)
    assert all(run.count < 8 for run in block_runs.find(model))
    captured = capture(model.double(), tuple(t.double() for t in batch()))
    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(captured.constants)
    x, y = (t.double() for t in batch(9))
    loss = Interpret(captured.gm, weights).run_named(dict(zip(captured.input_names, (x, y), strict=True)))[0]
    torch.testing.assert_close(loss, model(x, y)["loss"], rtol=1e-12, atol=1e-12)
    graphs = [captured.gm, *(child for _, child in captured.gm.named_children())]
    trained = {
        name: node.meta["requires_grad"]
        for gm in graphs
        for node in gm.graph.find_nodes(op="placeholder")
        if node.meta.get("role") == "param"
        for name in node.meta.get("fqns", [node.meta["fqn"]])
    }
    assert trained == {name: parameter.requires_grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("given", "other", "found"),
    [
        (lambda block: partial(gelu, approximate="tanh"), lambda block: partial(gelu, approximate="none"), [8]),
        (lambda block: partial(gelu, approximate="tanh"), lambda block: partial(sum, approximate="tanh"), [8]),
        (lambda block: block.forward, lambda block: block.linear.forward, [8]),
        (lambda block: object(), lambda block: object(), []),
    ],
    ids=["what a partial is given", "what it is of", "own method", "objects"],
)
def test_what_blocks_hold_is_compared_by_what_it_does(given, other, found):
    made = blocks("r" * 8)
    for block in made:
        block.held = given(block)
    assert [run.count for run in block_runs.find(Stack(made))] == found
    made[3].held = other(made[3])
    assert [run.count for run in block_runs.find(Stack(made))] == [4] * bool(found)


def test_blocks_that_share_everything_are_one_run():
    made = blocks("r" * 6)
    for block in made[1:]:
        block.linear = made[0].linear
    model = Stack(made).double()
    captured = capture(model, batch())
    assert [n.meta["repeat"] for n in captured.gm.graph.nodes if "repeat" in n.meta] == [6]
    assert_same(captured, model)


def test_fewer_blocks_than_would_be_kept_are_no_run():
    assert block_runs.find(Stack(blocks("rrr"))) == []
    assert len(block_runs.find(Stack(blocks("rrrr")))) == 1


class Net(torch.nn.Module):
    """Blocks that begin with a norm, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)) for _ in range(4)
        )
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


class Followed(torch.nn.Module):
    """A copy of a net follows its weights, taken in order."""

    def __init__(self) -> None:
        super().__init__()
        self.new, self.old = Net(), Net().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for new, old in zip(self.new.parameters(), self.old.parameters(), strict=False):
                old.data = 0.9 * old.data + 0.1 * new.data
        return (self.new(x) - self.old(x)).square().mean()


def test_lists_of_weights_that_go_together_are_whole():
    """With fewer blocks of one of them a bias was assigned what has the size of a weight, and the model refused."""
    captured = capture(Followed(), (torch.randn(6, 8),))
    assert any("assigns float32" in note for note in captured.notes)


def test_a_list_that_holds_one_block_many_times_is_left_alone():
    block = Block(0)
    model = Stack([block] * 6).double()
    assert_same(capture(model, batch()), model)
