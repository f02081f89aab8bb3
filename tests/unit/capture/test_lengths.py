"""A model may ask for the length of a tensor: it stays symbolic, and Python's own `len` is as before."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture.lengths import symbolic_lengths
from autopar.verify import graph_rows


class Towers(nn.Module):
    """Rows of one tower belong to the rows of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.left(x) @ self.right(y).T
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def spread(outputs: Tensor, wanted: Tensor) -> Tensor:
    """A loss that asks for a length."""
    return (outputs - wanted).square().sum() / len(wanted)


def test_a_length_stays_symbolic() -> None:
    captured = capture(Towers(), (torch.zeros(6, 4), torch.zeros(6, 4)))
    assert captured.hints == {"b": 6} and not captured.notes


def test_a_loss_function_may_ask_too() -> None:
    captured = capture(nn.Linear(4, 2), (torch.zeros(6, 4), torch.zeros(6, 2)), loss_fn=spread)
    assert captured.hints == {"b": 6} and not captured.notes


def test_the_name_is_set_for_the_time_of_the_trace() -> None:
    here = vars(sys.modules[__name__])
    with pytest.raises(KeyError), symbolic_lengths(Towers()):
        assert here["len"](torch.zeros(3, 2)) == 3 and here["len"]([1, 2]) == 2
        raise KeyError
    assert "len" not in here


def test_a_file_with_a_length_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = vars(sys.modules[__name__])
    monkeypatch.setitem(here, "len", str)
    with symbolic_lengths(Towers()):
        assert here["len"] is str
    assert here["len"] is str


class Kinds(nn.Module):
    """Tables for kinds of layers, which it goes through in the order of a set: another one in every process."""

    NAMES = tuple(f"kind {number}" for number in range(8))

    def __init__(self, find: Callable[[tuple[str, ...]], Iterable[str]]) -> None:
        super().__init__()
        self.map, self.find = nn.Linear(4, 4), find

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance({1}, set) and isinstance(set(), set)
        tables = {name: torch.arange(4) * (2 + self.NAMES.index(name)) for name in self.find(self.NAMES)}
        x = self.map(x)
        for name in self.NAMES:
            x = x + tables[name]
        return x.sum()


@pytest.mark.parametrize(
    "find",
    [
        lambda names: set(names),
        lambda names: list(set(names)),
        lambda names: set(names[:4]) | set(names[2:]),
        lambda names: {**dict.fromkeys(set(names).union({1}).difference({1}))},
    ],
)
def test_strings_of_a_set_come_in_order(find: Callable[[tuple[str, ...]], Iterable[str]]) -> None:
    captured = capture(Kinds(find), (torch.zeros(6, 4),), mode="inference")
    factors = [node.args[1] for node in captured.gm.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert factors == list(range(2, 10))


class Lists(nn.Module):
    """What each sample has as a list, and then `use` of it."""

    def __init__(self, use) -> None:
        super().__init__()
        self.map, self.use = nn.Linear(3, 3), use

    def forward(self, x: Tensor) -> Tensor:
        rows = list(self.map(x))
        return self.use(rows).square().sum() if isinstance(rows, list) and list(range(2)) == [0, 1] else x.sum()


@pytest.mark.parametrize(
    ("use", "shape"),
    [
        (lambda rows: torch.cat(rows, dim=0), (24, 3)),
        (lambda rows: torch.cat(rows), (24, 3)),
        (lambda rows: torch.cat(rows, axis=0), (24, 3)),
        (lambda rows: torch.cat(tensors=rows), (24, 3)),
        (lambda rows: torch.stack(rows), (6, 4, 3)),
        (lambda rows: torch.cat([torch.cat(rows), torch.cat(rows)], axis=1), (24, 6)),
        (lambda rows: torch.stack((torch.cat(rows),), -1), (24, 3, 1)),
    ],
)
def test_rows_that_are_put_together_again_stay_symbolic(use, shape) -> None:
    found: list[Tensor] = []
    model = Lists(lambda rows: found.append(use(rows)) or found[-1])
    captured = capture(model, (torch.randn(6, 4, 3),))
    assert captured.hints == {"b": 6} and not captured.notes
    rows, notes = graph_rows(model, captured, (torch.randn(5, 4, 3),), {}, training=True)
    assert not notes and len(rows) == 4 and all(row.ok for row in rows)
    # outside of a capture it is torch's own
    assert model(torch.randn(6, 4, 3)) is not None and found[-1].shape == shape


@pytest.mark.parametrize(
    "use",
    [
        lambda rows: rows[0] * rows[-1],
        lambda rows: sum(rows),
        lambda rows: torch.cat(rows, dim=1),
        lambda rows: torch.cat([*rows, rows[0]]),
    ],
)
def test_rows_that_are_used_otherwise_fix_the_batch(use) -> None:
    model = Lists(use)
    captured = capture(model, (torch.randn(6, 4, 3),))
    assert captured.hints == {} and captured.notes[0].startswith("b is static")
    rows, notes = graph_rows(model, captured, (torch.randn(6, 4, 3),), {}, training=True)
    assert not notes and all(row.ok for row in rows)


class Numbers(nn.Module):
    """A loss that `use` makes of a linear map of samples."""

    def __init__(self, use) -> None:
        super().__init__()
        self.map, self.use = nn.Linear(3, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.map(x), x)


@pytest.mark.parametrize(
    "use",
    [
        lambda y, x: y.square().sum() / int(x.shape[0]),
        lambda y, x: y.square().sum() / float(int(x.size(0) * x.size(1))),
        lambda y, x: y.reshape(*map(int, (x.shape[0], 12))).square().mean(),
        lambda y, x: y.flatten(1).square().sum(1).topk(int(x.shape[0] * 0.7)).values.mean(),
        lambda y, x: y[int(-0.4 * x.shape[0]) :].square().mean(),
        lambda y, x: (
            y.square().mean()
            if isinstance(int(x.shape[0]), int) and isinstance(float(x.shape[0]), float) and not isinstance(1.5, int)
            else y.mean()
        ),
        lambda y, x: y[:, : int("2")].square().mean() * float("1.5") * int(2.7),
    ],
)
def test_ints_and_floats_of_sizes_stay_symbolic(use) -> None:
    model = Numbers(use)
    captured = capture(model, (torch.randn(6, 4, 3),))
    assert captured.hints == {"b": 6} and not captured.notes
    for samples in (6, 9):
        rows, notes = graph_rows(model, captured, (torch.randn(samples, 4, 3),), {}, training=True)
        assert not notes and len(rows) == 4 and all(row.ok for row in rows)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            "n: int = int(x.shape[0])\ndef f(a: tuple[int, float]) -> int: return isinstance(a, (int, float)) or "
            "list(map(int, a))",
            set(),
        ),
        ("torch.zeros(3, dtype=float)\nint(n)", {"float"}),
        ("x.to(int)", {"int"}),
        ("type(x) is int or float(n)", {"int"}),
        ("float('inf'), int.from_bytes(b'')", {"int"}),
        ("dict(kind=int)", {"int"}),
    ],
)
def test_files_that_hand_int_or_float_on_keep_them(
    text: str, kept: set[str], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes `dtype=float` of Python's own float alone."""
    name = f"handing_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(
        "if False:\n" + "".join(f"    {line}\n" for line in text.splitlines()) + "class Model: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    model = nn.Identity()
    with symbolic_lengths(model, module.Model):
        assert {word for word in ("int", "float") if word not in vars(module)} == kept
    assert not {"int", "float"} & vars(module).keys()
