"""Models of which much or all is outside of repeated blocks: what hides under all their operators taken together need
not hide where it stands, and is priced as it runs."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar import joint
from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.onestage import finish
from autopar.planner import Planner
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.request import Request
from autopar.search import SEARCHES
from autopar.simulate import simulate
from tests.helpers.captures import captured_once

CLOSE = 0.03


def _layers(*widths: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            *(layer for one, other in itertools.pairwise(widths) for layer in (nn.Linear(one, other), nn.GELU()))
        )


@pytest.mark.parametrize(
    ("widths", "batch", "cluster"),
    [((512, 512), 768, "h100:3x2"), ((1024, 4096, 1024), 768, "h100:3x2"), ((256, 32000), 3072, "a100-40:2x4")],
    ids=["one", "two", "wide"],
)
@pytest.mark.parametrize("recipe", [None, "ddp", "zero1", "zero3", "hsdp", "tp_zero3"])
def test_layers(recipe: str | None, widths: tuple[int, ...], batch: int, cluster: str) -> None:
    inputs = torch.zeros(batch, widths[0]), torch.zeros(batch, dtype=torch.long)
    with captured_once((__name__, widths, batch)):
        compiled = autopar.compile(
            _layers(*widths),
            cluster,
            inputs,
            loss_fn=nn.functional.cross_entropy,
            precision="bf16",
            recipe=recipe,
            time_limit_s=10.0,
        )
    assert compiled.simulate().step_s == pytest.approx(compiled.plan.predicted.step_s, rel=CLOSE)


def _convolutional() -> nn.Module:
    with torch.device("meta"):
        convolutions = (
            layer
            for one, other in ((3, 96), (96, 192), (192, 256))
            for layer in (nn.Conv2d(one, other, 3, 2, 1), nn.ReLU())
        )
        return nn.Sequential(*convolutions, nn.Flatten(), *_layers(256 * 8 * 8, 2048, 4096, 1000))


@pytest.mark.parametrize("recipe", ["ddp", "zero1", "zero3"])
def test_dense_layers_behind_convolutions(recipe: str) -> None:
    """Nearly all gradients are there when the backward has hardly begun, and what it computes next waits for the
    scatter of one bucket when another one begins."""
    inputs = torch.zeros(2048, 3, 64, 64), torch.zeros(2048, dtype=torch.long)
    with captured_once((__name__, "convolutional")):
        compiled = autopar.compile(
            _convolutional(),
            "rtx4090:1x4",
            inputs,
            loss_fn=nn.functional.cross_entropy,
            precision="bf16",
            recipe=recipe,
            time_limit_s=10.0,
        )
    assert compiled.simulate().step_s == pytest.approx(compiled.plan.predicted.step_s, rel=CLOSE)


@cache
def _captured() -> Captured:
    inputs = torch.zeros(2048, 3, 64, 64), torch.zeros(2048, dtype=torch.long)
    return capture(_convolutional(), inputs, {}, mode="train", loss_fn=nn.functional.cross_entropy)


@pytest.mark.parametrize(("cluster", "mesh"), [("rtx4090:1x4", (2, 2)), ("h100:1x8", (2, 4))])
def test_collectives_of_two_axes_share_the_links_of_one_node(cluster: str, mesh: tuple[int, ...]) -> None:
    """As if each axis had links of its own, a step would be priced 4 to 7 % too fast."""
    captured = _captured()
    planner = Planner.of(
        captured.gm, captured.hints, Request(Cluster.parse(cluster), Settings(precision="bf16"), mesh=mesh)
    )
    best = planner.candidate(
        mesh, (roles.zero3, roles.zero3), "two axes", lambda problem: SEARCHES["ilp"](problem, time_limit_s=10.0)
    )
    made = finish(planner, best, 0.0, [], {"model": "convolutional", "graph_hash": captured.graph_hash})
    assert simulate(captured.gm, made).step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)


class Scored(nn.Module):
    """Words of a large table, and a head of some layers: nearly all that is to be summed is of the table, and nearly
    all work of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(400_000, 64), _layers(64, 512, 2048, 1)

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.words(ids).mean(1)), wanted)


@pytest.mark.parametrize("recipe", ["1f1b", "pp_zero1", "pp_zero2", "pp_zero3"])
def test_what_a_place_sums_hides_under_no_other_place(recipe: str) -> None:
    with torch.device("meta"):
        model = Scored()
    compiled = autopar.compile(
        model,
        "h100:1x4",
        (torch.zeros(8192, 4, dtype=torch.long), torch.zeros(8192, 1)),
        recipe=recipe,
        time_limit_s=10.0,
    )
    assert compiled.plan.places > 1
    assert compiled.simulate().step_s == pytest.approx(compiled.plan.predicted.step_s, rel=CLOSE)


@cache
def _gpt2(tied: bool) -> Captured:
    """Four blocks 512 wide: their 50,257 words take more than they do."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=4, n_embd=512, n_head=8, use_cache=False, tie_word_embeddings=tied)
        ).to(torch.bfloat16)
        ids = torch.zeros(24, 512, dtype=torch.long)
    return capture(model, (), {"input_ids": ids, "labels": ids}, mode="train")


@pytest.mark.parametrize(
    ("tied", "recipe"), [(True, "ddp"), (True, "zero1"), (False, "ddp"), (False, "zero1"), (False, "zero3")]
)
def test_few_blocks_and_many_words(tied: bool, recipe: str) -> None:
    captured = _gpt2(tied)
    request = Request(Cluster.parse("h100:3x2"), Settings(precision="bf16"), recipe=recipe, time_limit_s=10.0)
    made = joint.plan(captured.gm, captured.hints, request, model="gpt2", graph_hash=captured.graph_hash)
    assert simulate(captured.gm, made).step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)


def test_the_search_chooses_by_what_runs() -> None:
    """A head of which the gradient takes longer than all else: what it is chosen by is what it takes."""
    inputs = torch.zeros(3072, 96), torch.zeros(3072, dtype=torch.long)
    compiled = autopar.compile(
        _layers(96, 96, 6144), "a10g:3x2", inputs, loss_fn=nn.functional.cross_entropy, time_limit_s=10.0
    )
    forced = autopar.compile(
        _layers(96, 96, 6144),
        "a10g:3x2",
        inputs,
        loss_fn=nn.functional.cross_entropy,
        time_limit_s=10.0,
        recipe="one_weird_trick",
    )
    assert compiled.simulate().step_s <= forced.simulate().step_s * (1 + CLOSE)


@pytest.mark.parametrize("cluster", ["a100-80:2x4", "h100:3x2"])
def test_a_stage_waits_for_its_own_gathers_and_scatters(cluster: str) -> None:
    """Nothing of a stage runs in front of its first gather, and nothing behind its last scatter."""
    inputs = torch.zeros(4096, 512), torch.zeros(4096, dtype=torch.long)
    compiled = autopar.compile(
        _layers(512, 1024, 1536, 2048, 2560, 1000),
        cluster,
        inputs,
        loss_fn=nn.functional.cross_entropy,
        precision="bf16",
        recipe="pp_zero3",
        time_limit_s=10.0,
    )
    assert compiled.plan.places > 1
    assert compiled.simulate().step_s == pytest.approx(compiled.plan.predicted.step_s, rel=CLOSE)
