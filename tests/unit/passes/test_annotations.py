"""FLOPs against torch's own counter, bytes against tensors."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from passes import ANNOTATE, NORMALIZE, edit, facts, run
from passes.annotate_memory import annotate_memory, is_view
from tests.helpers.export import B, S, export_graph

aten = torch.ops.aten
MATMULS = (
    aten.linear.default,
    aten.matmul.default,
    aten.bmm.default,
    aten.scaled_dot_product_attention.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.einsum.default,
)


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.proj, self.causal = nn.Linear(8, 24), causal

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.proj(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        return torch.einsum("bsh,bth->bst", h, x) @ x


def annotated(model, x, dims=None):
    dims = {"x": dims} if dims else None
    return run(export_graph(model, (), {"x" if dims else "input": x}, dims), (*NORMALIZE, *ANNOTATE))


def total(gm, fact, numbers):
    found = sum(fact(node) for node in edit.calls(gm) if node.target in MATMULS)
    return found if isinstance(found, int) else found.subs({facts.symbol(k): n for k, n in numbers.items()})


def test_flops_are_those_of_torch_at_every_size():
    model = Attention()
    gm = annotated(model, torch.randn(3, 5, 8), {0: B, 1: S})
    for b, s in ((3, 5), (2, 9)):
        # The counter knows attention on the CPU only as the matmuls that it is made of.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(torch.randn(b, s, 8))
        assert total(gm, facts.flops, {"b": b, "s": s}) == counter.get_total_flops()


def test_causal_attention_counts_half():
    graphs = [annotated(Attention(causal), torch.randn(3, 5, 8), {0: B, 1: S}) for causal in (False, True)]
    whole, half = (
        next(facts.flops(node) for node in edit.calls(gm, aten.scaled_dot_product_attention.default)) for gm in graphs
    )
    assert whole == 2 * half


@pytest.mark.parametrize(
    "model", [nn.Conv2d(4, 6, 3, groups=2), nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 1))]
)
def test_convolution_flops_forward_and_backward(model):
    x = torch.randn(2, 4, 7, 7)
    gm = annotated(model, x)
    with FlopCounterMode(display=False) as counter:
        out = model(x)
    assert total(gm, facts.flops, {}) == counter.get_total_flops()
    if isinstance(model, nn.Conv2d):
        return  # torch counts the backward of a grouped convolution as if it had no groups
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert total(gm, facts.backward_flops, {}) == counter.get_total_flops()


class Adapted(nn.Module):
    """Blocks of which adapters train alone, from block `first` on, frozen words in and out."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.Linear(*sizes, bias=False)
                    for name, sizes in (("wide", (8, 8)), ("down", (8, 2)), ("up", (2, 8)))
                }
            )
            for _ in range(4)
        )
        for name, weight in self.named_parameters():
            number = name.split(".")[1]
            weight.requires_grad_(("up" in name or "down" in name) and int(number) >= first)

    def forward(self, x):
        h = self.words(x)
        for block in self.blocks:
            h = torch.tanh(block["wide"](h) + block["up"](block["down"](h)))
        return (h @ self.words.weight.T).logsumexp(-1).sum()


@pytest.mark.parametrize("first", [0, 3])
def test_backwards_of_frozen_weights_in_folded_blocks(first):
    """What follows blocks has a backward where anything trains inside of them, though nothing outside does. (Of the
    first of folded blocks a program leaves out what it does not need; a graph has one body for all.)"""
    model, x = Adapted(first), torch.arange(6).reshape(2, 3)
    gm = export_graph(model, (x,))
    for node in gm.graph.nodes:
        if node.meta.get("role") == "param":
            node.meta["requires_grad"] = model.get_parameter(node.meta["fqn"]).requires_grad
    gm = run(gm, (*NORMALIZE, *ANNOTATE))
    found = sum(
        times * facts.backward_flops(node)
        for graph, times in runs(gm)
        for node in edit.calls(graph)
        if node.target in MATMULS
    )
    loss = model(x)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert found == counter.get_total_flops()
    assert any(node.op == "call_module" for node in gm.graph.nodes)


def runs(gm):
    """The graphs of a folded one, and how often each runs."""
    yield gm, 1
    for node in gm.graph.nodes:
        if node.op == "call_module":
            yield gm.get_submodule(node.target), node.meta["repeat"]


def test_bytes_and_views():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 16)

        def forward(self, x):
            return torch.relu(self.table(x)).transpose(0, 1)

    gm = annotated(Rows(), torch.zeros(3, 5, dtype=torch.long), {0: B, 1: S})
    b, s = facts.symbol("b"), facts.symbol("s")
    embedding, relu, transpose = edit.calls(gm)
    assert facts.read_bytes(embedding) == 8 * b * s + 64 * b * s  # the rows that it takes, not the table
    assert (facts.read_bytes(relu), facts.written_bytes(relu)) == (64 * b * s, 64 * b * s)
    assert (facts.read_bytes(transpose), facts.written_bytes(transpose)) == (0, 0)
    assert [node.meta["saved"].positions for node in (embedding, relu, transpose)] == [(1,), (1,), ()]


def test_facts_name_the_pass_that_is_missing():
    gm = run(export_graph(nn.Linear(3, 3), (torch.randn(2, 3),)), NORMALIZE)
    node = next(edit.calls(gm))
    with pytest.raises(ValueError, match="run the pass annotate_flops first"):
        facts.flops(node)
    with pytest.raises(ValueError, match="annotate_memory"):
        facts.read_bytes(node)


class OrderOfMemory(nn.Module):
    """What is made of `contiguous` copies, which normalization drops."""

    def forward(self, x):
        turned = x.transpose(0, 1).contiguous()
        return turned.view(-1, 8).relu() @ x[0].t().contiguous().view(8, -1)


@pytest.mark.parametrize(
    "model",
    [
        OrderOfMemory(),
        Attention(),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
    ],
    ids=["copies", "attention", "torch's layer, batch first", "torch's layer"],
)
def test_views_are_what_shares_memory_when_it_runs(model):
    gm = run(export_graph(model, (torch.randn(3, 5, 8),)), (*NORMALIZE, annotate_memory))
    wrong, seen = [], []

    class Watching(fx.Interpreter):
        def run_node(self, node):
            made = super().run_node(node)
            if node.op == "call_function" and node.target is aten.reshape.default:
                seen.append(node.name)
                operand = self.env[node.args[0]]
                if is_view(node) != (made.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr()):
                    wrong.append(node.name)
            return made

    given = [
        torch.randn(node.meta["val"].shape, requires_grad=True) for node in gm.graph.nodes if node.op == "placeholder"
    ]
    Watching(gm).run(*given)
    assert seen and not wrong


@pytest.mark.parametrize(
    "body",
    [
        lambda x: torch.float_power(x, 3.0),
        lambda x: torch.float_power(2.0, x),
        lambda x: torch.float_power(x[:, 0], x[:, 1]),
    ],
    ids=["of tensors", "to tensors", "both"],
)
def test_powers_keep_what_they_cast(body):
    """They compute in float64."""

    class Power(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Parameter(torch.rand(6, 2, 8))

        def forward(self, x):
            return body(self.base) * x

    model, kept = Power(), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        body(model.base)
    gm = run(export_graph(model, (torch.rand(1),)), (*NORMALIZE, annotate_memory))
    (power,) = [node for node in edit.calls(gm) if "float_power" in str(node.target)]
    tensors, saved = [*edit.tensor_operands(power), power], power.meta["saved"]
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == saved.extra_bytes + sum(
        facts.nbytes(tensors[position]) for position in saved.positions
    )
