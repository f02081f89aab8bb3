"""Models of which a part trains: adapters of low rank beside frozen weights, in all blocks or in the last ones, and in
pipelines."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar._torch import local_of
from autopar.capture import capture
from autopar.errors import RunError
from autopar.frontend import load
from autopar.plan import Plan
from autopar.recipes import roles
from autopar.verify import case_of, graph_rows, verify
from autopar.verify.step import RankCase
from tests.helpers.ranks import living, on_new_ranks
from tests.helpers.tiny import TINY
from tests.helpers.verify import Subject, by_stages, planned
from tests.helpers.verify import subject as by_name

WIDTH, DEPTH, WORDS = 16, 6, 32


class Adapted(nn.Module):
    """A frozen map and one of rank 2 beside it."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = (nn.Linear(a, b, bias=False).requires_grad_(trains) for a, b in ((WIDTH, 2), (2, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.frozen(x) + self.up(self.down(x)))


class Model(nn.Module):
    """Frozen words in and out, blocks of which those from `first` on train."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted(number >= first) for number in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.norm(x) @ self.words.weight.T).flatten(0, 1), labels.flatten())


def data(batch: int, seq: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(WORDS, (batch, seq), generator=generator) for name in ("ids", "labels")}


@cache
def subject(first: int) -> Subject:
    torch.manual_seed(0)
    model = Model(first)
    captured = capture(model, (), data(8))
    rows, notes = graph_rows(model, captured, (), data(6), training=True)
    assert not notes and all(row.ok for row in rows), rows
    return Subject("adapted", "train", captured, model.state_dict())


def _plan(who: Subject, how: str) -> Plan:
    if how in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"):
        return by_stages(who, (1,), "single", 2, 4, how, 1 if how in ("gpipe", "1f1b") else 2)
    if how.startswith("pp "):
        return by_stages(who, (2,), (getattr(roles, how.removeprefix("pp ")),), 2, 2, "1f1b")
    return planned(who, (2,), how)


def _thawed(source: str, rank_case: RankCase) -> tuple[str, list[str]]:
    """One rank: what it says when a frozen weight is to train; and which weights have gradients when one that trained
    is frozen."""
    module, said = rank_case.build(source), ""
    batch = module.shard_batch(**rank_case.batch)
    module.words.weight.requires_grad_(True)
    try:
        module.train_step(*batch)
    except RunError as error:
        said = str(error)
    module.words.weight.requires_grad_(False)
    module.blocks.get_submodule("1").up.weight.requires_grad_(False)
    module.train_step(*batch)
    return said, [name for name, parameter in module.named_parameters() if parameter.grad is not None]


def test_what_was_frozen_stays_so() -> None:
    who = subject(0)
    for how in ("zero3", "zero1"):
        case = case_of(who.captured, _plan(who, how), who.weights, data(8))
        for said, graded in living(2).run(_thawed, case.source(), case.rank_case):
            assert "parameter words.weight was frozen when the model was compiled" in said
            assert set(graded) == {f"blocks.{n}.{kind}.weight" for n in range(DEPTH) for kind in ("down", "up")} - {
                "blocks.1.up.weight"
            }


def _frozen_later(source: str, rank_case: RankCase, name: str) -> tuple[list[bool], str]:
    """One rank: whether a weight that several places hold has a gradient when it trains, when it is frozen, and with
    what was there before; and what is said where one place alone froze it."""
    module = rank_case.build(source)
    batch, weight, found = module.shard_batch(**rank_case.batch), dict(module.named_parameters()).get(name), []
    for frozen in (False, True, True):
        if weight is not None:
            weight.requires_grad_(not frozen)
            weight.grad = torch.ones_like(weight) if len(found) == 2 else None
        module.train_step(*batch)
        if weight is not None:
            found.append(weight.grad is not None)
    if weight is not None:
        assert torch.equal(local_of(weight.grad), torch.ones_like(local_of(weight)))
        weight.requires_grad_(module.MESH.place == 0)
    try:
        module.train_step(*batch)
    except RunError as error:
        return found, str(error)
    return found, ""


def test_a_weight_of_several_places_that_is_frozen_later_has_no_gradient() -> None:
    who = by_name("hf-gpt2")
    case = who.case(by_stages(who, (1,), "single", 2, 2, "1f1b"))
    for found, said in on_new_ranks(2, _frozen_later, case.source(), case.rank_case, "transformer.wte.weight"):
        assert found == [True, False, True]
        assert (
            "parameter transformer.wte.weight, of which several places of the pipeline have a copy, is frozen on some "
            "of them" in said
        )


def _run_again(source: str, rank_case: RankCase) -> list[dict[str, Tensor | None]]:
    """One rank: gradients where all that the first block reads is frozen, eager and with compiled blocks."""
    found = []
    for compiled in (False, True):
        module = rank_case.build(source)
        if compiled:
            module.compile_blocks(backend="aot_eager")
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith("blocks.1"))
        module.train_step(*module.shard_batch(**rank_case.batch))
        found.append(module.full_grads())
    return found


@pytest.mark.slow
def test_a_compiled_block_in_which_all_is_frozen_does_not_run_again() -> None:
    """torch refused to compile it: no random numbers in what is run again, for which it takes attention without
    dropout, too."""
    loaded = load(TINY["gpt"], batch=8, seq=16, device="cpu", train=True, labels=True)
    made = autopar.compile(
        loaded.model,
        "cpu:1x2",
        (tuple(loaded.args), dict(loaded.kwargs)),
        recipe="zero1",
        remat="full",
        time_limit_s=10.0,
    )
    assert "remat(block" in made.source and made.captured is not None
    batch = dict(zip(made.captured.input_names, [*loaded.args, *loaded.kwargs.values()], strict=True))
    rank_case = RankCase(made.plan, dict(loaded.model.state_dict()), made.bundle.constants, batch)
    for eager, compiled in on_new_ranks(2, _run_again, made.source, rank_case, timeout_s=240):
        assert any(grad is not None for grad in eager.values())
        for name, grad in eager.items():
            torch.testing.assert_close(compiled[name], grad, rtol=1e-4, atol=1e-6)


class Scored(nn.Module):
    """Words that train at one end, and are read without a gradient at the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Adapted(True) for _ in range(DEPTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((x @ self.words.weight.detach().T).flatten(0, 1), labels.flatten())


def test_a_weight_of_several_places_of_which_one_gives_no_gradient() -> None:
    """The places between have no copy of it."""
    torch.manual_seed(0)
    model = Scored()
    who = Subject("scored", "train", capture(model, (), data(8)), model.state_dict())
    report = verify(
        case_of(who.captured, by_stages(who, (1,), "single", 4, 4, "1f1b"), who.weights, data(8)), ranks=living(4)
    )
    assert report.ok, report.worst


# up to which block nothing trains, so that the first stages of a pipeline have no gradients
FIRST = (0, 2, 4, DEPTH - 1)
HOW = (
    "zero3",
    "zero1",
    "tp_sp",
    "random 0",
    "random 1",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
    "pp zero1",
    "pp zero3",
    "pp tensor",
)


@pytest.mark.parametrize(
    ("first", "how"),
    [
        (0, "1f1b"),
        (4, "1f1b"),
        (2, "zbv_zero_bubble"),
        (0, "pp zero3"),
        (0, "random 0"),
        *(pytest.param(first, how, marks=pytest.mark.slow) for first in FIRST for how in HOW),
    ],
)
def test_equals_one_device(first: int, how: str) -> None:
    who = subject(first)
    made = _plan(who, how)
    report = verify(case_of(who.captured, made, who.weights, data(8)), ranks=living(made.ranks))
    assert report.ok, (report.first, report.worst)
