"""Blocks that are run again in the backward, on local ranks: exact, every collective priced, and the same random
numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.bundle import Bundle
from autopar.capture import capture
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.errors import PlanError
from autopar.pipeline import SCHEDULES
from autopar.plan import Plan
from autopar.runtime import rng
from autopar.verify import Report
from tests.helpers.ranks import on_ranks
from tests.helpers.remat import in_part, rematerialised
from tests.helpers.tiny import TINY
from tests.helpers.verify import Sizes, Subject, by_recipe, by_stages, planned, right, subject, verified

# model, mesh, plan, level
FAST: list[tuple[str, Sizes, str, str]] = [
    ("hf-gpt2", (2,), "tp_sp", "selective"),
    ("hf-gpt2", (2,), "tp_sp", "all"),
    ("hf-gpt2", (2,), "zero3", "full"),
    ("hf-llama-2kv", (2, 2), "tp_zero3", "selective"),
    ("gpt", (2, 2), "searched", "selective"),
    ("hf-t5", (2,), "zero3", "selective"),
    ("hf-mixtral", (2,), "zero3", "full"),
    ("hf-bert", (2,), "cp", "selective"),
    ("moe", (2,), "tp_sp", "all"),  # products of several dims, which save copies of their operands
    ("hf-gpt2", (2,), "tp_sp", "random 0"),
    # one head of keys on a rank, whose repetition is a view there; sums of biases in bags, which save what they make
    ("hf-gpt-oss", (4,), "random 1", "all"),
]
MORE: list[tuple[str, Sizes, str, str]] = [
    ("hf-t5", (4,), "random 2", "all"),
    ("hf-bert", (4,), "cp", "full"),
    ("hf-t5", (4,), "random 2", "random 2"),
]
SLOW = MORE + [
    case
    for model in TINY
    for sizes, how in (
        ((2,), "ddp"),
        ((2,), "zero3"),
        ((2,), "tp_sp"),
        ((2, 2), "tp_zero3"),
        ((2, 2), "searched"),
        ((2, 2), "random 0"),
        ((4,), "random 1"),
    )
    for level in ("selective", "full", "all", "random 3", "random 4")
    if (case := (model, sizes, how, level)) not in FAST
]
# model, mesh of a place, recipe, places, microbatches, schedule, stages per place, level
PIPES: list[tuple[str, Sizes, str, int, int, str, int, str]] = [
    ("hf-gpt2", (1,), "single", 2, 4, "1f1b", 1, "full"),
    ("hf-gpt2", (2,), "zero3", 2, 4, "zbv_zero_bubble", 2, "selective"),
    ("hf-t5", (1,), "single", 2, 4, "interleaved_zero_bubble", 2, "full"),
    ("hf-llama-2kv", (2,), "tp", 2, 2, "interleaved_1f1b", 2, "selective"),
    ("hf-resnet", (1,), "single", 2, 1, "naive", 1, "full"),
]
SLOW_PIPES = [
    (model, mesh, recipe, 2, 4, schedule, virtual, level)
    for model in ("hf-gpt2", "hf-llama", "hf-t5")
    for mesh, recipe in (((1,), "single"), ((2,), "zero3"))
    for schedule in SCHEDULES
    if schedule != "naive"
    for virtual in (SCHEDULES[schedule].virtual or 2,)
    for level in ("selective", "full")
]


def _single(model: str, sizes: Sizes, how: str, level: str) -> None:
    who = subject(model)
    right(who.verified(rematerialised(who, planned(who, sizes, how), level)))


def _pipe(
    model: str, mesh: Sizes, recipe: str, places: int, microbatches: int, schedule: str, virtual: int, level: str
) -> None:
    who = subject(model)
    right(
        who.verified(rematerialised(who, by_stages(who, mesh, recipe, places, microbatches, schedule, virtual), level))
    )


@pytest.mark.parametrize(("model", "sizes", "how", "level"), FAST)
def test_blocks_that_are_run_again(model: str, sizes: Sizes, how: str, level: str) -> None:
    _single(model, sizes, how, level)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sizes", "how", "level"), SLOW)
def test_blocks_that_are_run_again_in_every_model(model: str, sizes: Sizes, how: str, level: str) -> None:
    _single(model, sizes, how, level)


@pytest.mark.parametrize("case", PIPES)
def test_stages_with_blocks_that_are_run_again(case: tuple[str, Sizes, str, int, int, str, int, str]) -> None:
    _pipe(*case)


@pytest.mark.parametrize(
    ("model", "sizes", "how", "level"),
    [
        ("hf-gpt2", (2,), "tp_sp", "selective"),
        ("hf-llama-2kv", (2,), "zero3", "full"),
        ("hf-mixtral", (2,), "ep", "full"),
    ],
)
def test_some_blocks_of_a_run_are_run_again(model: str, sizes: Sizes, how: str, level: str) -> None:
    who = subject(model)
    made = in_part(rematerialised(who, planned(who, sizes, how), level))
    assert "[:1]" in who.case(made).source()
    right(who.verified(made))


@pytest.mark.parametrize(
    "case",
    [
        ("hf-llama-2kv", (2,), "tp", 2, 4, "1f1b", 1, "full"),
        ("hf-gpt2", (1,), "single", 2, 4, "zbv_zero_bubble", 2, "selective"),
        ("hf-llama", (2,), "zero3", 2, 4, "interleaved_1f1b", 1, "random 0"),
    ],
)
def test_some_blocks_of_stages_are_run_again(case: tuple[str, Sizes, str, int, int, str, int, str]) -> None:
    model, mesh, recipe, places, microbatches, schedule, virtual, level = case
    who = subject(model)
    right(
        who.verified(
            in_part(rematerialised(who, by_stages(who, mesh, recipe, places, microbatches, schedule, virtual), level))
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_PIPES)
def test_every_schedule_with_blocks_that_are_run_again(case: tuple[str, Sizes, str, int, int, str, int, str]) -> None:
    _pipe(*case)


def _planted(made: Plan, who: Subject, old: str, new: str) -> Report:
    def mutate(source: str) -> str:
        changed, times = re.subn(old, new, source)
        assert times, f"nothing in the source matches {old}:\n{source}"
        return changed

    return verified(replace(who.case(made), mutate=mutate))


def test_what_is_not_run_again_as_priced_is_found() -> None:
    """Kept all-reduces that are sent again after all, with all that leads to them; and blocks that are run again
    although the plan does not say so."""
    who = subject("hf-gpt2")
    report = _planted(
        rematerialised(who, by_recipe(who, (2,), "tp_sp"), "selective"),
        who,
        r"(?m)(?:keep|skip)\(lambda: (.*)\)( +#.*)?$",
        r"\1",
    )
    wrong = [row for row in report.rows if not row.ok]
    assert {row.kind for row in wrong} == {"collectives"} and "all_reduce on axis 0" in wrong[0].name
    made = by_recipe(who, (2,), "zero3")
    source = who.case(rematerialised(who, made, "full")).source()
    report = verified(replace(who.case(made), mutate=lambda _: source))
    assert [row.kind for row in report.rows if not row.ok] == ["collectives"], (
        "vectors are gathered again, which nobody has priced"
    )


def test_a_result_that_is_needed_and_not_kept_is_found() -> None:
    who = subject("hf-gpt2")
    made = rematerialised(who, by_recipe(who, (2,), "ddp"), "selective")
    report = _planted(made, who, r"(matmul_default_8 = )keep", r"\1__import__('autopar').runtime.skip")
    assert not report.ok and {row.kind for row in report.rows if not row.ok} >= {"gradient"}


def test_a_backward_in_two_parts_would_run_blocks_again_in_each() -> None:
    """Why stages with such blocks have the whole backward at once: what is computed is right, but once more for each
    group of weights (test_torch_traps.py says why)."""
    who = subject("hf-gpt2")
    made = rematerialised(who, by_stages(who, (2,), "tp_sp", 2, 4, "zbv_zero_bubble", 2), "full")
    whole, parts = "SEPARABLE = False", "SEPARABLE = True"
    stages, plain = (who.case(plan).source().split("class Stage") for plan in (made, replace(made, remat={})))
    assert sum(whole in stage and whole not in before for stage, before in zip(stages, plain, strict=True)) == 2, (
        "the stages that have blocks"
    )
    taken = [
        stage if whole in before else stage.replace(whole, parts) for stage, before in zip(stages, plain, strict=True)
    ]
    report = verified(replace(who.case(made), mutate=lambda _: "class Stage".join(taken)))
    wrong = {row.kind: row.name for row in report.rows if not row.ok and "bytes" not in row.name}
    assert wrong.keys() == {"collectives"}
    priced, ran = map(int, re.search(r"all_reduce on axis 0: (\d+) priced, (\d+) run", wrong["collectives"]).groups())  # type: ignore[union-attr]
    assert ran > 2 * priced


def test_operators_on_one_coordinate_are_not_run_again() -> None:
    who = subject("hf-gpt2")
    made = by_recipe(who, (2,), "ddp")
    scope = next(iter(rematerialised(who, made, "full").remat))
    name = next(n for n in made.nodes if n.startswith(scope) and made.nodes[n].ins)
    placed = replace(made.nodes[name], ins=("O0|P", *made.nodes[name].ins[1:]))
    with pytest.raises(PlanError, match=f"blocks {scope} cannot be run again: {name} runs on one coordinate"):
        who.case(replace(made, nodes={**made.nodes, name: placed}, remat={scope: ()})).source()


@pytest.mark.parametrize(
    ("remat", "words"),
    [
        ({"nowhere": ()}, "remat names 'nowhere', which is no run of blocks"),
        ({"transformer_h_0": ("add",)}, "remat keeps 'add' of transformer_h_0, which is no operator there"),
    ],
)
def test_plans_that_keep_what_is_not_there_are_refused(remat: dict[str, tuple[str, ...]], words: str) -> None:
    who = subject("hf-gpt2")
    with pytest.raises(PlanError, match=words):
        who.case(replace(by_recipe(who, (2,), "ddp"), remat=remat)).source()


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(16),
            nn.Linear(16, 64),
            nn.Linear(64, 16),
            nn.Dropout(0.5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.drop(self.up(self.norm(x)).tanh())))


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().sum()


class _Drawn(Subject):
    def batch(self, batch: int = 8, seq: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {
            name: torch.randn(batch, 16, dtype=torch.float64, generator=generator) for name in self.captured.input_names
        }


def _noisy() -> _Drawn:
    torch.manual_seed(0)
    model = _Noisy().double()
    zeros = torch.zeros(8, 16, dtype=torch.float64)
    return _Drawn("noisy", "train", capture(model, (zeros, zeros)), model.state_dict())


def _gradients(
    plan: Plan, source: str, weights: dict[str, Tensor], batch: dict[str, Tensor], broken: bool
) -> dict[str, Tensor]:
    """One rank: two steps without an optimizer; what has added up."""
    module = Bundle(plan, source).build(weights)
    if broken:
        rng.Rng.copy, before = lambda self: self, rng.Rng.copy  # type: ignore[method-assign]
    try:
        for _ in range(2):
            module.train_step(*module.shard_batch(**batch))
    finally:
        if broken:
            rng.Rng.copy = before  # type: ignore[method-assign]
    return {name: p.grad.to_local().clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("how", ["ddp", "tp", "1f1b", "interleaved_zero_bubble"])
def test_dropout_draws_the_same_masks_again(how: str) -> None:
    """To the bit, microbatches of a pipeline interleaved; and a mask drawn anew would show."""
    who = _noisy()
    made = (
        by_recipe(who, (2,), how)
        if how in ("ddp", "tp")
        else by_stages(who, (1,), "single", 2, 4, how, bounds=[2] if how == "1f1b" else [1, 2, 3])
    )

    def run(level: str, *, broken: bool = False) -> list[dict[str, Tensor]]:
        plan = rematerialised(who, made, level)
        source = emit(who.captured.gm, plan, Names.of(who.captured))
        assert ("remat(" in source) == (level != "none") and "dropout(" in source
        return on_ranks(plan.ranks, _gradients, plan, source, dict(who.weights), who.batch(), broken)

    wanted = run("none")
    assert all(wanted)
    for level in ("full", "selective"):
        for a, b in zip(wanted, run(level), strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert not all(
        torch.equal(a[name], b[name]) for a, b in zip(wanted, run("full", broken=True), strict=True) for name in a
    )


def _backward_twice(
    plan: Plan, source: str, weights: dict[str, Tensor], batch: dict[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Gradients of a backward that keeps its graph, and with those of another one; a third one is refused, as ever."""
    module, found = Bundle(plan, source).build(weights), []
    loss = module(*module.shard_batch(**batch))
    for kept in (True, False):
        loss.backward(retain_graph=kept)
        found.append({name: p.grad.to_local().clone() for name, p in module.named_parameters() if p.grad is not None})
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    return found


@pytest.mark.parametrize("level", ["full", "selective"])
def test_a_graph_that_is_kept_is_gone_back_over_again(level: str) -> None:
    who = _noisy()
    plan = rematerialised(who, planned(who, (1,), "single"), level)
    ((once, twice),) = on_ranks(
        1, _backward_twice, plan, emit(who.captured.gm, plan, Names.of(who.captured)), dict(who.weights), who.batch()
    )
    assert once and all(torch.equal(2 * gradient, twice[name]) for name, gradient in once.items())
