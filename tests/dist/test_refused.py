"""What autograd and optimizers offer on one device and a plan has no way for is refused, on every rank."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import autopar
from autopar.errors import RunError
from tests.helpers.captures import captured_once
from tests.helpers.ranks import on_ranks

WIDTH, ROWS = 8, 8


class Model(nn.Module):
    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


def compiled(recipe: str, hidden: int = 4 * WIDTH) -> tuple[autopar.compiled.Compiled, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double()
    with captured_once((__name__, hidden)):
        made = autopar.compile(Model(hidden).double(), "cpu:1x2", batch, recipe=recipe, time_limit_s=5.0)
    return made, made.shard_batch(*batch)


def said(call: Callable[[], object]) -> str:
    """The message of the RunError that it ends in, "" where there is none."""
    try:
        call()
    except RunError as error:
        return str(error)
    return ""


def _inputs(recipe: str) -> tuple[str, str, str]:
    made, (x, y) = compiled(recipe)
    wrong = said(lambda: made.train_step(x.detach().requires_grad_(), y))
    with torch.no_grad():
        evaluated = said(lambda: made(x.requires_grad_(), y))
    assert made.training and not made.eval().training and made.train().training
    return wrong, evaluated, said(lambda: made.train_step(x.detach(), y))


@pytest.mark.parametrize("recipe", ["tp", "ddp", "1f1b"])
def test_gradients_of_inputs(recipe: str) -> None:
    for wrong, evaluated, right in on_ranks(2, _inputs, recipe):
        assert (
            "input 'x' requires grad, and a plan has ways for gradients of parameters alone" in wrong
            and "x.detach()" in wrong
        )
        assert not evaluated and not right


def _unlike(recipe: str) -> list[str]:
    made, _ = compiled(recipe)
    x = torch.randn(ROWS, WIDTH).double()
    return [said(partial(made.train_step, *made.shard_batch(*batch))) for batch in ((x, x[:2]), (x[:2], x), (x, x))]


@pytest.mark.parametrize("recipe", ["tp", "ddp", "1f1b"])
def test_targets_of_another_batch(recipe: str) -> None:
    for fewer, more, right in on_ranks(2, _unlike, recipe):
        assert (
            "dim 0 of input 'y' is 2, dim 0 of input 'x' is 8" in fewer
            and "dim 0 of input 'y' is 8, dim 0 of input 'x' is 2" in more
        )
        assert not right


def _second(recipe: str) -> tuple[str, bool]:
    made, batch = compiled(recipe)
    wrong = said(lambda: made(*batch).backward(create_graph=True))
    made.zero_grad()
    made(*batch).backward()
    return wrong, all(p.grad is not None for p in made.parameters())


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "tp"])
def test_second_derivatives_through_a_backward(recipe: str) -> None:
    for wrong, right in on_ranks(2, _second, recipe):
        assert "a backward with create_graph=True" in wrong and right


def _lines(recipe: str, hidden: int) -> str:
    made, batch = compiled(recipe, hidden)
    return said(lambda: torch.optim.LBFGS(made.parameters()).step(lambda: made.train_step(*batch)))


@pytest.mark.parametrize(
    ("recipe", "hidden", "why"),
    [
        ("1f1b", 32, "LBFGS takes inner products over all parameters"),
        ("zero3", 32, ""),
        ("ddp", 7, ""),
        (
            "zero3",
            7,
            "LBFGS makes one vector of all parameters, which torch does of equal parts alone, and up.weight of shape "
            "(7, 8) rests as S0",
        ),
    ],
)
def test_steps_along_lines(recipe: str, hidden: int, why: str) -> None:
    for wrong in on_ranks(2, _lines, recipe, hidden):
        assert wrong.startswith(why) and bool(wrong) == bool(why)


def _weighed(recipe: str) -> list[str]:
    made, batch = compiled(recipe)
    return [
        said(partial(made.train_step, *batch, loss_weight=weight))
        for weight in (None, "1", torch.ones(2), float("nan"), float("inf"), 0.5, 0, torch.tensor(0.5))
    ]


@pytest.mark.parametrize("recipe", ["ddp", "1f1b"])
def test_weights_of_losses_that_are_no_numbers(recipe: str) -> None:
    for *wrong, half, none, tensor in on_ranks(2, _weighed, recipe):
        assert all(text.startswith("loss_weight is ") and "wanted a finite number" in text for text in wrong)
        assert not (half or none or tensor)


# parts that do not train: all, before any step was taken and behind one, and those of one place of a pipeline
FROZEN = ("", "", "up", "down")


def _frozen(recipe: str) -> list[str]:
    """One rank: what is said of a step in which all is frozen, its evaluation, and of steps in which some is."""
    made, batch = compiled(recipe)
    found = []
    for part in FROZEN:
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(not name.startswith(part))
        found.append(said(partial(made.train_step, *batch)))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.requires_grad_(False)
        return [*found, said(partial(made.module, *batch))]


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "1f1b"])
def test_steps_of_which_all_parameters_are_frozen(recipe: str) -> None:
    """A pipeline gave the loss, and changed nothing."""
    for first, second, *rest in on_ranks(2, _frozen, recipe):
        assert first == second and first.startswith("train_step: no parameter has a gradient in this step")
        assert not any(rest)


def _torn(recipe: str) -> tuple[str, str, str]:
    """One rank: what is said where each froze another parameter, of an evaluation, and where they are alike again."""
    made, batch = compiled(recipe)
    made.train_step(*batch)
    chosen = made.module.get_parameter("up.weight" if dist.get_rank() else "down.bias")
    chosen.requires_grad_(False)
    wrong = said(lambda: made.train_step(*batch))
    with torch.no_grad():
        evaluated = said(lambda: made(*batch))
    chosen.requires_grad_(True)
    return wrong, evaluated, said(lambda: made.train_step(*batch))


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "tp"])
def test_ranks_that_have_frozen_different_parameters(recipe: str) -> None:
    """They summed the gradients that they had, of different parameters."""
    for wrong, evaluated, right in on_ranks(2, _torn, recipe):
        assert re.match(
            r"parameter (up.weight is frozen|down.bias trains) on rank 1 and (trains|is frozen) on rank 0 \(2 differ "
            r"so\)",
            wrong,
        ), wrong
        assert not evaluated and not right


def _cast(recipe: str) -> tuple[str, str]:
    made, batch = compiled(recipe)
    made.train_step(*batch)
    made.module.float()
    wrong = said(lambda: made.train_step(*(x.float() for x in batch)))
    made.module.double()
    return wrong, said(lambda: made.train_step(*batch))


@pytest.mark.parametrize(("recipe", "why"), [("1f1b", "is in torch.float32, wanted torch.float64"), ("zero3", "")])
def test_stages_in_another_dtype(recipe: str, why: str) -> None:
    for wrong, right in on_ranks(2, _cast, recipe):
        assert why in wrong and bool(wrong) == bool(why) and not right


HOOKS: dict[str, Callable[..., None]] = {
    "register_forward_hook": lambda module, inputs, outputs: None,
    "register_forward_pre_hook": lambda module, inputs: None,
    "register_full_backward_hook": lambda module, into, outof: None,
    "register_full_backward_pre_hook": lambda module, outof: None,
    "register_backward_hook": lambda module, into, outof: None,
}


def _watched(recipe: str) -> dict[str, tuple[str, int]]:
    """What is said of each hook of the whole module, and how often it is called in a step."""
    made, batch = compiled(recipe)
    found = {}
    for name, hook in HOOKS.items():
        module, watch = copy.deepcopy(made.module), mock.Mock(side_effect=hook)
        wrong = said(lambda module=module, name=name, watch=watch: getattr(module, name)(watch))  # type: ignore[misc]
        module.train_step(*batch)
        found[name] = wrong, watch.call_count
    return found


@pytest.mark.parametrize(
    ("recipe", "why", "calls"), [("1f1b", "hooks of a pipeline would never be called", 0), ("ddp", "", 1)]
)
def test_hooks_of_the_whole_module(recipe: str, why: str, calls: int) -> None:
    for found in on_ranks(2, _watched, recipe):
        for name, (wrong, called) in found.items():
            assert wrong.startswith(why) and bool(wrong) == bool(why) and called == calls, name


class Several(Model):
    """Beside its loss: another one, a number that is only looked at, and what the loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(4 * WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = F.gelu(self.up(x))
        out = self.down(hidden)
        return {
            "loss": F.mse_loss(out, y),
            "second": self.aside(hidden).square().mean(),
            "seen": out.detach().square().mean(),
            "out": out,
        }


def _outputs(recipe: str) -> dict[str, str]:
    """One rank: what backwards through other outputs say. A loss with what may be added to it has the gradients of one
    device, and outputs are those of it."""
    torch.manual_seed(0)
    model = Several().double()
    batch = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double()
    with captured_once((__name__, Several)):
        made = autopar.compile(model, "cpu:1x2", batch, recipe=recipe, time_limit_s=5.0)
    mine = made.shard_batch(*batch)
    wrong = {name: said((made(*mine)["loss"] + made(*mine)[name].sum()).backward) for name in ("second", "out")}
    made.zero_grad()
    given = made(*mine)
    (given["loss"] + given["seen"] + given["second"].detach()).backward()
    wanted = model(*batch)
    wanted["loss"].backward()
    for name, parameter in model.named_parameters():
        found = made.module.full_grads()[name]
        assert (found is None) == (parameter.grad is None) and (
            found is None or torch.allclose(found, parameter.grad)
        ), name
    whole = made.full(given)
    assert all(torch.allclose(whole[name], value) for name, value in wanted.items())
    with torch.no_grad():
        assert not any(value.requires_grad for value in made(*mine).values())
    return wrong


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "tp"])
def test_gradients_through_other_outputs_than_the_loss(recipe: str) -> None:
    for wrong in on_ranks(2, _outputs, recipe):
        for name, text in wrong.items():
            assert (
                f"a gradient came back to output '{name}', and a plan has ways for the gradient of its loss alone"
                in text
            )


def _without_gradients(recipe: str) -> list[str]:
    made, batch = compiled(recipe)
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(said(lambda: made.train_step(*batch)))
    made.train_step(*batch)
    return found


@pytest.mark.parametrize("recipe", ["zero3", "1f1b"])
def test_steps_without_gradients(recipe: str) -> None:
    for found in on_ranks(2, _without_gradients, recipe):
        assert [text.split(",")[0] for text in found] == [
            "train_step in a torch.no_grad region",
            "train_step in a torch.inference_mode region",
        ]


def _pickled(recipe: str) -> list[str]:
    module = compiled(recipe)[0].module
    return [
        said(lambda: torch.save(module, io.BytesIO())),
        said(lambda: pickle.dumps({"model": module})),
        said(lambda: copy.copy(module)),
        said(lambda: copy.deepcopy(module)),
        said(lambda: module.apply(nn.init.zeros_)),
    ]


def test_modules_in_pickles_and_functions_of_their_parts() -> None:
    """pickle's own error named a module of Python that there is none of; a function found no class of the model's."""
    for *found, copied, applied in on_ranks(2, _pickled, "zero3"):
        assert all(text.startswith("a sharded module cannot be pickled (torch.save(module)") for text in found)
        assert not copied and "Initialise the model before compile" in applied


class Tied(Model):
    """One weight has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, 4 * WIDTH)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.again(x).square().mean()


def _untie(module: nn.Module) -> None:
    module.again.weight = nn.Parameter(module.up.weight.detach().clone())


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "another part": (
        lambda module: setattr(module, "down", nn.Linear(4 * WIDTH, WIDTH).double()),
        "down was replaced or deleted since the model was compiled",
    ),
    "no part": (lambda module: delattr(module, "down"), "down was replaced or deleted since the model was compiled"),
    "a parametrization": (
        lambda module: parametrize.register_parametrization(module.down, "weight", nn.Identity()),
        "down.weight was deleted since the model was compiled (or made part of a parametrization)",
    ),
    "a whole weight": (
        lambda module: setattr(module.up, "bias", nn.Parameter(torch.zeros(4 * WIDTH).double())),
        "up.bias was replaced by a tensor of which this rank has (32,), wanted (16,)",
    ),
    "two weights": (
        _untie,
        "again.weight and up.weight were one parameter when the model was compiled, and are two now",
    ),
    "a part beside": (lambda module: setattr(module, "aside", nn.Linear(2, 2)), ""),
    "the same part": (lambda module: setattr(module, "down", module.down), ""),
}


def _changed(recipe: str) -> dict[str, str]:
    """One rank: what a step says behind each change of the tree of names."""
    batch, found = (torch.zeros(ROWS, WIDTH).double(),) * 2, {}
    made = autopar.compile(Tied().double(), "cpu:1x2", batch, recipe=recipe, time_limit_s=5.0)
    mine = made.shard_batch(*batch)
    for name, (change, _) in CHANGES.items():
        module = copy.deepcopy(made.module)
        module.train_step(*mine)
        change(module)
        found[name] = said(partial(module.train_step, *mine))
    return found


def test_parts_that_no_step_would_see() -> None:
    for found in on_ranks(2, _changed, "zero3"):
        for name, text in found.items():
            assert text.startswith(CHANGES[name][1]) and bool(text) == bool(CHANGES[name][1]), (name, text)
