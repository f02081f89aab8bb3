"""Predicted bytes against what the emitted program really holds on its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar._torch import local_of
from autopar.bundle import Bundle
from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.onestage import plan
from autopar.planner import Planner
from autopar.problem.settings import Settings
from autopar.recipes import RECIPES
from autopar.report.explain import choice_of
from autopar.request import Request
from tests.dist.test_frozen_weights import data
from tests.dist.test_frozen_weights import subject as adapted
from tests.helpers.kept import kept_on_rank
from tests.helpers.ranks import on_ranks
from tests.helpers.tiny import TINY
from tests.helpers.verify import Subject, subject
from tests.unit.decisions.test_memory import activations, at_rest

BATCH, SEQ = 4, 32
FAST = [
    ("hf-gpt2", "single"),
    ("hf-neox", "zero3"),
    ("hf-bert", "tp_sp"),
    ("hf-resnet", "tp_sp"),
    ("moe", "zero3"),
    ("hf-vit", "tp_sp"),
    ("mlp", "tp_sp"),
    ("hf-llama", "tp_sp"),
]
SLOW = [case for name in TINY for recipe in ("single", "zero3", "tp_sp") if (case := (name, recipe)) not in FAST]


@cache
def planned(name: str, recipe: str, optimizer: str = "adamw") -> tuple[Bundle, float, float]:
    """The emitted program of a tiny model on two ranks, and the bytes predicted for what its forward keeps and for its
    parameters."""
    return planned_for(subject(name), name, recipe, optimizer)


def planned_for(who: Subject, name: str, recipe: str, optimizer: str = "adamw") -> tuple[Bundle, float, float]:
    """The same of any model."""
    graph = who.captured
    hints = graph.hints | {n: size for n, size in (("b", BATCH), ("s", SEQ)) if n in graph.hints}
    request = Request(
        Cluster.parse("cpu:1x2"), Settings(optimizer=optimizer), recipe=recipe, mesh=(2,), time_limit_s=10.0
    )
    made = plan(graph.gm, hints, request, model=name, graph_hash=graph.graph_hash)
    model = Planner.of(graph.gm, hints, request).model((2,), RECIPES[recipe].roles, recipe)
    choice = choice_of(model, made)
    return (
        Bundle(made, emit(graph.gm, made, Names.of(graph)), graph.constants),
        activations(model, choice),
        at_rest(model, choice),
    )


@pytest.mark.parametrize(("name", "recipe"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_saved_activations_are_those_that_autograd_holds(name: str, recipe: str) -> None:
    """Two ranks that do everything hold what one device does ("single"); the others hold their part of it."""
    who = subject(name)
    bundle, predicted, _ = planned(name, recipe)
    held = max(on_ranks(2, kept_on_rank, bundle, dict(who.weights), who.batch(BATCH, SEQ)))
    assert held > 2000
    assert predicted == pytest.approx(held, rel=0.02)


@pytest.mark.parametrize("recipe", ["single", "zero3", "tp_sp"])
@pytest.mark.parametrize("first", [0, 4])
def test_frozen_weights_keep_what_the_gradients_of_others_take(first: int, recipe: str) -> None:
    """Adapters in all blocks or in the last ones: what follows them keeps as much as if all was trained, what is before
    them nothing."""
    who = adapted(first)
    bundle, predicted, _ = planned_for(who, "adapted", recipe)
    held = max(on_ranks(2, kept_on_rank, bundle, dict(who.weights), data(BATCH, SEQ)))
    assert held > 2000
    assert predicted == pytest.approx(held, rel=0.02)


def heads(x: Tensor) -> Tensor:
    """[b, s, 64] as four heads: [b, 4, s, 16]."""
    return x.reshape(*x.shape[:2], 4, 16).transpose(1, 2)


FUSED = {
    "differences": lambda p, q, x: F.l1_loss(p, q),
    "distances": lambda p, q, x: F.pairwise_distance(p, q).square().mean(),
    "cosines": lambda p, q, x: F.cosine_similarity(p, q, dim=-1).mean(),
    "counts": lambda p, q, x: F.poisson_nll_loss(p, x.abs()) + q.mean(),
    "a product with the input": lambda p, q, x: torch.addcmul(p, q, x).square().mean(),
    "a matmul of each sample with four others": lambda p, q, x: (
        p.unsqueeze(1) @ q.reshape(-1, 4, 4, 64).transpose(-1, -2)
    ).mean(),
    "attention of three dims": lambda p, q, x: F.scaled_dot_product_attention(p, q, p).mean(),
    "attention of values of another size": lambda p, q, x: F.scaled_dot_product_attention(
        heads(p), heads(q), heads(p)[..., :8]
    ).mean(),
}


class Fused(nn.Module):
    """A loss by an operator that is made of several, and keeps what lies between them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(64, 64), nn.Linear(64, 64), FUSED[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.first(x), self.second(x), x)


@pytest.mark.parametrize("name", FUSED)
def test_what_fused_operators_keep_is_what_autograd_holds(name: str) -> None:
    torch.manual_seed(0)
    model, x = Fused(name), torch.randn(32, 16, 64)
    graph, request = (
        capture(model, (x,), {}, mode="train"),
        Request(Cluster.parse("cpu:1x2"), Settings(), recipe="ddp", mesh=(2,), time_limit_s=10.0),
    )
    made = plan(graph.gm, graph.hints, request, model=name, graph_hash=graph.graph_hash)
    found = Planner.of(graph.gm, graph.hints, request).model((2,), RECIPES["ddp"].roles, "ddp")
    bundle = Bundle(made, emit(graph.gm, made, Names.of(graph)), graph.constants)
    held = max(on_ranks(2, kept_on_rank, bundle, dict(model.state_dict()), {graph.input_names[0]: x}))
    assert activations(found, choice_of(found, made)) == pytest.approx(held, rel=0.02)


def resting(bundle: Bundle, weights: dict[str, Tensor], batch: dict[str, Tensor], name: str) -> int:
    """Bytes of this rank's parts of parameters, gradients and optimizer state after one step."""
    module = bundle.build(weights)
    module.train_step(*module.shard_batch(**batch))
    made = optimizer(module.parameters(), name)
    made.step()
    found = 0
    for held in module.parameters():
        state = [t for t in made.state[held].values() if isinstance(t, Tensor) and t.shape == held.shape]
        found += sum(local_of(t).nbytes for t in (held, *([] if held.grad is None else [held.grad]), *state))
    return found


def optimizer(parameters: Iterable[nn.Parameter], name: str) -> torch.optim.Optimizer:
    """The optimizer that a plan names."""
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    if name in kinds:
        return kinds[name](parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if name == "sgd-momentum" else 0.0)


@pytest.mark.parametrize(
    ("name", "recipe", "kind"),
    [
        ("hf-gpt2", "zero3", "adamw"),
        ("hf-llama", "megatron", "sgd-momentum"),
        ("hf-gpt2", "ddp", "sgd"),
        ("cnn", "zero3", "adam"),
    ],
)
def test_parameters_gradients_and_optimizer_are_counted_to_the_byte(name: str, recipe: str, kind: str) -> None:
    """Uneven shards too: the vocabulary has 257 rows."""
    who = subject(name)
    bundle, _, predicted = planned(name, recipe, kind)
    held = on_ranks(2, resting, bundle, dict(who.weights), who.batch(BATCH, SEQ), kind)
    assert predicted == max(held)
