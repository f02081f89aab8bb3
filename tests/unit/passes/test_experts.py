"""Layers of experts: recognised in their sorted form, and only where they are one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes import NORMALIZE, facts, ops, run
from tests.helpers.export import B, S, assert_same, check_values, export_graph, targets

E, D, WIDTH, K = 4, 6, 3, 2


GATES = {
    "": (lambda x: F.silu(x[:, :WIDTH]) * x[:, WIDTH:], "halves(lambda first, second: F.silu(first) * second)"),
    "gelu": (
        lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
        "halves(lambda first, second: F.gelu(first, approximate='tanh') * second)",
    ),
    "swapped": (lambda x: F.silu(x[:, WIDTH:]) * x[:, :WIDTH], "halves(lambda first, second: F.silu(second) * first)"),
    "all columns": (lambda x: F.relu(x), "lambda x: F.relu(x)"),
    "one minus": (
        lambda x: 1 - x[:, ::2] * x[:, 1::2],
        "pairs(lambda even, odd: torch.ops.aten.rsub.Scalar(even * odd, 1))",
    ),
    "clamped": (
        lambda x: (lambda gate: (x[:, 1::2].clamp(-1, 1) + 1) * (gate * torch.sigmoid(gate * 1.7)))(
            x[:, ::2].clamp(max=0.5)
        ),
        "pairs(lambda even, odd: (torch.clamp(odd, -1, 1) + 1) * ((y0 := torch.clamp(even, None, 0.5)) * "
        "torch.sigmoid(y0 * 1.7)))",
    ),
}
"""What is between the layers, and how it is written."""

OTHERS = {
    "normed": lambda x: F.layer_norm(x[:, :WIDTH], [WIDTH]) * x[:, WIDTH:],  # not column by column
    "mixed": lambda x: x[:, ::2] * x[:, :WIDTH],
    "part": lambda x: x[:, 1 : 1 + WIDTH] * x[:, :WIDTH],
    "dropped": lambda x: F.dropout(x[:, :WIDTH], 0.5) * x[:, WIDTH:],
}
"""What cannot be cut by columns, or draws random numbers."""


class Experts(nn.Module):
    """Routed, sorted, through two grouped matmuls, and back, as Hugging Face writes it; `twist` names what is
    different."""

    def __init__(self, twist: str, biased: bool = False) -> None:
        super().__init__()
        self.twist, columns = twist, WIDTH if twist == "all columns" else 2 * WIDTH
        self.gate = nn.Linear(D, E, bias=False, dtype=torch.float64)
        self.up = nn.Parameter(torch.randn(E, D, columns, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(E, WIDTH, D, dtype=torch.float64))
        self.up_bias = nn.Parameter(torch.randn(E, columns, dtype=torch.float64)) if biased else None
        self.down_bias = nn.Parameter(torch.randn(E, D, dtype=torch.float64)) if biased else None

    def forward(self, x):
        hidden = x.reshape(-1, D)
        gates, chosen = self.gate(hidden).softmax(-1).topk(K, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        numbers, order = chosen.reshape(-1).sort(descending=self.twist == "sorted down")
        ends = torch.histc(numbers.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        if self.twist == "other ends":
            ends = ends // 2
        inner = torch.ops.transformers.grouped_mm_fallback(hidden[order // K], self.up, ends)
        if self.up_bias is not None:
            inner = inner.add_(self.up_bias[order if self.twist == "other bias" else numbers])
        inner = OTHERS[self.twist](inner) if self.twist in OTHERS else GATES.get(self.twist, GATES[""])[0](inner)
        out = torch.ops.transformers.grouped_mm_fallback(inner, self.down, ends)
        if self.down_bias is not None:
            out = out.add_(self.down_bias[numbers])
        out = out * gates.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        if self.twist == "not back":
            back = order
        return out[back].view(-1, K, D).sum(1).view(x.shape)


def normalized(twist, biased=False):
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model = Experts(twist, biased)
    inputs = {"x": torch.randn(4, 8, D, dtype=torch.float64)}
    gm = export_graph(model, (), inputs, {"x": {0: B, 1: S}})
    gm = run(gm, NORMALIZE)
    check_values(gm)
    return gm, model, inputs


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("twist", GATES)
def test_a_layer_of_experts_is_one_op_on_tokens_that_stay_apart(twist, biased):
    gm, model, inputs = normalized(twist, biased)
    assert_same(gm, model, inputs, 1e-10)
    (layer,) = [node for node in gm.graph.nodes if node.target is ops.experts]
    assert layer.args[ops.INNER] == GATES[twist][1] and len(layer.args) == ops.BIAS + biased
    assert [facts.rank(node) for node in layer.args[:3]] == [3, 3, 3]
    assert not {"aten.sort.default", "aten.reshape.default", "aten.index.Tensor"} & set(targets(gm))
    assert sum(node.target is ops.bag for node in gm.graph.nodes) == biased


@pytest.mark.parametrize(
    ("twist", "biased"),
    [(twist, False) for twist in (*OTHERS, "sorted down", "other ends", "not back")] + [("other bias", True)],
)
def test_anything_else_stays(twist, biased):
    gm, _, _ = normalized(twist, biased)
    assert not any(node.target is ops.experts for node in gm.graph.nodes)
    assert sum(node.target is ops.grouped_matmul for node in gm.graph.nodes) == 2


def test_what_the_second_layer_reads_may_be_read_by_others_too(monkeypatch):
    """As a loss that keeps it sparse does."""
    pytest.importorskip("transformers.integrations.moe")
    kept = []
    monkeypatch.setitem(GATES, "all columns", (lambda x: kept.append(F.relu(x)) or kept[-1], ""))

    class Sparse(Experts):
        def forward(self, x):
            return super().forward(x) + kept.pop().mean()

    torch.manual_seed(0)
    model, inputs = Sparse("all columns"), {"x": torch.randn(4, 8, D, dtype=torch.float64)}
    gm = run(export_graph(model, (), inputs, {"x": {0: B, 1: S}}), NORMALIZE)
    assert any(node.target is ops.experts for node in gm.graph.nodes)
    assert_same(gm, model, inputs, 1e-10)


@pytest.mark.parametrize("ends", [None, "rows", "columns"])
def test_grouped_matmuls_of_other_forms(ends):
    """Without ends each matrix has rows of its own; with ends of columns, or of what is summed, the call stays."""

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 16, 16, dtype=torch.bfloat16))

        def forward(self, x):
            at = None if ends is None else torch.arange(1, 3, dtype=torch.int32) * 16
            one, other = (x, self.w[0]) if ends == "columns" else (x[0], self.w[0]) if ends == "rows" else (x, self.w)
            return F.grouped_mm(one, torch.cat([other, other], -1) if ends == "columns" else other, offs=at)

    model, inputs = Grouped(), {"x": torch.randn(2, 16, 16, dtype=torch.bfloat16)}
    gm = run(export_graph(model, (), inputs), NORMALIZE)
    assert [name for name in targets(gm) if "mm" in name] == [
        "aten.bmm.default" if ends is None else "aten._grouped_mm.default"
    ]


def marks(scores, chosen, numbers):
    """Which experts each token chose, summed up."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True).sum(dim=(0, 1))


def histogram(scores, chosen, numbers):
    return torch.histc(chosen.reshape(-1).float(), bins=E, min=0, max=E - 1)


def scattered(hidden, rows, order, gates):
    index = (order // K).reshape(-1, 1).expand(-1, D)
    return torch.zeros_like(hidden).scatter_add(0, index, rows * gates.reshape(-1)[order].reshape(-1, 1))


def added(hidden, rows, order, gates):
    return hidden.new_zeros(hidden.shape).index_add(0, order // K, rows * gates.reshape(-1)[order].unsqueeze(-1))


def put(hidden, rows, order, gates):
    return torch.zeros_like(hidden).index_put((order // K,), gates.reshape(-1)[order, None] * rows, accumulate=True)


def unsorted(hidden, rows, order, gates):
    """Rows back in their places, then weighted."""
    back = torch.zeros_like(rows)
    back[order] = rows
    return (back.view(-1, K, D) * gates.unsqueeze(-1)).sum(1)


def sorted_back(hidden, rows, order, gates):
    return (rows * gates.reshape(-1)[order].unsqueeze(-1))[order.argsort()].view(-1, K, D).sum(1)


def ungated(hidden, rows, order, gates):
    return torch.zeros_like(hidden).index_add(0, order // K, rows)


SORTED = {
    "scattered": ({}, False),
    "added": ({"sum": added}, False),
    "put": ({"sum": put}, False),
    "unsorted": ({"sum": unsorted}, False),
    "ungated": ({"sum": ungated}, False),
    "sorted back": ({"sum": sorted_back}, False),
    "histogram": ({"counts": histogram}, False),
    "sorted": ({"order": lambda flat: flat.sort(stable=True)[1]}, False),
    "added to tokens": ({"sum": lambda hidden, rows, order, gates: hidden.index_add(0, order // K, rows)}, True),
    "another order's gates": (
        {
            "sum": lambda hidden, rows, order, gates: ungated(
                hidden, rows * gates.reshape(-1)[order.flip(0)].unsqueeze(-1), order, gates
            )
        },
        True,
    ),
    "another token": ({"sum": lambda hidden, rows, order, gates: ungated(hidden, rows, order.flip(0), gates)}, True),
    "marks of others": (
        {"counts": lambda scores, chosen, numbers: marks(scores, scores.topk(K, largest=False)[1], numbers)},
        True,
    ),
    "choices that may be the same": ({"choose": lambda chosen: chosen // 2}, True),
    "sorted down": ({"order": lambda flat: flat.argsort(descending=True)}, True),
    "gates in front": (
        {
            "take": lambda hidden, order, gates: hidden[order // K] * gates.reshape(-1)[order].unsqueeze(-1),
            "sum": ungated,
        },
        True,
    ),
    "not back": ({"sum": lambda hidden, rows, order, gates: (rows * gates.reshape(-1, 1)).view(-1, K, D).sum(1)}, True),
}
"""Layers as torchtitan writes them, and others: what is different, and whether that is no layer any more."""


class Sorted(nn.Module):
    """Three grouped matmuls of rows sorted by argsort, each row added to its token."""

    def __init__(self, twist):
        super().__init__()
        self.twist = {
            "counts": marks,
            "sum": scattered,
            "order": lambda flat: flat.argsort(stable=True),
            "take": lambda hidden, order, gates: hidden[order // K],
            "choose": lambda chosen: chosen,
        } | twist
        self.gate = nn.Linear(D, E, bias=False, dtype=torch.float64)
        self.w1, self.w3, self.w2 = (
            nn.Parameter(torch.randn(E, *size, dtype=torch.float64)) for size in ((WIDTH, D), (WIDTH, D), (D, WIDTH))
        )

    def forward(self, x):
        twist, scores = self.twist, self.gate(x).softmax(-1)
        gates, chosen = scores.topk(K, dim=-1)
        chosen = twist["choose"](chosen)
        ends = torch.cumsum(twist["counts"](scores, chosen, E), 0, dtype=torch.int32)
        hidden, gates, chosen = x.view(-1, D), gates.view(-1, K), chosen.view(-1, K)
        order = twist["order"](chosen.view(-1))
        rows = twist["take"](hidden, order, gates)
        matmul = torch.ops.transformers.grouped_mm_fallback
        inner = F.silu(matmul(rows, self.w1.transpose(-2, -1), ends)) * matmul(rows, self.w3.transpose(-2, -1), ends)
        return twist["sum"](hidden, matmul(inner, self.w2.transpose(-2, -1), ends), order, gates).view(x.shape)


@pytest.mark.parametrize("case", SORTED)
def test_rows_that_are_added_to_their_tokens(case):
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    twist, stays = SORTED[case]
    model, inputs = Sorted(twist), {"x": torch.randn(4, 8, D, dtype=torch.float64)}
    gm = run(export_graph(model, (), inputs, {"x": {0: B, 1: S}}), NORMALIZE)
    check_values(gm)
    layers = [node for node in gm.graph.nodes if node.target is ops.experts]
    assert len(layers) == (not stays) and targets(gm).count("grouped_matmul") == 0
    if not stays:
        assert_same(gm, model, inputs, 1e-10)
        assert [facts.rank(node) for node in layers[0].args[:3]] == [3, 3, 3]
        assert layers[0].args[ops.INNER] == "halves(lambda first, second: F.silu(first) * second)"


class Biased(Sorted):
    """With biases repeated for the rows of each expert, one more for rows behind the last, and every other column a
    gate."""

    def __init__(self, slack, counted=True):
        super().__init__({})
        self.slack, self.counted = slack, counted
        self.b1, self.b2 = (nn.Parameter(torch.randn(E, width, dtype=torch.float64)) for width in (2 * WIDTH, D))
        self.w1 = nn.Parameter(torch.randn(E, 2 * WIDTH, D, dtype=torch.float64))

    def repeated(self, bias, counts, count):
        if self.slack:
            bias, counts = (
                torch.cat([bias, bias.new_zeros(1, bias.shape[-1])]),
                torch.cat([counts, (count - counts.sum()).unsqueeze(0)]),
            )
        return bias.repeat_interleave(counts if self.counted else counts.flip(0), dim=0, output_size=count)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        gates, chosen = scores.topk(K, dim=-1)
        counts = marks(scores, chosen, E)
        ends, hidden, gates, order = (
            counts.cumsum(0, dtype=torch.int32),
            x.view(-1, D),
            gates.view(-1, K),
            chosen.view(-1, K).view(-1).argsort(stable=True),
        )
        matmul = torch.ops.transformers.grouped_mm_fallback
        inner = matmul(hidden[order // K], self.w1.transpose(-2, -1), ends) + self.repeated(
            self.b1, counts, order.shape[0]
        )
        even, odd = inner[..., ::2].clamp(max=1.0), inner[..., 1::2].clamp(-1.0, 1.0)
        inner = torch.addcmul(even * torch.sigmoid(even), even, odd)
        rows = matmul(inner, self.w2.transpose(-2, -1), ends) + self.repeated(self.b2, counts, order.shape[0])
        return scattered(hidden, rows, order, gates).view(x.shape)


@pytest.mark.parametrize(("slack", "counted"), [(False, True), (True, True), (True, False)])
def test_biases_repeated_for_the_rows_of_each_expert(slack, counted):
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model, inputs = Biased(slack, counted), {"x": torch.randn(4, 8, D, dtype=torch.float64)}
    gm = run(export_graph(model, (), inputs, {"x": {0: B, 1: S}}), NORMALIZE)
    layers = [node for node in gm.graph.nodes if node.target is ops.experts]
    assert len(layers) == counted
    if counted:
        assert_same(gm, model, inputs, 1e-10)
        assert len(layers[0].args) == ops.BIAS + 1 and "torch.addcmul(" in layers[0].args[ops.INNER]
