"""Layers of torch.nn that are more than one operator, or one that holds a whole network: cut by weights and samples,
and in pipelines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.capture import capture
from autopar.errors import PlanError
from autopar.pipeline import units
from autopar.verify import case_of, graph_rows, verify
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned, planner_of

WIDTH = 16


class First(nn.Module):
    """The first result of a layer, between maps."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], wide: int = WIDTH) -> None:
        super().__init__()
        self.up, self.layer, self.down, self.call = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(wide, WIDTH), call

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.call(self.layer, self.up(x))) - x).square().mean()


def _transformer(batch_first: bool) -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=batch_first, norm_first=True),
        2,
        enable_nested_tensor=False,
    )


class Product(nn.Module):
    """Some product of rows and weights of these sizes."""

    def __init__(self, multiply: Callable[..., Tensor], *sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.multiply, self.weights = multiply, nn.ParameterList(torch.randn(size) / WIDTH for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, *self.weights)


def _einsums(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Of three operands, with sums before the products, and of a scalar."""
    return (
        torch.einsum("btd,dr,re->bte", x, u, v)
        + torch.einsum("btd,dr->br", x, u).unsqueeze(1).sum(-1, keepdim=True)
        * torch.einsum("btd,re->b", x, v)[:, None, None]
    )


def _products(x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Of two dims at once, of a chain, and of rows with rows."""
    return (
        torch.nn.functional.bilinear(
            torch.tensordot(x.unflatten(-1, (4, -1)), w, 2),
            torch.inner(x, torch.linalg.multi_dot([v.T, u.T])),
            w.new_ones(WIDTH, WIDTH, WIDTH),
        )
        / WIDTH
    )


def _quantized(layer: nn.Module, x: Tensor) -> Tensor:
    """Weights with a scale for each row, what comes in with one for all of a batch, what goes out with a fixed one."""
    scales, largest = layer.weight.detach().abs().amax(1) / 7, x.detach().abs().max() / 7
    weight = torch.fake_quantize_per_channel_affine(
        layer.weight, scales, torch.zeros_like(scales, dtype=torch.int32), 0, -8, 7
    )
    taken = torch.fake_quantize_per_tensor_affine(x, largest, torch.zeros(1, dtype=torch.int32), -8, 7)
    return torch.fake_quantize_per_tensor_affine(torch.nn.functional.linear(taken, weight, layer.bias), 0.1, 3, 0, 15)


class _Observed(nn.Linear):
    """Quantisation-aware: what comes in is observed for a whole batch, weights for each row."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        made = torch.ao.quantization.get_default_qat_qconfig("x86")
        self.taken, self.rows = made.activation(), made.weight()
        self.rows(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.taken(x), self.rows(self.weight), self.bias)


def _averaged(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(1, 2)).transpose(1, 2)


def _worded(layer: nn.Module, x: Tensor) -> Tensor:
    """The losses of rows of which each has a class; the second cluster has none."""
    classes = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]) * 2 % 20
    return layer(x.flatten(0, 1), classes.where(classes < 10, classes // 2).flatten()).output.view(*x.shape[:2], 1) + x


def _causal(x: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)


def _near(x: Tensor) -> Tensor:
    """Which positions see neighbours alone."""
    places = torch.arange(x.shape[1], device=x.device)
    return (places[:, None] - places).abs() > 1


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: First(_transformer(True), lambda layer, x: layer(x)),
    "positions first": lambda: First(_transformer(False), lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1)),
    "encoder and decoder": lambda: First(
        nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True), lambda layer, x: layer(x, x.flip(1))
    ),
    "encoder with a mask": lambda: First(_transformer(True), lambda layer, x: layer(x, _causal(x))),
    "encoder and decoder with masks": lambda: First(
        nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True),
        lambda layer, x: layer(x, x.flip(1), _near(x), _causal(x), _near(x)),
    ),
    "attention with weights": lambda: First(
        nn.MultiheadAttention(WIDTH, 4, batch_first=True), lambda layer, x: layer(x, x, x)[0]
    ),
    "lstm": lambda: First(nn.LSTM(WIDTH, 8, 2, batch_first=True, bidirectional=True), lambda layer, x: layer(x)[0]),
    "lstm both ways, no gradient of what comes in": lambda: First(  # of floats of 32 bits oneDNN keeps all weights
        nn.LSTM(WIDTH, 8, batch_first=True, bidirectional=True), lambda layer, x: layer(x.detach())[0] + x
    ),
    "gru": lambda: First(nn.GRU(WIDTH, 8), lambda layer, x: layer(x.transpose(0, 1))[0].transpose(0, 1), 8),
    "gru both ways, no gradient of what comes in": lambda: First(
        nn.GRU(WIDTH, 8, batch_first=True, bidirectional=True), lambda layer, x: layer(x.detach())[0] + x
    ),
    "rnn": lambda: First(nn.RNN(WIDTH, 8, batch_first=True), lambda layer, x: layer(x)[0], 8),
    "fourier": lambda: First(nn.Linear(WIDTH, WIDTH), lambda layer, x: torch.fft.fftn(layer(x), dim=(1, 2)).real),
    "filter": lambda: First(
        nn.Linear(WIDTH, WIDTH),
        lambda layer, x: torch.fft.irfft(
            torch.fft.rfft(layer(x), dim=1) * torch.fft.rfft(x, dim=1).conj(), n=x.shape[1], dim=1
        ),
    ),
    "einsums": lambda: First(Product(_einsums, (WIDTH, 4), (4, WIDTH)), lambda layer, x: layer(x)),
    "products": lambda: First(Product(_products, (4, 4, WIDTH), (WIDTH, 4), (4, WIDTH)), lambda layer, x: layer(x)),
    "quantized": lambda: First(nn.Linear(WIDTH, WIDTH), _quantized),
    "observed": lambda: First(_Observed(), lambda layer, x: layer(x)),
    "mean of all batches": lambda: First(nn.BatchNorm1d(WIDTH, momentum=None), _averaged),
    "mean of all batches, twice": lambda: First(
        nn.BatchNorm1d(WIDTH, momentum=None), lambda layer, x: _averaged(layer, _averaged(layer, x).tanh())
    ),
    "adaptive softmax": lambda: First(
        nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 30, [6, 10, 20], div_value=2.0, head_bias=True), _worded
    ),
    "spectral norm": lambda: First(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 8)), lambda layer, x: layer(x), 8
    ),
}


def data(batch: int) -> Tensor:
    return torch.randn(batch, 6, WIDTH, generator=torch.Generator().manual_seed(1))


@cache
def subject(name: str) -> Subject:
    torch.manual_seed(0)
    model = LAYERS[name]()
    captured = capture(model, (data(8),))
    rows, notes = graph_rows(model, captured, (data(6),), {}, training=True)
    assert not notes and all(row.ok for row in rows), rows
    return Subject(name, "train", captured, model.state_dict())


def test_a_mask_of_an_encoder_is_seen_to_be_causal() -> None:
    """torch.nn's transformers look at its values, which a graph does not have: models that gave one were refused."""
    calls = [
        node
        for part in subject("encoder with a mask").captured.gm.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.find_nodes(
            op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
        )
    ]
    assert [node.args[3:] for node in calls] == [(None, 0.0, True)]


def test_masks_of_a_decoder_are_not_looked_at_in_evaluation_either() -> None:
    """A decoder asks whether its mask is causal: models that gave one trained and were refused in evaluation."""
    found = subject("encoder and decoder with masks").captured.evaluation
    assert not found.why and not found.differs


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("encoder", "tp"),
        ("positions first", "1f1b"),
        ("encoder with a mask", "zero3"),
        ("encoder and decoder with masks", "1f1b"),
        ("attention with weights", "1f1b"),
        ("lstm", "1f1b"),
        ("lstm both ways, no gradient of what comes in", "zero3"),
        ("gru", "zero3"),
        ("gru both ways, no gradient of what comes in", "zero3"),
        ("spectral norm", "random 2"),
        ("fourier", "1f1b"),
        ("einsums", "tp"),
        ("products", "tp"),
        ("quantized", "tp"),
        ("observed", "zero3"),
        ("mean of all batches", "random 1"),
        ("mean of all batches, twice", "zero3"),
        ("adaptive softmax", "tp"),
        *(
            pytest.param(name, how, marks=pytest.mark.slow)
            for name in LAYERS
            for how in ("tp", "zero3", "random 0", "random 1", "1f1b", "zbv_zero_bubble")
            if name not in ("quantized", "observed", "mean of all batches", "mean of all batches, twice")
            or not how.endswith(("1f1b", "bubble"))
            if (name, how) != ("spectral norm", "zbv_zero_bubble")
        ),
    ],
)
def test_equals_one_device(name: str, how: str) -> None:
    who = subject(name)
    if how in ("1f1b", "zbv_zero_bubble"):
        made = by_stages(who, (1,), "single", 2, 4, how, 2 if how.startswith("zbv") else 1)
    else:
        made = planned(who, (2,), how)
    report = verify(case_of(who.captured, made, who.weights, {"x": data(8)}), ranks=living(2))
    assert report.ok, (report.first, report.worst)


def test_a_cut_between_a_buffer_and_its_new_value_is_refused() -> None:
    """The power iteration of a spectral norm goes on from where the last step ended."""
    who = subject("spectral norm")
    refused, count = 0, len(units(planner_of(who, (1,)).program))
    for bound in range(1, count):
        made = by_stages(who, (1,), "single", 2, 1, "naive", bounds=[bound])
        try:
            case_of(who.captured, made, who.weights, {"x": data(8)}).source()
        except PlanError as error:
            assert "layer.parametrizations.weight.0._" in str(error) and "cut the model in front of" in str(error)
            refused += 1
    assert 0 < refused < count - 1


def test_derivatives_of_convolutions() -> None:
    """Of each sample; that of the weights, which nobody asks for, is None. Their batch is that of the capture."""
    model = First(
        nn.Conv1d(6, 8, 3, padding=1),
        lambda layer, x: torch.func.vmap(torch.func.grad(lambda row: layer(row[None]).tanh().sum()))(x),
    ).double()
    x = data(8).double()
    captured = capture(model, (x,))
    who = Subject("derivatives", "train", captured, model.state_dict())
    report = verify(case_of(captured, planned(who, (2,), "tp"), who.weights, {"x": x}), ranks=living(2))
    assert report.ok, (report.first, report.worst)
