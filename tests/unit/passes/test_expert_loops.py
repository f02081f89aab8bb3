"""Layers of experts that are written as loops: recognised in every spelling, and only where they are one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError
from passes import NORMALIZE, facts, ops, run
from tests.helpers.export import B, S, assert_same, check_values, export_graph, targets
from tests.helpers.loops import EXPERTS, HIDDEN, LOOPS, TOP, WIDTH, Gated, Looped, mistral, plain

INNER = {Gated: "halves(lambda first, second: F.silu(first) * second)", plain: "lambda x: F.gelu(x)"}


def normalized(model):
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 6, HIDDEN, dtype=torch.float64)}
    gm = run(export_graph(model.double(), (), inputs, {"x": {0: B, 1: S}}), NORMALIZE)
    return gm, inputs


def layers(gm):
    return [node for node in gm.graph.nodes if node.target is ops.experts]


@pytest.mark.parametrize("expert", INNER)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_over_experts_is_one_op_on_tokens_that_stay_apart(loop, expert):
    model = Looped(LOOPS[loop], expert)
    gm, inputs = normalized(model)
    check_values(gm)
    assert_same(gm, model, inputs, 1e-10)
    assert len(layers(gm)) == (TOP if loop == "by_rank" else 1)
    layer = layers(gm)[0]
    assert layer.args[ops.INNER] == INNER[expert] and len(layer.args) == ops.BIAS + (expert is plain)
    first = 2 * WIDTH if expert is Gated else WIDTH
    assert [facts.shape(node) for node in layer.args[3:5]] == [(EXPERTS, HIDDEN, first), (EXPERTS, WIDTH, HIDDEN)]
    assert [facts.rank(node) for node in layer.args[:3]] == [3, 3, 3] or loop in ("columns", "nonzero")
    assert sum(node.target is ops.bag for node in gm.graph.nodes) == len(layers(gm)) * (expert is plain)
    assert not {"aten.where.default", "aten.nonzero.default", "aten.index.Tensor"} & set(targets(gm))


def looped(
    number=int,
    gates=lambda gates, token, rank: gates[token, rank, None],
    chosen=lambda chosen: chosen,
    into=lambda out, token, rows: out.index_add(0, token, rows),
):
    """A loop that is not quite one over experts, by what is different."""

    def loop(hidden, weights, choice, experts):
        out, choice = torch.zeros_like(hidden), chosen(choice)
        for at, expert in enumerate(experts):
            token, rank = torch.where(choice == number(at))
            out = into(out, token, gates(weights, token, rank) * expert(hidden[token]))
        return out

    return loop


def put(out, token, rows):
    """Rows that are named twice are added once."""
    return out.index_put((token,), out[token] + rows)


def others(hidden, gates, chosen, experts):
    """Each expert adds to what all before it gave, of which it reads."""
    out = torch.zeros_like(hidden)
    for at, expert in enumerate(experts):
        token, rank = torch.where(chosen == at)
        out = out.index_add(0, token, gates[token, rank, None] * expert(hidden[token]))
        hidden = hidden + out.sum()
    return out


def over(
    gate=lambda gates, here, number: (gates * here).sum(-1),
    chosen=lambda chosen: chosen,
    into=lambda out, mask, rows: out.index_put((mask,), out[mask] + rows),
    start=torch.zeros_like,
):
    """A loop by masks of tokens that is not quite one over experts, by what is different."""

    def loop(hidden, gates, choice, experts):
        out, choice = start(hidden), chosen(choice)
        for number, expert in enumerate(experts):
            here = choice == number
            mask = here.any(-1)
            out = into(out, mask, expert(hidden[mask]) * gate(gates, here, number)[mask].unsqueeze(-1))
        return out

    return loop


def written(out, mask, rows):
    """Rows are written, not added."""
    return out.index_put((mask,), rows)


def of_another(gates, here, number):
    """The gates of the expert before."""
    every = gates.new_zeros(gates.shape[0], EXPERTS).scatter(1, gates.argsort(-1), gates)
    return every[:, number - 1]


def best_written(start):
    """One expert for each token, rows written into something."""

    def loop(hidden, gates, chosen, experts):
        out, first = start(hidden), chosen[:, 0]
        for number, expert in enumerate(experts):
            out = written(out, first == number, expert(hidden[first == number]))
        return out

    return loop


def unequal_ranks(hidden, gates, chosen, experts):
    """The last expert is called by first choices only."""
    out = torch.zeros_like(hidden)
    for rank in range(TOP):
        for number, expert in enumerate(experts[: EXPERTS - rank]):
            mask = chosen[:, rank] == number
            out[mask] += gates[mask, rank].unsqueeze(-1) * expert(hidden[mask])
    return out


class Normed(Gated):
    """Rows are normed between the layers, which columns cannot be by themselves."""

    def forward(self, x):
        return self.down(F.layer_norm(self.gate(x), [WIDTH]))


class Deep(Gated):
    """Three layers, one behind the other."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.more(F.silu(self.gate(x)))))


OTHERS = {
    "left out": (looped(number=lambda at: at + 1), Gated),
    "twice": (looped(number=lambda at: at // 2), Gated),
    "other gates": (looped(gates=lambda gates, token, rank: gates[token, rank * 0, None]), Gated),
    "turned gates": (looped(gates=lambda gates, token, rank: gates.t()[rank, token, None]), Gated),
    "scaled": (looped(into=lambda out, token, rows: out.index_add(0, token, rows, alpha=2)), Gated),
    "not added": (looped(into=lambda out, token, rows: out.index_put((token,), rows)), Gated),
    "twice the same": (looped(chosen=lambda chosen: chosen // 2, into=put), Gated),
    "one after the other": (others, Gated),
    "written over": (over(into=written), Gated),
    "written into": (best_written(torch.ones_like), Gated),
    "gates of another": (over(gate=of_another), Gated),
    "gates of all choices": (over(gate=lambda gates, here, number: gates.sum(-1)), Gated),
    "twice in a mask": (over(chosen=lambda chosen: chosen // 2), Gated),
    "normed": (mistral, Normed),
    "deep": (mistral, Deep),
}
"""What is no layer of experts: which loop and which expert."""


@pytest.mark.parametrize("twist", OTHERS)
def test_anything_else_stays(twist):
    gm, _ = normalized(Looped(*OTHERS[twist]))
    # what writes rows back to the places of its own mask is computed for all rows (passes.written_back): a choice by
    # the mask
    assert not layers(gm) and {"aten.where.default", "aten.where.self", "aten.index_put.default"} & set(targets(gm))


@pytest.mark.parametrize(
    "loop", [over(), best_written(torch.zeros_like), unequal_ranks], ids=["masks", "written", "unequal ranks"]
)
def test_what_is_one_after_all(loop):
    """What the cases above are varied from; numbers that no expert of a rank has add nothing."""
    model = Looped(loop)
    gm, inputs = normalized(model)
    assert layers(gm)
    assert_same(gm, model, inputs, 1e-10)


class Sliced(nn.Module):
    """Experts as parts of three parameters, by products with or without turning them."""

    def __init__(self, linear):
        super().__init__()
        self.gate, self.linear = nn.Linear(HIDDEN, EXPERTS, bias=False), linear
        sizes = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
        self.first, self.second = (
            nn.Parameter(torch.randn(EXPERTS, *(size if linear else size[::-1]))) for size in sizes
        )

    def forward(self, x):
        hidden = x.view(-1, HIDDEN)
        gates, chosen = torch.topk(self.gate(hidden).softmax(-1), TOP, dim=-1)
        out = torch.zeros_like(hidden)
        for number in range(EXPERTS):
            token, rank = torch.where(chosen == number)
            up, gate = self.times(hidden[token], self.first[number]).chunk(2, -1)
            out[token] += gates[token, rank, None] * self.times(F.silu(gate) * up, self.second[number])
        return out.view(x.shape)

    def times(self, x, weight):
        return F.linear(x, weight) if self.linear else x @ weight


@pytest.mark.parametrize("linear", [True, False])
def test_experts_that_are_parts_of_a_parameter_are_that_parameter(linear):
    model = Sliced(linear)
    gm, inputs = normalized(model)
    (layer,) = layers(gm)
    assert_same(gm, model, inputs, 1e-10)
    assert "aten.stack.default" not in targets(gm) and "aten.select.int" not in targets(gm)
    assert not linear or [node.args[0].meta.get("fqn") for node in layer.args[3:5]] == ["first", "second"]


def test_dropout_behind_experts_drops_each_of_a_tokens_experts_by_itself():
    def dropping():
        return nn.Sequential(*plain(), nn.Dropout(0.5))

    model = Looped(mistral, dropping)
    gm, inputs = normalized(model)
    assert len(layers(gm)) == TOP == targets(gm).count("aten.dropout.default")
    assert all(facts.rank(node) == 3 for layer in layers(gm) for node in layer.args[:3])
    assert_same(run(export_graph(model.eval(), (), inputs, {"x": {0: B, 1: S}}), NORMALIZE), model, inputs, 1e-10)


def test_choices_that_may_be_the_same_twice_are_added_as_often():
    """`index_add` adds every row: what is chosen twice counts twice, with any choice."""
    model = Looped(looped(chosen=lambda chosen: chosen // 2))
    gm, inputs = normalized(model)
    assert layers(gm)
    assert_same(gm, model, inputs, 1e-10)


def test_the_best_of_two_rankings_may_be_the_same_expert():
    """Each ranking has an expert once, and both of a token may begin with the same one: it is added once."""

    def best_of_each(hidden, gates, chosen, experts):
        out, scores = torch.zeros_like(hidden), torch.stack([hidden[:, :EXPERTS], hidden[:, -EXPERTS:]], 1)
        best = scores.topk(1).indices[..., 0]
        for number, expert in enumerate(experts):
            token = (best == number).any(-1)
            out[token] += expert(hidden[token])
        return out

    model = Looped(best_of_each)
    gm, inputs = normalized(model)
    assert_same(gm, model, inputs, 1e-10)


@pytest.mark.parametrize("number", [-1, EXPERTS, EXPERTS + 3])
def test_numbers_that_are_no_experts_add_nothing(number):
    """As tokens that are dropped have them; biases of second layers have no row for them."""
    dropped = looped(chosen=lambda chosen: torch.where(chosen > 1, chosen, number))
    model = Looped(dropped)
    gm, inputs = normalized(model)
    assert layers(gm)
    assert_same(gm, model, inputs, 1e-10)
    assert not layers(normalized(Looped(dropped, plain))[0])


def test_the_best_expert_by_itself():
    def best(hidden, gates, chosen, experts):
        out, number, first = torch.zeros_like(hidden), hidden[:, :EXPERTS].argmax(-1), gates[:, 0]
        for at, expert in enumerate(experts):
            (token,) = torch.where(number == at)
            out[token] += first[token, None] * expert(hidden[token])
        return out

    model = Looped(best, plain)
    gm, inputs = normalized(model)
    assert layers(gm) and "aten.masked_fill.Scalar" not in targets(gm)
    assert_same(gm, model, inputs, 1e-10)


def test_what_is_no_layer_is_refused_with_the_line():
    with pytest.raises(CaptureError, match=r"experts\.0\.gate.*depends on what tensors hold"):
        capture(Scored(Normed), (torch.randn(4, 6, HIDDEN),))


def test_a_refused_loop_names_the_line_that_picks():
    with pytest.raises(CaptureError, match=r"\(where at .*loops\.py:\d+\) picks by values\).*weight \* expert\(x\)"):
        capture(Scored(lambda: nn.Linear(HIDDEN, HIDDEN)), (torch.randn(4, 6, HIDDEN),))


class Scored(Looped):
    """With a loss."""

    def __init__(self, expert=Gated):
        super().__init__(mistral, expert)

    def forward(self, x):
        return (super().forward(x) ** 2).mean()


def test_experts_are_layers_that_evaluate_alike():
    captured = capture(Scored(), (torch.randn(4, 6, HIDDEN),))
    assert not captured.evaluation.differs and not captured.evaluation.why
    assert facts.shape(layers(captured.gm)[0].args[1])[-1] == TOP
