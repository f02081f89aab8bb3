"""Batch norms taken apart: what torch's own give, gradients and new statistics included."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes import NORMALIZE, facts, run
from passes.edit import results
from tests.helpers.export import B, S, assert_same, check_values, export_graph, run_graph, targets

# behind the samples: channels, then what a layer takes two of
SIZES = {nn.BatchNorm1d: (3, 5), nn.BatchNorm2d: (3, 5, 4), nn.BatchNorm3d: (3, 5, 4, 2)}
INSTANCES = {nn.InstanceNorm1d: (3, 5), nn.InstanceNorm2d: (3, 5, 4), nn.InstanceNorm3d: (3, 5, 4, 2)}
OPTIONS: dict[str, dict[str, bool | float]] = {
    "plain": {},
    "without weights": {"affine": False},
    "of each batch": {"track_running_stats": False},
    "slow": {"momentum": 0.9, "eps": 1e-2},
}


class Normed(nn.Module):
    """A norm in `rests` between layers that compute in `dtype`."""

    def __init__(self, norm: nn.Module, dtype: torch.dtype, rests: torch.dtype) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 2, dtype=dtype), norm.to(rests), nn.Linear(2, 2, dtype=dtype)
        for value in (*norm.parameters(), *norm.buffers()):
            if value.is_floating_point():
                value.data.uniform_(0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x).flatten(-2))
        return self.last(y.unflatten(-1, (-1, 2)))


def normalized(norm: nn.Module, dtype: torch.dtype, rests: torch.dtype, *, training: bool, tolerance: float) -> None:
    torch.manual_seed(0)
    model = Normed(norm, dtype, rests).train(training)
    inputs = {"x": torch.randn(4, *SIZES[type(norm)], 2, dtype=dtype)}
    gm = run(export_graph(model, (), inputs, {"x": {0: B}}), NORMALIZE)
    check_values(gm)
    assert "aten.batch_norm.default" not in targets(gm) and facts.dtype(results(gm)[0]) == dtype
    assert_same(gm, model, inputs, tolerance)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", SIZES)
def test_norms_are_those_of_torch(kind: type[nn.BatchNorm2d], options: str, training: bool) -> None:
    normalized(kind(3, **OPTIONS[options]), torch.float64, torch.float64, training=training, tolerance=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", INSTANCES)
def test_running_statistics_of_instance_norms_are_those_of_torch(kind: type[nn.InstanceNorm2d], training: bool) -> None:
    """The schema of the operator does not say that it changes them: they stayed zeros and ones, in silence. In
    evaluation it takes them in place of those of the samples."""
    torch.manual_seed(0)
    model = kind(3, affine=True, track_running_stats=True, momentum=0.3).double().train(training)
    for statistic in (model.running_mean, model.running_var):
        statistic.uniform_(0.5, 1.5)
    inputs = {"input": torch.randn(4, *INSTANCES[kind], dtype=torch.float64) + 1}
    gm = run(export_graph(model, (), inputs, {"input": {0: B, 2: S}}), NORMALIZE)
    check_values(gm)
    assert [about["target"] for about in gm.meta["outputs"] if about["kind"] == "mutation"] == [
        "running_mean",
        "running_var",
    ] * training
    assert_same(gm, model, inputs, 1e-9)


class Domains(nn.Module):
    """Running statistics of one of several domains, and such as nobody keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.register_buffer("means", torch.rand(2, 3))
        self.register_buffer("variances", torch.rand(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(self.first(x), self.means[1], self.variances[1], training=self.training, momentum=0.3)
        one_row = y.reshape(1, -1, 1).expand(-1, -1, 2) * torch.arange(2)
        return (
            y
            + F.batch_norm(
                one_row, self.means[0].repeat(x.shape[0]), self.variances[0].repeat(x.shape[0]), training=True
            )
            .sum(-1)
            .view(x.shape)
            + self.means.sum()
        )


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_need_not_be_buffers_of_their_own(training: bool) -> None:
    """Views of one are written back to it, what was made in forward is not kept: as norms of several domains and
    adaptive instance norms have them."""
    torch.manual_seed(0)
    model = Domains().double().train(training)
    inputs = {"x": torch.randn(4, 3, dtype=torch.float64)}
    gm = run(export_graph(model, (), inputs, {"x": {0: B}}), NORMALIZE)
    check_values(gm)
    assert [about["target"] for about in gm.meta["outputs"] if about["kind"] == "mutation"] == [
        "means",
        "variances",
    ] * training
    assert_same(gm, model, inputs, 1e-9)


def test_two_norms_with_one_part_of_a_buffer_are_refused() -> None:
    class Twice(Domains):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(
                F.batch_norm(y, self.means[1], self.variances[1], training=self.training) for y in (x, self.first(x))
            )

    with pytest.raises(ValueError, match=r"second norm whose running statistics are this part of a buffer \(select"):
        run(export_graph(Twice(), (), {"x": torch.randn(4, 3)}, {"x": {0: B}}), NORMALIZE)


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_that_rests_in_float32_gives_what_layers_in_bfloat16_take(training: bool) -> None:
    """As models are made narrower but for their norms."""
    normalized(nn.BatchNorm2d(3), torch.bfloat16, torch.float32, training=training, tolerance=4e-2)


def test_what_is_far_from_its_mean_has_a_variance_in_float16() -> None:
    """As layers make of pixels that nobody has scaled; the square of 256 is beyond float16."""
    model = nn.BatchNorm1d(3)
    inputs = {"input": (torch.randn(64, 3) * 1000).half()}
    gm = run(export_graph(model.half(), (), inputs, {"input": {0: B}}), NORMALIZE)
    found = next(
        value
        for value, about in zip(run_graph(gm, model, inputs), gm.meta["outputs"], strict=True)
        if about["kind"] == "output"
    )
    torch.testing.assert_close(found.float(), nn.BatchNorm1d(3)(inputs["input"].float()), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm], ids=lambda norm: norm.__name__)
def test_running_statistics_that_are_inputs_are_refused(norm) -> None:
    """They raised KeyError: 'fqn'."""

    class Given(nn.Module):
        def forward(self, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
            return norm(x, mean, var, None, None, True)

    gm = export_graph(Given(), (torch.randn(4, 3, 5), torch.zeros(3), torch.ones(3)))
    with pytest.raises(ValueError, match="changes input mean in place"):
        run(gm, NORMALIZE)
