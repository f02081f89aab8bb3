"""Runs of alike blocks: what folds, what does not, and how weights of all instances are named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from passes import NORMALIZE, run
from passes.fold_repeats import body_of, fold_repeats, is_folded, targets
from passes.interpret import Interpret
from tests.helpers.export import B, assert_same, export_graph


class Block(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, h, mask):
        return h + self.down(torch.relu(self.up(h))) * mask


class Stack(nn.Module):
    def __init__(self, widths: list[int], leak: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(4, wide) for wide in widths)
        self.leak = leak

    def forward(self, x):
        mask = torch.sigmoid(x)
        kept = []
        for number, layer in enumerate(self.layers):
            x = layer(x, mask)
            if number == self.leak:
                kept.append(x.sum())
        return (x, *kept)


def folded(model, **meta):
    gm = run(export_graph(model, (), {"x": torch.randn(3, 4)}, {"x": {0: B}}), NORMALIZE)
    gm.meta.update(meta)
    return run(gm, (fold_repeats,))


def calls(gm):
    return [node for node in gm.graph.nodes if is_folded(node)]


def test_a_chain_folds_into_one_body():
    model = Stack([8] * 5)
    gm = folded(model)
    (call,) = calls(gm)
    assert call.meta["repeat"] == 5
    body = body_of(call)
    holders = [node for node in body.graph.nodes if node.op == "placeholder"]
    assert [holder.meta.get("port") for holder in holders] == ["carried", "invariant", None, None, None, None]
    weights = {holder.meta["fqn"]: holder.meta["fqns"] for holder in holders[2:]}
    assert sorted(weights) == ["down.bias", "down.weight", "up.bias", "up.weight"]
    assert weights["up.weight"] == [f"layers.{i}.up.weight" for i in range(5)]
    assert body.meta["class_name"] == "Block"
    assert holders[0].meta["requires_grad"] and not holders[1].meta["requires_grad"]
    assert not [node for node in gm.graph.nodes if node.op == "placeholder" and node.meta["role"] == "param"]
    assert_same(gm, model, {"x": torch.randn(3, 4)}, 1e-6)


@pytest.mark.parametrize(
    ("widths", "repeats", "periods"),
    [([8, 6] * 3, [3], [2]), ([8, 8, 8, 6, 6], [3, 2], [1, 1]), ([4, 8, 8, 6], [2], [1]), ([8, 6, 4], [], [])],
)
def test_periods_and_runs(widths, repeats, periods):
    model = Stack(widths)
    gm = folded(model)
    assert [call.meta["repeat"] for call in calls(gm)] == repeats
    assert [body_of(call).meta["period"] for call in calls(gm)] == periods
    assert_same(gm, model, {"x": torch.randn(3, 4)}, 1e-6)


def test_names_in_a_period():
    (call,) = calls(folded(Stack([8, 6] * 3)))
    names = {n.meta["fqn"]: n.meta["fqns"] for n in body_of(call).graph.nodes if "fqns" in n.meta}
    assert names["1.up.weight"] == [f"layers.{i}.up.weight" for i in (1, 3, 5)]


class Sums(Stack):
    """Adds up something of what every block gives, outside of the blocks, as losses of routers are."""

    def __init__(self, how: str, blocks: int = 4) -> None:
        super().__init__([8] * blocks)
        self.how = how

    def forward(self, x):
        mask, first = torch.sigmoid(x), x
        total, seen, read = x.new_zeros(()), [], []
        for layer in self.layers:
            x = layer(x, mask)
            match self.how:
                case "in the loop":
                    total = total + 0.1 * x.square().mean()
                case "two terms":
                    total = total + x.mean()
                    total = 0.5 * x.amax() + total
                case "of blocks themselves":
                    first = first + x
                case "stacked":
                    seen.append(x.square().mean(0))
                case "afterwards" | "summed up" | "averaged" | "to the loss":
                    seen.append(x.square().mean())
                case "read by the next block":
                    mask = x.sin()
                    total = total + mask.mean()
                case "partial sums are read":
                    total = total + x.mean()
                    read.append(total)
        loss = (total + x.exp().sum()) + x.sin().sum()
        match self.how:
            case "stacked":
                return x, loss, torch.stack(seen, -1).sum(-1)
            case "summed up":
                return x, loss, torch.stack(seen).sum()
            case "averaged":
                return x, loss, torch.stack(seen).mean()
            case "to the loss":
                for each in seen:
                    loss = loss + 0.1 * each
                return x, loss
        return (x, loss, loss + sum(seen) + first.sum(), *read)


@pytest.mark.parametrize(
    ("how", "repeats"),
    [
        ("in the loop", [4]),
        ("two terms", [4]),
        ("read by the next block", [4]),
        ("not at all", [4]),  # what is added after the blocks is no sum over them
        ("of blocks themselves", [3]),  # the first block reads what the sum begins with
        ("afterwards", [3]),  # the sum begins with what the first block gives: it adds nothing
        ("stacked", [3]),
        ("summed up", [3]),
        ("averaged", [3]),
        ("to the loss", [3]),
        ("partial sums are read", []),
    ],
)
def test_a_sum_over_the_blocks_is_carried(how, repeats):
    model = Sums(how)
    gm = folded(model)
    assert [call.meta["repeat"] for call in calls(gm)] == repeats
    assert_same(gm, model, {"x": torch.randn(3, 4)}, 1e-6)


class Anew(Stack):
    """Computes what is the same for all blocks once more for each of them; `how` is applied to it."""

    def __init__(self, how) -> None:
        super().__init__([8] * 4)
        self.scale, self.how = nn.Parameter(torch.rand(4)), how

    def forward(self, x):
        start = x
        for layer in self.layers:
            x = layer(x, self.how((start * self.scale)[:, None].sigmoid().sum(1)))
        return x


@torch.library.custom_op("autopar_tests::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    """An operator of a user's own, which may draw random numbers."""
    return x.clone()


same.register_fake(torch.empty_like)
same.register_autograd(lambda context, grad: grad)


@pytest.mark.parametrize(("how", "repeats"), [(torch.cos, [4]), (nn.functional.dropout, []), (lambda x: same(x), [])])
def test_what_is_computed_anew_for_each_block_is_computed_once(how, repeats):
    """But for random draws, of which each is another one."""
    model = Anew(how)
    gm = folded(model)
    assert [call.meta["repeat"] for call in calls(gm)] == repeats
    assert len([node for node in gm.graph.nodes if node.target is torch.ops.aten.sigmoid.default]) == 1
    if how is not nn.functional.dropout:
        assert_same(gm, model, {"x": torch.randn(3, 4)}, 1e-6)


class AddsOutside(nn.Module):
    """Residual sums in the code around the blocks: of two layers in each, or of blocks with a scale and dropout."""

    def __init__(self, parts):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4) for _ in range(parts)) if parts > 1 else nn.Linear(4, 4) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                x = x + nn.functional.dropout(0.5 * layer(x).tanh(), 0.0)
            else:
                for part in layer:
                    x = part(x).tanh() + x
        return x.exp() + x


@pytest.mark.parametrize("parts", [1, 2])
def test_residual_sums_around_the_blocks_are_part_of_them(parts):
    model = AddsOutside(parts)
    gm = folded(model)
    assert [call.meta["repeat"] for call in calls(gm)] == [4]
    assert_same(gm, model, {"x": torch.randn(3, 4)}, 1e-6)


class ReadsRows(Block):
    """Writes rows of a table, which it takes a view of."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__(width, wide)
        self.register_buffer("at", torch.tensor([1, 0]))

    def forward(self, h, mask):
        h = super().forward(h, mask)
        h[self.at] = mask[:2]
        return h


def test_equal_views_in_several_blocks_are_outside_of_them():
    model = Stack([8] * 4)
    model.layers = nn.ModuleList(ReadsRows(4, 8) for _ in range(4))
    gm = folded(model)
    assert [call.meta["repeat"] for call in calls(gm)] == [4]
    assert_same(gm, model, {"x": torch.randn(3, 4)}, 1e-6)


@pytest.mark.parametrize(("leak", "repeats"), [(3, [4]), (1, [2, 2]), (2, [3])])
def test_a_result_that_is_used_outside_ends_the_run(leak, repeats):
    model = Stack([8] * 4, leak=leak)
    gm = folded(model)
    assert [call.meta["repeat"] for call in calls(gm)] == repeats
    assert_same(gm, model, {"x": torch.randn(3, 4)}, 1e-6)


def test_a_weight_that_another_block_shares_does_not_fold():
    model = Stack([8] * 3)
    model.layers[2].up.weight = model.layers[0].up.weight
    gm = folded(model)
    assert [call.meta["repeat"] for call in calls(gm)] == []
    assert_same(gm, model, {"x": torch.randn(3, 4)}, 1e-6)


def test_a_weight_that_all_blocks_share_is_invariant():
    model = Stack([8] * 3)
    for layer in model.layers:
        layer.up.weight = model.layers[0].up.weight
    gm = folded(model)
    (call,) = calls(gm)
    assert [n.meta["fqn"] for n in body_of(call).graph.nodes if "fqns" in n.meta] == [
        "up.bias",
        "down.weight",
        "down.bias",
    ]
    assert_same(gm, model, {"x": torch.randn(3, 4)}, 1e-6)


class Again(Stack):
    """One block, called several times (ALBERT), and an activation after each call."""

    def __init__(self, path: str) -> None:
        super().__init__([8])
        self.block, self.act, self.path = Block(4, 8), nn.Tanh(), path

    def forward(self, x):
        mask = torch.sigmoid(x)
        for _ in range(4):
            x = self.act(self.get_submodule(self.path)(x, mask))
        return x


@pytest.mark.parametrize(("path", "name"), [("block", "block_1"), ("layers.0", "layers_0_1")])
def test_calls_of_one_module_fold(path, name):
    """All but the first, whose input no activation gave."""
    model = Again(path)
    gm = folded(model)
    (call,) = calls(gm)
    assert (call.target, call.meta["repeat"], call.meta["module"]) == (name, 3, path)
    assert body_of(call).meta["class_name"] == "Block"
    assert not [n for n in body_of(call).graph.nodes if "fqns" in n.meta]
    assert_same(gm, model, {"x": torch.randn(3, 4)}, 1e-6)


class Counts(nn.Module):
    """Changes two buffers of its own and, maybe, one that all share."""

    def __init__(self, shared=None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4) if shared is None else shared)

    def forward(self, h, mask):
        self.seen.add_(h.detach().sum(0))
        return h + self.norm(h) * self.seen


def counting(blocks):
    model = Stack([])
    model.layers = nn.ModuleList(blocks)
    return model


def test_new_values_of_buffers_leave_the_body_per_instance():
    model = counting([Counts() for _ in range(5)])  # the first is fed a value without gradient: its detach is dropped
    gm = folded(model)
    (call,) = calls(gm)
    body = body_of(call)
    assert call.meta["repeat"] == 4 and len(call.meta["val"]) == 1
    names = ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "seen"]
    assert sorted(entry["target"] for entry in body.meta["outputs"] if entry["kind"] == "mutation") == names
    assert sorted(map(tuple, targets(body))) == [tuple(f"layers.{i}.{name}" for i in range(1, 5)) for name in names]
    assert sorted(e["target"] for e in gm.meta["outputs"] if e["kind"] == "mutation") == [
        f"layers.0.{name}" for name in names
    ]
    x = torch.randn(5, 4)
    weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
    runner = Interpret(gm, weights)
    out = runner.run_named({"x": x})[0]
    torch.testing.assert_close(out, model(x)[0])
    after = {name: t for name, t in model.state_dict().items() if not torch.equal(t, weights[name])}
    assert sorted(after) == sorted(runner.changed) and len(after) == 20
    for name, value in after.items():
        torch.testing.assert_close(runner.changed[name], value)


def test_a_buffer_that_all_blocks_change_is_not_folded_away():
    shared = torch.zeros(4)
    model = counting([Counts(shared) for _ in range(4)])
    gm = folded(model)
    weights = {name: t.detach().clone() for name, t in model.named_buffers(remove_duplicate=False)} | dict(
        model.named_parameters()
    )
    x = torch.randn(5, 4)
    runner = Interpret(gm, weights)
    out = runner.run_named({"x": x})[0]
    torch.testing.assert_close(out, model(x)[0])
    torch.testing.assert_close(next(v for n, v in runner.changed.items() if n.endswith("seen")), shared)


def test_a_shortened_container_stands_for_all_its_blocks():
    (call,) = calls(folded(Stack([8] * 2), repeat_counts={"layers": [(0, 1, 2, 32)]}))
    assert call.meta["repeat"] == 32
    weight = next(n for n in body_of(call).graph.nodes if n.meta.get("fqn") == "down.weight")
    assert weight.meta["fqns"] == [f"layers.{i}.down.weight" for i in range(32)]


def test_a_shortened_container_that_does_not_fold_is_an_error():
    with pytest.raises(ValueError, match=r"layers from 0 on were captured as 2 for 32"):
        folded(Stack([8, 6]), repeat_counts={"layers": [(0, 1, 2, 32)]})


class Pairs(nn.Module):
    """One encoder for questions and for texts, which are made where the questions are done; or of these."""

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self.encoder, self.up, self.after = Stack([8] * 3), nn.Linear(4, 4), after

    def forward(self, x):
        questions = self.encoder(x)[0].relu()
        (texts,) = self.encoder(self.up(questions if self.after else x))
        return questions * texts


@pytest.mark.parametrize(("after", "found"), [(False, [3]), (True, [])])
def test_blocks_that_are_passed_twice_fold_where_both_passes_can_go_together(after, found):
    model = Pairs(after=after)
    gm = folded(model)
    assert [call.meta["repeat"] for call in calls(gm)] == found
    assert_same(gm, model, {"x": torch.randn(5, 4)})
