"""Checks of values that only raise: the graph is the model without them, and a note says so; whether values are finite
is answered; other branches on values are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture.lift_dtype import lift
from autopar.errors import CaptureError


def bounded(x):
    if x.min() < -9:
        raise ValueError("too small")
    elif (x > 9).any() or x.isnan().any():
        said = f"{x.shape} is too large"
        raise ValueError(said)
    return 2 * x


def negated(x):
    # fmt: off
    if not (torch.all(x < 9) and
            torch.all(x > -9)):
        raise ValueError
    # fmt: on
    return 2 * x


def asserted(x):
    assert (x < 9).all(), "too large"
    return 2 * x


def otherwise(x):
    if bool((x < 9).all()):
        x = 2 * x
    else:
        raise ValueError
    return x


def raised_anew(x):
    try:
        return asserted(x)
    except AssertionError as error:
        raise ValueError from error


def caught(x):
    try:
        return asserted(x)
    except AssertionError:
        return x


def caught_here(x):
    try:
        if (x > 9).any():
            raise ValueError
    except ValueError:
        return x
    return 2 * x


def chosen(x):
    if (x > 9).any():
        return x
    return 2 * x


def both(x):
    if x.sum() > 0:
        raise ValueError
    else:
        raise TypeError


def chooses_a_check(x):
    if (x > 9).any() if x.sum() > 0 else (x < 0).any():
        raise ValueError
    return 2 * x


def clamped(x):
    if not torch.isfinite(x).all():
        most = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-most, max=most)
    return 2 * x


def replaced(x):
    broken = x.isnan() | x.isinf()
    if torch.any(broken):
        x = torch.nan_to_num(x)
    if torch.isnan(x.sum()) or bool(~torch.all(x.isfinite())):
        return x
    return 2 * x


def any_finite(x):
    return 2 * x if torch.isfinite(x).any() else x


def written_to(x):
    fine = x.isfinite()
    fine[:, 0] = False
    return x if fine.all() else 2 * x


def narrowed_in_place(x):
    fine = x.isfinite()
    fine.unsqueeze(0).logical_and_(x > 9)
    return x if torch.all(fine) else 2 * x


def written_by_out(x):
    fine = x.isfinite()
    torch.gt(x, 9, out=fine)
    return x if fine.all() else 2 * x


def of_another(x):
    return x if torch.any(x.isnan() | (x > 9)) else 2 * x


def hidden(x):
    return x if torch.isinf(x.masked_fill(x < 9, float("-inf"))).any() else 2 * x


def hidden_in_place(x):
    seen = x.clone()
    seen[:, 0] = float("-inf")
    return x if not seen.isfinite().all() else 2 * x


class Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.map, self.change = nn.Linear(3, 3), change

    def forward(self, x, y):
        return F.mse_loss(self.map(self.change(x)), y)


def computed(captured, model, x, y):
    """The loss, by the graph."""
    (loss,) = lift(captured.gm)(
        *(
            model.get_parameter(node.meta["fqn"])
            if node.meta["role"] == "param"
            else {"x": x, "y": y}[node.meta["input"]]
            for node in captured.gm.graph.find_nodes(op="placeholder")
        )
    )
    return loss


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (bounded, ["if x.min() < -9:", "elif (x > 9).any() or x.isnan().any():"]),
        (negated, ["if not (torch.all(x < 9) and"]),
        (asserted, ['assert (x < 9).all(), "too large"']),
        (otherwise, ["if bool((x < 9).all()):"]),
        (raised_anew, ['assert (x < 9).all(), "too large"']),
    ],
)
def test_a_check_is_left_out_and_named(change, lines):
    model, x, y = Net(change), torch.rand(4, 3), torch.rand(4, 3)
    captured = capture(model, (x, y))
    assert [note.split("before ")[1].split(": ", 1)[1].rstrip(")") for note in captured.notes] == [
        line.rstrip(")") for line in lines
    ]
    assert all("check of values is no part of the emitted program" in note for note in captured.notes)
    assert list(captured.gm.meta["symbols"]) == ["b"]
    torch.testing.assert_close(computed(captured, model, x, y), model(x, y))


@pytest.mark.parametrize(("change", "questions"), [(clamped, 1), (replaced, 2)])
def test_values_are_taken_to_be_finite(change, questions):
    model, x, y = Net(change), torch.rand(4, 3), torch.rand(4, 3)
    captured = capture(model, (x, y))
    assert len(captured.notes) == questions and all(
        "taken to be finite" in note and "test_value_checks.py" in note for note in captured.notes
    )
    assert not any("isfinite" in str(node.target) or "clamp" in str(node.target) for node in captured.gm.graph.nodes)
    torch.testing.assert_close(computed(captured, model, x, y), model(x, y))


def test_of_float16_nobody_knows():
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Net(clamped).half(), (torch.rand(4, 3).half(), torch.rand(4, 3).half()))


@pytest.mark.parametrize(
    "change",
    [
        caught,
        caught_here,
        chosen,
        both,
        chooses_a_check,
        any_finite,
        of_another,
        written_to,
        narrowed_in_place,
        written_by_out,
        hidden,
        hidden_in_place,
    ],
)
def test_other_branches_are_refused(change):
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Net(change), (torch.rand(4, 3), torch.rand(4, 3)))


def test_a_loss_of_torch_that_checks():
    captured = capture(
        nn.Linear(3, 3),
        (torch.rand(4, 3), torch.rand(4, 3), torch.rand(4, 3)),
        loss_fn=lambda out, wanted, var: F.gaussian_nll_loss(out, wanted, var),
    )
    assert list(captured.gm.meta["symbols"]) == ["b"] and "torch.any(var < 0)" in captured.notes[0]


class Checked(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.map, self.change = nn.Linear(3, 3), change

    def forward(self, x):
        return torch.tanh(self.map(self.change(x)))


class Blocks(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.layers = nn.ModuleList(Checked(change) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("change", [asserted, clamped])
def test_blocks_with_checks_are_folded(change):
    captured = capture(Blocks(change), (torch.rand(4, 3), torch.rand(4, 3)), loss_fn=F.mse_loss)
    assert [node.meta.get("repeat") for node in captured.gm.graph.nodes if node.op == "call_module"] == [6] and len(
        captured.notes
    ) == 1
