"""What masks pick that follow from sizes alone, or are in buffers, has sizes that are known; what equal masks pick has
equal sizes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture.equal_masks import EqualMasks
from autopar.errors import CaptureError
from autopar.verify import graph_rows
from passes.interpret import Interpret
from tests.helpers.masks_of_sizes import MODELS, SYMBOLIC, Blocks, Coupling, Pairs, batch, every


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_the_model(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    captured = capture(model, batch())
    rows, notes = graph_rows(model, captured, batch(), {}, training=True)
    assert not notes and all(row.ok for row in rows), rows
    assert not captured.evaluation.why and not captured.evaluation.differs
    assert captured.hints == ({"b": 4} if name in SYMBOLIC else {}) and any(
        "b is static" in note for note in captured.notes
    ) != bool(captured.hints)


def test_the_batch_stays_symbolic_where_all_rows_can_be_computed() -> None:
    captured = capture(
        Pairs(lambda rows: (rows @ rows.T)[torch.ones(rows.shape[0], rows.shape[0]).triu(1).bool()].mean()), batch()
    )
    assert captured.hints == {"b": 4} and not captured.notes


def _written_to(similarity: torch.Tensor) -> torch.Tensor:
    """A mask of sizes alone until something else is written to it."""
    mask = torch.eye(len(similarity), dtype=torch.bool)
    torch.gt(similarity, 0, out=mask)
    return mask


def _clamped() -> torch.Tensor:
    """A mask that is changed through a view of it, by a function that takes `inplace`."""
    mask = torch.ones(8, 8).triu(1) - 0.5
    torch.nn.functional.relu(mask.view(-1), inplace=True)
    return mask.bool()


def test_another_mask_in_a_buffer_picks_as_many() -> None:
    """Or the step raises an error: a program has fixed sizes."""
    model = Blocks(Coupling, [every(2)])
    captured = capture(model, batch())
    weights = {**model.state_dict(), "blocks.0.mask": ~every(2)}
    model.load_state_dict(weights)
    inputs = dict(zip(captured.input_names, batch(), strict=True))
    assert torch.allclose(Interpret(captured.gm, weights).run_named(inputs)[0], model(*batch()))
    with pytest.raises(ValueError, match=r"a mask in a buffer picks \[2\] of 8, and the program was made for 4"):
        Interpret(captured.gm, {**weights, "blocks.0.mask": every(4)}).run_named(inputs)


@pytest.mark.parametrize(
    "loss",
    [
        lambda rows: rows[rows[:, 0] > 0].view(-1, 2, 2).var(),
        lambda rows: rows[torch.rand(8) > 0.5].view(-1, 2, 2).var(),
        lambda rows: (rows @ rows.T)[torch.nn.functional.dropout(torch.ones(8, 8)) > 0.5].view(2, -1).var(),
        lambda rows: (rows @ rows.T)[torch.ones(8, 8).normal_() > 0.5].view(2, -1).var(),
        lambda rows: rows[torch.empty(8) > 0.5].view(-1, 2).var(),
        lambda rows: (rows @ rows.T)[torch.eye(len(rows)).add_(rows.detach().mean()).bool()].view(2, -1).var(),
        lambda rows: (rows @ rows.T)[_written_to(rows.detach() @ rows.detach().T)].view(2, -1).var(),
        lambda rows: (rows @ rows.T)[_clamped()].view(2, -1).var(),
        lambda rows: (rows @ rows.T).masked_select(torch.arange(8) < 4).view(2, -1).var(),  # of columns, not of rows
    ],
)
def test_masks_of_anything_else_are_refused(loss) -> None:
    with pytest.raises(CaptureError, match=r"depends on (the values of a tensor|what tensors hold)"):
        capture(Pairs(loss), batch())


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.mse_loss(x.cos()[(y > 0) & ~y.isnan()], x[(y > 0) & ~y.isnan()]),
        lambda x, y: F.cross_entropy(x[y > 0], y.long()[y > 0]),
        lambda x, y: x[(y > 0).nonzero(as_tuple=True)].sum() * x[y > 0].mean(),
    ],
)
def test_equal_masks_pick_as_many(loss) -> None:
    model = Pairs(lambda rows: loss(rows, rows.detach()[:, 0]))
    captured = capture(model, batch())
    assert captured.hints == {"b": 4}
    rows, _ = graph_rows(model, captured, batch(), {}, training=True)
    assert all(row.ok for row in rows), rows


def test_masks_that_were_changed_are_not_equal() -> None:
    """Neither those of changed numbers, nor those that are changed themselves."""
    y, rows = torch.tensor([1.0, -2.0, 3.0]), torch.arange(3)
    with EqualMasks():
        mask, same = y > 0, y > 0
        picked = [rows[mask], rows[same]]
        same.view(-1)[0] = False
        picked += [rows[mask], rows[same], rows[y > 0]]
        mask.fill_(True)
        picked += [rows[mask], rows[y > 0]]
        y.neg_()
        picked += [rows[y > 0], rows[y >= 0], torch.masked_select(rows, y > 0)]
    assert [list(each) for each in picked] == [[0, 2], [0, 2], [0, 2], [2], [0, 2], [0, 1, 2], [0, 2], [1], [1], [1]]


def _doubled(rows: torch.Tensor) -> torch.Tensor:
    """A mask of very many expressions, if each were made anew for each that reads it."""
    mask = torch.eye(8)
    for _ in range(60):
        mask = (mask + mask) / 2
    return (rows @ rows.T)[mask.bool()].view(2, -1).var()


def test_masks_of_many_steps_are_counted() -> None:
    """And the sizes are those of the mask alone: eight rows."""
    assert not capture(Pairs(_doubled), batch()).hints
