"""Checkpoints by torch.distributed.checkpoint: saved under one plan, loaded under another mesh and recipe, optimizer
state included; the next step equals that of one device that never stopped."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import RunError
from autopar.verify.step import RankCase
from tests.helpers.ranks import on_ranks
from tests.helpers.verify import Sizes, by_stages, planned, subject

BATCH = 24  # divides by 3 ranks, and in 4 microbatches by 2
MODEL = "gpt"  # fused q, k, v (sections at rest under tensor parallelism), a tied head, folded blocks
Emitted = tuple[str, RankCase]


def emitted(sizes: Sizes, how: str, schedule: str = "", virtual: int = 1) -> Emitted:
    """Source, weights and batch of one plan in float64; with a schedule on two places with that mesh each."""
    who = subject(MODEL, batch=BATCH)
    case = who.case(
        by_stages(who, sizes, how, 2, 4, schedule, virtual) if schedule else planned(who, sizes, how), BATCH
    )
    return case.source(), case.rank_case


def optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)  # type: ignore[arg-type]


@functools.cache
def alone(steps: int) -> dict[str, Tensor]:
    """Parameters of the plain model after some steps, by the graph on one device."""
    from autopar.verify.reference import trainable
    from passes.interpret import Interpret

    who = subject(MODEL, batch=BATCH)
    case = who.case(planned(who, (4,), "ddp"), BATCH)
    held = {
        n: w.detach().clone().requires_grad_(n in trainable(case.gm))
        for n, w in {**case.weights, **case.constants}.items()
    }
    step = optimizer([held[n] for n in trainable(case.gm)])
    for _ in range(steps):
        step.zero_grad()
        loss = next(
            v
            for v, about in zip(Interpret(case.gm, held).run_named(case.batch), case.gm.meta["outputs"], strict=True)
            if about["kind"] == "loss"
        )
        loss.backward()
        step.step()
    return {n: held[n].detach() for n in trainable(case.gm)}


def save(what: Emitted, folder: str) -> None:
    module = what[1].build(what[0])
    step = optimizer(module.parameters())
    module.train_step(*module.shard_batch(**what[1].batch))
    step.step()
    dcp.save({"model": module.state_dict(), "optimizer": module.optimizer_state_dict(step)}, checkpoint_id=folder)


def go_on(what: Emitted, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = what[1].build(what[0])
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    step = optimizer(module.parameters())
    state = {"model": module.state_dict(), "optimizer": module.optimizer_state_dict(step)}
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state["model"])
    module.load_optimizer_state_dict(step, state["optimizer"])
    loaded = module.full_state_dict()
    module.train_step(*module.shard_batch(**what[1].batch))
    step.step()
    return loaded, module.full_state_dict()


PLANS: dict[str, tuple[Sizes, str] | tuple[Sizes, str, str, int]] = {
    "tp_zero3 on 2x2": ((2, 2), "tp_zero3"),
    "tp on 4": ((4,), "tp"),
    "ddp on 2": ((2,), "ddp"),
    "zero3 on 3": ((3,), "zero3"),
    "hsdp on 2x2": ((2, 2), "hsdp"),
    "searched on 4": ((4,), "searched"),
    "random on 2x2": ((2, 2), "random 1"),
    "zero1 on 4": ((4,), "zero1"),
    "zero3 on 4": ((4,), "zero3"),
    "zero2 on 2": ((2,), "zero2"),
    "pp2 x zero1": ((2,), "zero1", "1f1b", 1),
    "pp2 x tp, interleaved": ((2,), "tp", "interleaved_1f1b", 2),
    "pp2 x zero3, zbv": ((2,), "zero3", "zbv_zero_bubble", 2),
}
PAIRS = [
    ("tp_zero3 on 2x2", "tp on 4"),
    ("tp_zero3 on 2x2", "ddp on 2"),
    ("tp on 4", "hsdp on 2x2"),
    ("zero3 on 3", "tp_zero3 on 2x2"),
    ("searched on 4", "zero3 on 3"),
    ("random on 2x2", "tp on 4"),
    ("ddp on 2", "random on 2x2"),
    ("zero1 on 4", "zero3 on 4"),
    ("zero1 on 4", "pp2 x zero1"),
    ("pp2 x zero1", "zero3 on 3"),
    ("zero3 on 4", "zero1 on 4"),
    ("zero1 on 4", "tp on 4"),
    ("zero2 on 2", "pp2 x tp, interleaved"),
    ("pp2 x tp, interleaved", "pp2 x zero1"),
    ("pp2 x zero3, zbv", "zero2 on 2"),
]
FAST = [PAIRS[0], PAIRS[3], PAIRS[7], PAIRS[8], PAIRS[13]]


@pytest.mark.parametrize(
    ("first", "then"), [*FAST, *(pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS if p not in FAST)]
)
def test_a_checkpoint_goes_on_under_another_plan(first: str, then: str, tmp_path: Path) -> None:
    one, other = emitted(*PLANS[first]), emitted(*PLANS[then])
    on_ranks(one[1].plan.ranks, save, one, str(tmp_path / "saved"))
    found = on_ranks(other[1].plan.ranks, go_on, other, str(tmp_path / "saved"))
    assert all(loaded.keys() >= alone(1).keys() for loaded, _ in found)
    for loaded, after in found:
        for wanted, got, when in ((alone(1), loaded, "loaded"), (alone(2), after, "after a step")):
            for name in wanted.keys() & got.keys():
                torch.testing.assert_close(
                    got[name], wanted[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name, w=when: f"{n} {w}: {m}"
                )


def _whole(what: Emitted) -> tuple[dict[str, Tensor], str, list[str]]:
    """One rank: what is there when a whole state dict was loaded, what is said of a name that no place has, and which
    are then unexpected where that is no matter."""
    module, doubled = what[1].build(what[0]), {name: value * 2 for name, value in what[1].weights.items()}
    module.load_state_dict(doubled)
    with pytest.raises(RuntimeError) as error:
        module.load_state_dict({**doubled, "nobody": torch.zeros(3)})
    return (
        module.full_state_dict(),
        str(error.value),
        module.load_state_dict({**doubled, "nobody": torch.zeros(3)}, strict=False).unexpected_keys,
    )


@pytest.mark.parametrize("how", ["pp2 x zero1", "tp on 4"])
def test_a_whole_state_dict_is_loaded_on_every_place(how: str) -> None:
    what = emitted(*PLANS[how])
    found = on_ranks(what[1].plan.ranks, _whole, what)
    assert all(loaded.keys() >= what[1].weights.keys() for loaded, _, _ in found)
    for loaded, said, unexpected in found:
        assert 'Unexpected key(s) in state_dict: "nobody"' in said and unexpected == ["nobody"]
        for name, value in loaded.items():
            torch.testing.assert_close(value, what[1].weights[name].to(value) * 2, rtol=0, atol=0)


def _all_of_it(what: Emitted) -> tuple[dict[str, Tensor], dict[str, Tensor | None], float, float]:
    """One rank: whole weights and gradients after a step, its loss, and that of a step with these weights doubled and
    given back as they were."""
    module = what[1].build(what[0])
    batch = module.shard_batch(**what[1].batch)
    loss = module.train_step(*batch)
    state, grads = module.full_state_dict(), module.full_grads()
    module.load_full({name: value * 2 for name, value in state.items()})
    module.load_full(state)
    return state, grads, float(loss), float(module.train_step(*batch))


@pytest.mark.parametrize(
    "how", ["pp2 x tp, interleaved", pytest.param("pp2 x zero1", marks=pytest.mark.slow), "tp on 4"]
)
def test_every_rank_has_the_whole_state_whatever_its_place(how: str) -> None:
    what, model = emitted(*PLANS[how]), subject(MODEL)
    for state, grads, loss, again in on_ranks(what[1].plan.ranks, _all_of_it, what):
        assert list(state) == [name for name in model.captured.order if name in model.weights] == list(model.weights)
        for name, value in state.items():
            torch.testing.assert_close(value, what[1].weights[name].to(value), rtol=0, atol=0)
        assert grads.keys() == {name for name in state if name not in model.captured.aliases} and all(
            grad is not None for grad in grads.values()
        )
        assert loss == pytest.approx(again, rel=1e-12)


def _within(what: Emitted) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One rank: what it has when a module around the model loaded a whole state dict, and then what is in the state
    dict of that module, whole."""
    outer = nn.ModuleDict({"inner": what[1].build(what[0])})
    outer.load_state_dict({f"inner.{name}": value * 2 for name, value in what[1].weights.items()})
    state = {name: value.clone() for name, value in outer.state_dict().items()}
    loaded = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    for parameter in outer.parameters():
        parameter.detach().zero_()
    outer.load_state_dict(state)
    return loaded, outer["inner"].full_state_dict()


@pytest.mark.parametrize("how", ["pp2 x zero1", "tp on 4"])
def test_the_model_may_be_part_of_a_module(how: str) -> None:
    what = emitted(*PLANS[how])
    wanted = {name: value * 2 for name, value in what[1].weights.items()}
    for loaded, whole in on_ranks(what[1].plan.ranks, _within, what):
        assert loaded and whole.keys() >= wanted.keys()
        for name, value in {**loaded, **{f"inner.{name}": value for name, value in whole.items()}}.items():
            torch.testing.assert_close(value, wanted[name.removeprefix("inner.")].to(value), rtol=0, atol=0)


LAZY: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2, weight_decay=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, torch.tensor(1e-2), foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


def _before_any_step(what: Emitted, name: str) -> list[dict[str, Tensor]]:
    """One rank: parameters after two steps of an optimizer that is not asked for its state, of one that is asked, of
    one that is asked when gradients are there, and of one that is given what the last one said."""
    found, state = [], dict[str, object]()
    for when in ("never", "asked", "with gradients", "given"):
        module = what[1].build(what[0])
        batch, step = module.shard_batch(**what[1].batch), LAZY[name](module.parameters())
        if when == "asked":
            module.optimizer_state_dict(step)
        if when == "given":
            module.load_optimizer_state_dict(step, state)
        for _ in range(2):
            module.train_step(*batch)
            if when == "with gradients" and not state:
                state = copy.deepcopy(module.optimizer_state_dict(step))
                assert set(state["state"]) == {name for name, _ in module.named_parameters()}  # type: ignore[call-overload]
            step.step()
            step.zero_grad()
        found.append(module.full_state_dict())
    return found


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize(
    "how", [((2,), "zero2"), pytest.param(((1,), "single", "1f1b", 1), marks=pytest.mark.slow)], ids=str
)
def test_the_state_of_an_optimizer_that_has_not_stepped_is_that(how: tuple[Sizes, str], name: str) -> None:
    for never, *others in on_ranks(2, _before_any_step, emitted(*how), name):
        for other in others:
            for parameter, value in never.items():
                # torch loads NAdam's product in another dtype
                torch.testing.assert_close(
                    other[parameter], value, rtol=1e-6, atol=1e-7, msg=lambda m, n=parameter: f"{n}: {m}"
                )


class Unused(nn.Module):
    """Of its layers one is not read, as poolers are that no loss needs, and one may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.pooler, self.down = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).square().mean()


class Scaled(Unused):
    """One parameter has no dims, as the scale of logits that models of images and texts learn, and its moments have
    none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.exp()


def _gone_on(optimizer: str, folder: str) -> list[dict[str, Tensor]]:
    """One rank: parameters after three steps without a stop, of which a layer trains in the last two alone, and with
    one behind the first."""
    torch.manual_seed(0)
    x, found = torch.randn(8, 4), []
    compiled = autopar.compile(Unused(), "cpu:1x2", (x,), recipe="zero3", time_limit_s=5.0)
    first = compiled.full_state_dict()
    for stops in (False, True):
        compiled.load_full(first)
        compiled.module.up.requires_grad_(False)
        step, hook = LAZY[optimizer](compiled.parameters()), mock.Mock()
        step.register_step_post_hook(hook)
        for number in range(3):
            compiled.train_step(*compiled.shard_batch(x))
            step.step()
            step.zero_grad()
            compiled.module.up.requires_grad_(True)
            if stops and not number:
                dcp.save(
                    {"model": compiled.state_dict(), "optimizer": compiled.optimizer_state_dict(step)},
                    checkpoint_id=folder,
                )
                assert len(step.state) == 2 and hook.call_count == 1
                step = LAZY[optimizer](compiled.parameters())
                state = {"model": compiled.state_dict(), "optimizer": compiled.optimizer_state_dict(step)}
                dcp.load(state, checkpoint_id=folder)
                compiled.load_state_dict(state["model"])
                compiled.load_optimizer_state_dict(step, state["optimizer"])
        found.append(compiled.full_state_dict())
    return found


@pytest.mark.parametrize("name", ["AdamW", pytest.param("SGD", marks=pytest.mark.slow)])
def test_parameters_that_no_gradient_has_reached_have_state(name: str, tmp_path: Path) -> None:
    """That of an optimizer that has not stepped, which a checkpoint is loaded into, has all parameters that train:
    torch.distributed.checkpoint missed them."""
    for straight, stopped in on_ranks(2, _gone_on, name, str(tmp_path)):
        for parameter, value in straight.items():
            torch.testing.assert_close(stopped[parameter], value, rtol=1e-6, atol=1e-7)


def _line(compiled: autopar.Compiled) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        [parameter for name, parameter in compiled.named_parameters() if "pooler" not in name], max_iter=2
    )


def _along_a_line() -> tuple[set[str], list[dict[str, Tensor]]]:
    """Whose state is saved, and parameters after two steps without a stop and with one."""
    torch.manual_seed(0)
    x, found, names = torch.randn(8, 4), [], set[str]()
    compiled = autopar.compile(Unused(), "cpu:1x1", (x,), recipe="single", time_limit_s=5.0)
    first = compiled.full_state_dict()
    for stops in (False, True):
        step = _line(compiled.load_full(first))

        def closure(step: torch.optim.Optimizer = step) -> Tensor:
            step.zero_grad()
            return compiled.train_step(*compiled.shard_batch(x))

        step.step(closure)
        if stops:
            saved = compiled.optimizer_state_dict(step)
            names, step = set(saved["state"]), _line(compiled)
            compiled.load_optimizer_state_dict(step, saved)
            with pytest.raises(RunError, match=r"has nothing of 1 of the 4 parameters .*: up.weight"):
                compiled.load_optimizer_state_dict(step, {**saved, "state": {}})
        step.step(lambda step=step: closure(step))
        found.append(compiled.full_state_dict())
    return names, found


def test_state_of_all_parameters_together_is_that_of_the_first() -> None:
    """LBFGS, whose step needs a closure."""
    [(names, (straight, stopped))] = on_ranks(1, _along_a_line)
    assert names == {"up.weight"}
    for parameter, value in straight.items():
        torch.testing.assert_close(stopped[parameter], value, rtol=0, atol=0)
