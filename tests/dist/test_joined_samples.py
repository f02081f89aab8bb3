"""Samples side by side, as losses of preferences join them (`torch.cat([chosen, rejected])`): they are cut in sections,
so that nothing is sent to join them or to take them apart, and pipelines take microbatches of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import RunError
from autopar.plan import Plan
from autopar.problem.options import sections_of, table_of
from autopar.problem.read_graph import read
from autopar.recipes import roles
from autopar.runtime.batch import joined
from tests.helpers.verify import Subject, by_chance, by_recipe, by_stages, right

WORDS, D, BATCH = 32, 8, 8


APART: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "chunk": lambda scores: scores.chunk(2),
    "split": lambda scores: scores.split(len(scores) // 2),
    "slices": lambda scores: (scores[: len(scores) // 2], scores[len(scores) // 2 :]),
}
"""Ways to take joined samples apart."""


class Preference(nn.Module):
    """How much likelier chosen texts are than rejected ones, all in one pass through the blocks."""

    def __init__(self, apart: str) -> None:
        super().__init__()
        self.apart = APART[apart]
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))

    def forward(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.cat([chosen, rejected])
        h = self.embedding(ids)
        for layer in self.layers:
            h = h + layer(h)
        scores = self.head(h).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1).sum(1)
        better, worse = self.apart(scores)
        return -F.logsigmoid(better - worse).mean(), better - worse


class Texts(Subject):
    """A subject of chosen and rejected texts."""

    def batch(self, batch: int = BATCH, seq: int = 6) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1)
        return {name: torch.randint(WORDS, (batch, 6), generator=draw) for name in self.captured.input_names}


@cache
def texts(apart: str = "chunk") -> Subject:
    model, ids = Preference(apart), torch.zeros(BATCH, 6, dtype=torch.long)
    return Texts("preference", "train", capture(model, (ids, ids)), model.state_dict())


def layouts(made: Plan) -> set[str]:
    return {use.partition("|")[0] for node in made.nodes.values() for use in node.outs}


@pytest.mark.parametrize("way", APART)
def test_data_parallel_steps_send_no_samples(way: str) -> None:
    made = by_recipe(texts(way), (4,), "ddp")
    joined, (*_, apart) = (
        made.nodes["cat"],
        [node for name, node in made.nodes.items() if name.startswith(("chunk", "split"))],
    )
    assert (joined.ins, joined.outs) == (("S0|-", "S0|-"), ("S0/2|-",))
    assert (apart.ins, apart.outs) == (("S0/2|S0/2",), ("S0|S0", "S0|S0"))
    right(texts(way).verified(made))


@pytest.mark.parametrize(("mesh", "role"), [((1,), roles.nothing), ((2,), roles.zero3)])
def test_pipelines_take_microbatches(mesh: tuple[int, ...], role: roles.Role) -> None:
    report = texts().verified(by_stages(texts(), mesh, (role,), 2, 2, "1f1b"))
    assert report.ok, [row for row in report.rows if not row.ok][:4]


@pytest.mark.parametrize("seed", range(3))
def test_any_plan(seed: int) -> None:
    made = by_chance(texts(), (2, 2), seed)
    assert any("S0/2" in layout for layout in layouts(made))
    right(texts().verified(made))
    right(texts().verified(made, batch=12))


def test_sections_that_do_not_divide_are_refused() -> None:
    """Two sections of five samples cannot be cut over two ranks, though ten samples can."""
    made = by_chance(texts(), (2,), 0, {torch.ops.aten.cat.default: ("p0|p1",)})
    assert made.nodes["cat"].outs == ("S0/2|-",)
    with pytest.raises(RunError, match="does not divide by the 2 ranks"):
        texts().verified(made, batch=5)


class Heads(nn.Module):
    """Heads of samples side by side: as many sections as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(x).unflatten(-1, (8, -1)).transpose(1, 2).flatten(0, 1)
        return rows.softmax(-1).unflatten(0, (-1, 8)).square().sum()


def test_heads_of_as_many_samples_are_not_joined_samples() -> None:
    """Eight heads of eight samples: sections that end elsewhere where there are six."""
    captured = capture(Heads(), (torch.zeros(8, 4, D),))
    program = read(captured.gm, captured.hints, training=True)
    table = table_of(program, 2, sections_of(program), None)
    assert not any("S0/" in str(use) for options in table.values() for option in options for use in option.outs)


class Unlabelled(nn.Module):
    """FixMatch: classes of samples with labels, and agreement of two views of others, all in one pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map = nn.Linear(D, D)

    def forward(self, x: Tensor, weak: Tensor, strong: Tensor) -> Tensor:
        joined = self.map(torch.cat([x, weak, strong]).to(self.map.weight.dtype))
        known, (seen, changed) = joined[: len(x)], joined[len(x) :].chunk(2)
        guess = seen.detach().softmax(-1)
        return F.cross_entropy(known, x.argmax(-1)) - (guess * changed.log_softmax(-1)).sum(-1).mean()


def test_slices_of_several_parts_stay_in_sections() -> None:
    model, views = Unlabelled(), tuple(torch.zeros(BATCH, D, dtype=torch.long) for _ in range(3))
    who = Views("unlabelled", "train", capture(model, views), model.state_dict())
    made = by_recipe(who, (2,), "ddp")
    assert not any(use.startswith("R|") for name in made.nodes if "cat" in name for use in made.nodes[name].outs)
    assert {"S0/3", "S0/2"} <= layouts(made)
    right(who.verified(made))


class Chosen(Preference):
    """ORPO: the loss of chosen texts alone, beside that of pairs."""

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        ids, n = torch.cat([chosen, rejected]), len(chosen)
        h = self.embedding(ids)
        logits = self.head(h + self.layers[0](h)).log_softmax(-1)
        scores = logits.gather(-1, ids[..., None]).squeeze(-1).mean(1)
        return F.nll_loss(logits[:n].flatten(0, 1), ids[:n].flatten()) - F.logsigmoid(scores[:n] - scores[n:]).mean()


def test_a_slice_of_some_of_the_parts_stays_in_sections() -> None:
    model, ids = Chosen("chunk"), torch.zeros(BATCH, 6, dtype=torch.long)
    who = Texts("chosen", "train", capture(model, (ids, ids)), model.state_dict())
    made = by_recipe(who, (2,), "ddp")
    assert not any(use.startswith("R|") for name in made.nodes if "cat" in name for use in made.nodes[name].outs)
    right(who.verified(made))
    report = who.verified(by_stages(who, (1,), (roles.nothing,), 2, 2, "1f1b"))
    assert report.ok, [row for row in report.rows if not row.ok][:4]


class Views(Subject):
    """A subject of three views of samples."""

    def batch(self, batch: int = BATCH, seq: int = D) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1)
        return {name: torch.randint(9, (batch, D), generator=draw) for name in self.captured.input_names}


class Shown(nn.Module):
    """Gives what it makes of samples side by side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        h = self.head(self.stem(torch.cat([x, z])).tanh())
        return h.square().mean(), h


class Pairs(Subject):
    """A subject of two inputs of features."""

    def batch(self, batch: int = BATCH, seq: int = 6) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1)
        return {name: torch.randn(batch, 4, D, generator=draw) for name in self.captured.input_names}


@cache
def shown() -> Subject:
    model, x = Shown(), torch.zeros(BATCH, 4, D)
    return Pairs("shown", "train", capture(model, (x, x)), model.state_dict())


@pytest.mark.parametrize(("mesh", "role"), [((1,), roles.nothing), ((2,), roles.data), ((2,), roles.nothing)])
def test_outputs_of_microbatches_come_in_the_order_of_the_batch(mesh: tuple[int, ...], role: roles.Role) -> None:
    """Section by section: they came microbatch by microbatch, which is the order of samples that are not joined."""
    made = by_stages(shown(), mesh, (role,), 2, 2, "1f1b")
    assert made.nodes["cat"].micro == ("S0/2",)
    right(shown().verified(made))


def test_sections_of_other_sizes_come_in_order_too() -> None:
    first, second = torch.arange(8), torch.arange(8, 12)
    parts = [torch.cat([first.view(2, 2, 2)[:, k].flatten(), second.view(2, 2, 1)[:, k].flatten()]) for k in range(2)]
    assert joined(parts, 0, 2, (2, 1)).tolist() == list(range(12))
