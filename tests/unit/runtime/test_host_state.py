"""Optimizer state on the host: the numbers of one step for all, one parameter's state on the device at a time, and back
to the same place."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.runtime import Mesh, Param, ShardedModule, host_state

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
}


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, and for itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "step": 0})
        self.steps = 0
        for group in self.param_groups:
            group["pace"] = torch.tensor(1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["step"] += 1
            group["pace"].mul_(0.5)
            for param in (param for param in group["params"] if param.grad is not None):
                self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                param.sub_(self.state[param]["sum"] * group["lr"] * group["pace"] / (group["step"] + self.steps))


class Beside(torch.optim.AdamW):
    """Calls the step of torch, and does something behind it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            param.sub_(param.grad, alpha=0.1)


class Together(Counting):
    """Steps by a number that it makes of all gradients, as Prodigy and D-Adaptation do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["size"] = sum(float(param.grad.abs().sum()) for param in group["params"] if param.grad is not None)
        super().step(closure)


OPTIMIZERS |= {"counting": Counting, "beside": Beside}


class Three(ShardedModule):
    """Three weights; the state of the last one stays with it."""

    MESH = Mesh((1,), ("x",), "cpu")
    PARAMS: ClassVar = {
        "first": Param((4, 3), "float64", "R", host_state=True),
        "second": Param((5,), "float64", "R", host_state=True),
        "third": Param((2, 2), "float64", "R"),
    }


def _built() -> Three:
    model = Three()
    torch.manual_seed(0)
    for param in model.parameters():
        param.data.copy_(torch.randn_like(param))
    return model


def _gradients(model: Three, step: int) -> None:
    torch.manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn_like(param)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_optimizer_alone(name: str) -> None:
    model = _built()
    plain = [param.detach().clone().requires_grad_() for param in model.parameters()]
    groups = [{"params": list(model.parameters())[:1], "weight_decay": 0.1}, {"params": list(model.parameters())[1:]}]
    ours, alone = (
        OPTIMIZERS[name](groups),
        OPTIMIZERS[name]([{"params": plain[:1], "weight_decay": 0.1}, {"params": plain[1:]}]),
    )
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in (ours, alone)]
    for step in range(3):
        _gradients(model, step)
        if step == 1:
            model.get_parameter("second").grad = None  # no part of this step
        given = [param.grad for param in model.parameters()]
        for other, gradient in zip(plain, given, strict=True):
            other.grad = None if gradient is None else gradient.clone()
        for optimizer, schedule in zip((ours, alone), schedules, strict=True):
            optimizer.step()
            schedule.step()
        assert [param.grad for param in model.parameters()] == given or all(
            a is b for a, b in zip((p.grad for p in model.parameters()), given, strict=True)
        )
        for param, other in zip(model.parameters(), plain, strict=True):
            assert torch.equal(param, other), (name, step)
    assert [len(group["params"]) for group in ours.param_groups] == [1, 2]
    assert [[group.get("step") for group in optimizer.param_groups] for optimizer in (ours, alone)] == [
        [3 if name == "counting" else None] * 2
    ] * 2


def test_an_optimizer_that_takes_parameters_together_is_refused() -> None:
    model = _built()
    optimizer = Together(model.parameters())
    _gradients(model, 0)
    with pytest.raises(RunError, match=r"Together makes its 'size' of all parameters together"):
        optimizer.step()


def test_one_parameter_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is brought is taken back before the next is, and what has no such state is stepped with the rest."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def watch(word: str, real: Any) -> None:
        def spy(state: Any, param: Tensor, *rest: Any) -> Any:
            seen.append((word, tuple(param.shape)))
            return real(state, param, *rest)

        monkeypatch.setattr(host_state, word, spy)

    watch("_brought", host_state._brought)
    watch("_taken", host_state._taken)
    model = _built()
    optimizer = torch.optim.AdamW(model.parameters())
    _gradients(model, 0)
    optimizer.step()
    assert seen == [(word, shape) for shape in ((4, 3), (5,)) for word in ("_brought", "_taken")]
    assert set(map(len, optimizer.state.values())) == {3} and len(optimizer.state) == 3


def test_state_goes_to_the_device_and_back_to_its_home() -> None:
    """Meta tensors stand for a device: what is brought is there, what is taken is in the memory that it had."""
    param, home = torch.empty(3, device="meta"), torch.ones(3)
    state: dict[str, Any] = {"step": torch.tensor(1.0), "exp_avg": home}
    homes = host_state._brought(state, param)
    assert state["exp_avg"].device.type == "meta" and homes == {"exp_avg": home} and state["step"].device.type == "cpu"
    state["exp_avg"] = torch.full((3,), 2.0)  # what the step made of it
    host_state._taken(state, param, homes)
    assert state["exp_avg"] is home and home.tolist() == [2.0, 2.0, 2.0]


def test_a_closure_is_refused() -> None:
    model = _built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _gradients(model, 0)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RunError, match="closure would run once for every parameter"):
        optimizer.step(lambda: torch.zeros(()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
