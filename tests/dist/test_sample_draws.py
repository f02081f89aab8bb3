"""Random numbers for each sample that are drawn from sizes, as the noise levels of diffusion models: split by samples,
over ranks and over microbatches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.recipes import roles
from passes import NORMALIZE, run
from tests.helpers.export import B, assert_same, export_graph
from tests.helpers.verify import Subject, by_stages

LEVELS, D = 10, 8


class Denoiser(nn.Module):
    """Finds the noise in rows of which each sample has its own level."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.register_buffer("levels", torch.linspace(0.1, 0.9, LEVELS))

    def forward(self, x: Tensor) -> Tensor:
        level = self.levels[torch.randint(0, LEVELS, (x.shape[0],), device=x.device)][:, None, None]
        noise = torch.randn(x.shape[0], x.shape[1], D, device=x.device, dtype=x.dtype)
        h = level * x + (1 - level) * noise + torch.rand(x.shape[0], 1, 1, device=x.device, dtype=x.dtype)
        for layer in self.layers:
            h = h + layer(h)
        return (h - noise).square().mean()


def test_numbers_are_those_of_the_model() -> None:
    model, rows = Denoiser(), {"x": torch.randn(4, 3, D)}
    gm = run(export_graph(model, (), rows, {"x": {0: B}}), NORMALIZE)
    drawn = {str(node.target) for node in gm.graph.nodes if "rand" in str(node.target)}
    assert drawn == {"aten.randint_like.low_dtype", "aten.randn_like.default", "aten.rand_like.default"}
    assert_same(gm, model, {"x": torch.randn(6, 3, D)})


class Rows(Subject):
    """A subject whose batch is one tensor."""

    def batch(self, batch: int = 8, seq: int = 16) -> dict[str, Tensor]:
        return {self.captured.input_names[0]: torch.randn(8, 4, D, generator=torch.Generator().manual_seed(1))}


def test_microbatches_have_their_own_levels() -> None:
    """Levels drawn once for all were those of no microbatch, and the model refused."""
    model = Denoiser()
    who = Rows("denoiser", "train", capture(model, (torch.zeros(8, 4, D),)), model.state_dict())
    made = by_stages(who, (2,), (roles.data,), 2, 2, "1f1b")
    assert {node.micro for name, node in made.nodes.items() if name.startswith("rand")} == {("S0",)}
    report = who.verified(made)
    assert report.ok, [row for row in report.rows if not row.ok][:4]


class Dropped(nn.Module):
    """A layer that draws for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Denoiser()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def test_blocks_are_given_no_input_to_draw() -> None:
    gm = run(export_graph(Dropped(), (), {"x": torch.randn(4, 3, D)}, {"x": {0: B}}), NORMALIZE)
    assert any(node.target is torch.ops.aten.randint.low for node in gm.graph.nodes)


class Continued(nn.Module):
    """Noise of each sample beside a past that has no rows yet."""

    def forward(self, past: Tensor, x: Tensor) -> Tensor:
        return torch.cat([past, x], 1) * torch.randint(1, LEVELS, (x.shape[0],), device=x.device)[:, None, None]


def test_an_input_without_elements_gives_no_sizes() -> None:
    rows = {"past": torch.zeros(4, 0, D), "x": torch.randn(4, 3, D)}
    gm = run(export_graph(Continued(), (), rows, {"past": {0: B}, "x": {0: B}}), NORMALIZE)
    assert any(node.target is torch.ops.aten.randint_like.low_dtype for node in gm.graph.nodes)
    assert_same(gm, Continued(), {"past": torch.zeros(6, 0, D), "x": torch.randn(6, 3, D)})
