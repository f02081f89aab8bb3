"""RMSNorm that a model spells out becomes one operator, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes import ANNOTATE, NORMALIZE, run
from tests.helpers.export import B, S, export_graph, run_graph
from tests.helpers.small_graphs import data, normalized

aten = torch.ops.aten
EPS = 1e-3


def mean(x, dim=-1, keep=True):
    return x.pow(2).mean(dim, keepdim=keep)


def wider(h, back):
    wide = h.float()
    return (wide * torch.rsqrt(mean(wide) + EPS)).to(back)


SPELLED = {
    "rsqrt": lambda m, x, y: x * torch.rsqrt(mean(x) + EPS),
    "rows behind": lambda m, x, y: torch.rsqrt(EPS + mean(x)) * x,
    "a product": lambda m, x, y: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS),
    "a square": lambda m, x, y: x * torch.rsqrt(torch.square(x).mean(x.dim() - 1, True) + EPS),
    "divided": lambda m, x, y: x / torch.sqrt(mean(x) + EPS),
    "one over": lambda m, x, y: x * (1 / torch.sqrt(mean(x) + EPS)),
    "a power": lambda m, x, y: x * (mean(x) + EPS) ** -0.5,
    "half a power": lambda m, x, y: x / (mean(x) + EPS) ** 0.5,
    "of heads": lambda m, x, y: (lambda h: h * torch.rsqrt(mean(h) + EPS))((x @ m.w).unflatten(-1, (2, 3))),
}
WEIGHTS = {
    "": lambda m, x, y: x * torch.rsqrt(mean(x) + EPS),
    "in front": lambda m, x, y: m.w[0] * (x * torch.rsqrt(mean(x) + EPS)),
    "behind": lambda m, x, y: (x * torch.rsqrt(mean(x) + EPS)) * m.w[0],
    "one more": lambda m, x, y: (x * torch.rsqrt(mean(x) + EPS)) * (1.0 + m.w[0]),
}
OTHERS = {
    "another mean": lambda m, x, y: x * torch.rsqrt(mean(x, 1) + EPS),
    "of two dims": lambda m, x, y: x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + EPS),
    "other rows": lambda m, x, y: (x + 1.0) * torch.rsqrt(mean(x) + EPS),
    "nothing added": lambda m, x, y: x * torch.rsqrt(mean(x)),
    "what is added is computed": lambda m, x, y: x * torch.rsqrt(mean(x) + m.w[0, 0].abs()),
    "cubes": lambda m, x, y: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS),
    "another root": lambda m, x, y: x * (mean(x) + EPS) ** -0.25,
    "multiplied by the root": lambda m, x, y: x * torch.sqrt(mean(x) + EPS),
    "divided by one over it": lambda m, x, y: x / torch.rsqrt(mean(x) + EPS),
    "a mean that broadcasts": lambda m, x, y: (lambda h: h * torch.rsqrt(mean(h, keep=False) + EPS))(
        (x @ m.w[:, :5])[0]
    ),
}


def found(gm):
    return [node for node in gm.graph.nodes if node.target is aten.rms_norm.default]


@pytest.mark.parametrize("name", SPELLED)
def test_every_spelling_is_the_operator(name):
    gm = normalized(SPELLED[name], data(4, 5, 6))
    (norm,) = found(gm)
    assert norm.args[2:] == (None, EPS) and norm.meta["module"] is not None
    assert not [
        node
        for node in gm.graph.nodes
        if node.target in (aten.rsqrt.default, aten.sqrt.default, aten.pow.Tensor_Scalar, aten.sum.dim_IntList)
    ]


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_of_the_last_dim_is_part_of_it(name):
    gm = normalized(WEIGHTS[name], data(4, 5, 6))
    (norm,) = found(gm)
    assert (norm.args[2] is not None) is bool(name)
    assert not [node for node in gm.graph.nodes if node.target is aten.mul.Tensor]


def test_factors_that_are_no_weight_stay_behind_it():
    for factor in (lambda m, x: m.w[:5], lambda m, x: x, lambda m, x: m.w[0].float()):
        gm = normalized(lambda m, x, y, factor=factor: (x * torch.rsqrt(mean(x) + EPS)) * factor(m, x), data(4, 5, 6))
        assert [norm.args[2] for norm in found(gm)] == [None]


def test_what_several_read_is_multiplied_behind_it():
    gm = normalized(lambda m, x, y: (lambda h: h * m.w[0] + h.exp())(x * torch.rsqrt(mean(x) + EPS)), data(4, 5, 6))
    assert [norm.args[2] for norm in found(gm)] == [None]


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are(name):
    assert not found(normalized(OTHERS[name], data(4, 5, 6)))


def test_rows_of_any_width_stay_as_they_are():
    gm = normalized(SPELLED["rsqrt"], data(4, 5, 6), dims={"x": {0: B, 2: S}})
    assert not found(gm)


def test_whole_numbers_are_no_rows():
    def rounded(m, x, y):
        wide = x.round().int().double()
        return (wide * torch.rsqrt(mean(wide) + EPS)).int() * m.w[0]

    (norm,) = found(normalized(rounded, data(4, 5, 6)))
    assert norm.args[0].meta["val"].dtype == torch.float64


OF_NO_DIMS = {
    "a norm": lambda h: h * torch.rsqrt(mean(h) + EPS),
    "a mean": lambda h: h.mean(-1, keepdim=True),
    "a mean of all": lambda h: h.mean(),
    "turned": lambda h: h.transpose(0, -1).exp(),
}


@pytest.mark.parametrize("name", OF_NO_DIMS)
def test_what_has_no_dims_has_a_last_one(name):
    """As torch has it, which takes -1 and 0 there."""
    gm = normalized(lambda m, x, y: OF_NO_DIMS[name]((x @ m.w).sum()), data(4, 5, 6))
    assert not found(gm)


class Cast(nn.Module):
    """A norm between casts, `there` and back, with a weight behind."""

    def __init__(self, dtype: torch.dtype, there: torch.dtype) -> None:
        super().__init__()
        self.weight, self.there = nn.Parameter(torch.rand(64, dtype=dtype) + 0.5), there

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.there)
        return self.weight * (wide * torch.rsqrt(mean(wide) + EPS)).to(x.dtype)


FEWER = {"float": (torch.float32, torch.float64), "bf16": (torch.bfloat16, torch.float64)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_around_it_go(dtype):
    model, x = Cast(dtype, torch.float32), torch.randn(4, 64).to(dtype)
    (norm,) = found(run(export_graph(model, (x,)), NORMALIZE))
    assert norm.meta["val"].dtype == dtype and norm.args[0].op == "placeholder" and norm.args[2] is not None


@pytest.mark.parametrize("name", FEWER)
def test_casts_to_more_bits_than_it_computes_with_stay(name):
    """Squares of rows of 1e25 are no numbers of 32 bits."""
    torch.manual_seed(0)
    dtype, there = FEWER[name]
    model, x = Cast(dtype, there), (torch.randn(4, 64) * 1e25).to(dtype)
    gm = run(export_graph(model, (x,)), NORMALIZE)
    (norm,) = found(gm)
    assert norm.args[0].meta["val"].dtype == there and norm.args[2] is None
    torch.testing.assert_close(run_graph(gm, model, {"x": x})[0], model(x))
    assert model(x).abs().min() > 0


def test_narrower_casts_stay():
    """What is computed in fewer bits than rows have is not what the operator computes."""
    gm = normalized(lambda m, x, y: x * torch.rsqrt(mean(x.float()) + EPS).double(), data(4, 5, 6), tolerance=1e-5)
    assert not found(gm)


class Llama(nn.Module):
    """As Llama's, which rounds before it multiplies; `mixed` as T5's, whose rows stay as they are."""

    def __init__(self, width: int, mixed: bool) -> None:
        super().__init__()
        self.weight, self.mixed = nn.Parameter(torch.rand(width) + 0.5), mixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * ((x if self.mixed else wide) * root).to(x.dtype)


@pytest.mark.parametrize("mixed", [False, True])
def test_in_few_bits_it_rounds_once_more_or_less(mixed):
    torch.manual_seed(0)
    model, x = Llama(64, mixed).bfloat16(), torch.randn(8, 16, 64).bfloat16()
    gm = run(export_graph(model, (x,)), NORMALIZE)
    (norm,) = found(gm)
    assert norm.args[2] is not None and norm.args[0].op == "placeholder"
    torch.testing.assert_close(run_graph(gm, model, {"x": x})[0], model(x), rtol=2**-7, atol=0.0)


class Plain(nn.Module):
    """The operator itself, with a weight or without one."""

    def __init__(self, width: int, weight: bool | None) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(torch.rand(width), requires_grad=weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "weight"), [(True, True), (True, False), (False, True), (True, None)])
def test_on_a_cpu_it_keeps_what_its_plain_operators_keep(dtype, rows, weight):
    model = nn.Sequential(*([nn.Linear(32, 32, bias=False)] if rows else []), Plain(32, weight)).to(dtype)
    x = torch.randn(16, 32).to(dtype)
    given = model[0](x) if rows else x
    gm = run(export_graph(model, (x,)), NORMALIZE)
    (norm,) = found(gm)
    if weight is False:
        norm.args[2].meta["requires_grad"] = False
    gm = run(gm, ANNOTATE)
    (norm,) = found(gm)
    said = norm.meta["saved_on_cpu"]
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model[-1](given)
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    assert (given.untyped_storage().data_ptr() in kept) is (0 in said.positions)
    beside = sum(
        size for place, size in kept.items() if place not in weights and place != given.untyped_storage().data_ptr()
    )
    assert said.extra_bytes == beside and said.copies == ()
