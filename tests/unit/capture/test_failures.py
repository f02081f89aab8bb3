"""What the user reads where a model cannot be exported, or fixes a size: which line, which size, and what to do."""

from __future__ import annotations

import dataclasses
import inspect
import logging

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture, dims
from autopar.capture.failures import says
from autopar.errors import CaptureError, InfeasibleError
from passes import facts


class Net(nn.Module):
    """A squared error; subclasses do something to x first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(4, 4), nn.Parameter(torch.zeros(8, 4))

    def forward(self, x, y):
        return ((self.linear(self.change(x)) - y) ** 2).mean()


class OnValues(Net):
    def change(self, x):
        return x * 2 if x.sum() > 0 else x  # the line


class Picked(Net):
    def change(self, x):
        rows = torch.nonzero(x[:, 0] > 0).squeeze(1)  # the line
        return x.index_add(0, rows, x[rows])


class Sized(Net):
    def change(self, x):
        return x[: int(x.sum().item())]  # the line


class Directional(Net):
    def change(self, x):
        return torch.func.jvp(lambda one: one * self.shift[0], (x,), (x,))[1]


class Even(Net):
    def change(self, x):
        return x.view(x.shape[0] // 2, 2, 4).reshape(-1, 4)


class AtLeast(Net):
    def change(self, x):
        return x * 2 if x.shape[0] > 5 else x


class Eight(Net):
    def change(self, x):
        return x + self.shift  # the line


class EightAsserted(Net):
    def change(self, x):
        assert x.shape[0] == 8, "the size of tensor a must match the size of tensor b (8)"  # the line
        return x


class EightTraced(Eight):
    def change(self, x):
        if not torch.compiler.is_compiling():
            raise RuntimeError("there is no kernel for this")
        return super().change(x)


class SixOr(Net):
    def change(self, x):
        return x.view(6, 4) if x.shape[0] == 6 else x.view(8, 4)


def batch():
    return torch.randn(8, 4), torch.randn(8, 4)


@pytest.mark.parametrize("kind", [OnValues, Sized])
@pytest.mark.parametrize("outside", [False, True])
def test_control_flow_on_values_is_named_with_its_line(kind, outside):
    with pytest.raises(CaptureError) as caught:
        if outside:
            capture(nn.Sequential(kind().linear, Outer(kind)), batch(), loss_fn=lambda out, y: ((out - y) ** 2).mean())
        else:
            capture(kind(), batch())
    said = str(caught.value)
    assert (
        f"{'Sequential' if outside else kind.__name__} cannot be exported" in said
        and "depends on the values of a tensor" in said
    )
    assert "at test_failures.py:" in said and "# the line" in said and "torch.where" in said


def test_sizes_that_values_make_are_named_with_their_line():
    line = Net.forward.__code__.co_firstlineno + 1
    with pytest.raises(
        CaptureError,
        match=rf"Picked cannot be captured: the top module \(test_failures.py:{line}\): nonzero has a size that "
        r"depends on the values .*torch.where",
    ):
        capture(Picked(), batch())


class Outer(nn.Module):
    """The change alone, for a loss function outside of the model."""

    def __init__(self, kind):
        super().__init__()
        self.inner = kind()

    def forward(self, x):
        return self.inner.change(x)


@pytest.mark.parametrize(
    ("kind", "span", "notes"),
    [
        (
            Even,
            (4, 131072, 2),
            ["b may be 4 to 131072, multiples of 2: the model works only where (4*b) == (8*(b // 2))"],
        ),
        (AtLeast, (6, 131072, 1), []),
    ],
)
def test_a_batch_that_the_model_has_conditions_of(kind, span, notes):
    captured = capture(kind(), batch())
    assert captured.hints == {"b": 8} and list(captured.notes) == notes and facts.spans(captured.gm) == {"b": span}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Eight, "must match the size of tensor b (8)"),
        (EightTraced, "must match the size of tensor b (8)"),
        (EightAsserted, "must match the size of tensor b (8)"),
        (SixOr, "b is static: "),
    ],
)
def test_a_size_that_the_model_fixes(kind, why):
    captured = capture(kind(), batch())
    (note,) = captured.notes
    assert (
        why in note
        and "capture of its own, with example inputs of that size" in note
        and "TORCH_LOGS" not in note
        and "L[" not in note
    )
    assert captured.hints == {}
    assert kind is not Eight or ("at test_failures.py:" in note and "# the line" in note)


class ChangesWindows(Net):
    def change(self, x):
        y = x * 1.0
        y.unfold(1, 2, 2).mul_(2.0)
        return y


class PicksRows(Net):
    def change(self, x):
        return x + x[x[:, 0] > 0].t().reshape(-1).sum()


class Clamps(Net):
    def change(self, x):
        self.linear.weight.data.clamp_(-1, 1)
        return x


class MasksUnlessCompiled(Net):
    def change(self, x, mask=None):
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(len(x))
        return x * mask[:, None]  # the line


class Repeats(Net):
    def change(self, x):
        return x + torch.repeat_interleave(x, (x[:, 0] > 0) + 1, 0).sum(0)


class Missing(Net):
    def change(self, x):
        return x * self.scale  # the line


class WrongSize(Net):
    def change(self, x):
        return x * torch.ones(x.shape[1] + 1)  # the line


class WrongBehind(Net):
    """It has a number of samples first, for which it is tried with others than its own."""

    def change(self, x):
        x = x + torch.ones(8, 1)
        return x * torch.ones(x.shape[1] + 1)  # the line


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Clamps, r"changes param linear.weight in place .*use a changed copy.* behind the optimizer's step"),
        (
            MasksUnlessCompiled,
            r"(?s)'NoneType' object is not subscriptable.*at test_failures.py:\d+: .*# the line; the model's own code "
            r"fails there .*pass it as an input",
        ),
        (
            Missing,
            r"(?s)Missing does not run on these inputs: .*has no attribute 'scale'.*at test_failures.py:\d+: .*# the "
            r"line; it was called as it is, not traced",
        ),
        (
            WrongBehind,
            r"(?s)WrongBehind does not run on these inputs: .*broadcast.*at test_failures.py:\d+: .*# the line; it was "
            r"called as it is, not traced",
        ),
        (
            WrongSize,
            r"(?s)WrongSize does not run on these inputs: .*broadcast.*at test_failures.py:\d+: .*# the line; .*input "
            r"0 float32\[8, 4\], input 1 float32\[8, 4\]",
        ),
        (
            ChangesWindows,
            r"ChangesWindows cannot be captured: .*test_failures.py:\d+\) changes a view in place .*work on a copy of "
            r"the view",
        ),
        (Directional, r"Directional cannot be captured: .*transform of torch.func .*operators on batches"),
        (
            Repeats,
            r"Repeats cannot be captured: .*test_failures.py:\d+\): repeat_interleave\w* has a size that depends on "
            r"the values .*output_size=number",
        ),
        (
            PicksRows,
            r"PicksRows cannot be captured: .*test_failures.py:\d+\): the size u0 depends on what tensors "
            r"hold.*compute with a mask",
        ),
    ],
)
def test_what_passes_refuse_names_the_line_and_what_to_do(model: type[nn.Module], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        capture(model(), (torch.randn(8, 4), torch.randn(8, 4)))


def test_objects_among_inputs_are_told_by_name():
    class Reads(nn.Module):
        def forward(self, x, how):
            return x.square().mean()

    with pytest.raises(
        CaptureError,
        match=r"^Reads cannot be exported: of its inputs how is a device, and a graph takes tensors and numbers; make "
        r"it in forward",
    ):
        capture(Reads(), (batch()[0], torch.device("cpu")))


def test_torch_says_nothing_beside(capfd, monkeypatch):
    """torch.export prints the graph so far of each attempt, hundreds of lines of it."""
    logged = []
    monkeypatch.setattr(logging.Logger, "handle", lambda logger, record: logged.append(record))

    class Asks(nn.Module):
        def forward(self, x):
            return (x if x.sum() > 0 else -x).mean()

    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Asks(), (torch.randn(4, 4, requires_grad=True),))
    assert not any(capfd.readouterr()) and not [record for record in logged if record.levelname != "DEBUG"]


class Fits(Net):
    def change(self, x):
        return x * torch.linalg.lstsq(self.linear(x), x).solution.sum()  # the line


class Points(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def change(self, x):
        return x[int(self.pointer) :]  # the line


class Packs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4)

    def change(self, x):
        lengths = (x > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, True, False)  # the line
        return self.lstm(packed)[1][0][0]


class Nests(Net):
    def change(self, x):
        return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 8])).values()  # the line


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            Packs,
            r"at test_failures.py:\d+: .*# the line; packed sequences have .* padded sequences .* reversed within "
            r"their lengths",
        ),
        (Nests, r"at test_failures.py:\d+: .*# the line; nested tensors have .* padded tensors and a mask"),
        (
            Fits,
            r"at test_failures.py:\d+: .*# the line; torch has no rule for what sizes aten.linalg_lstsq.default gives "
            r"without the values of its operands.*custom_op",
        ),
        (
            Points,
            r"at test_failures.py:\d+: .*# the line; a number that is read off a tensor .* keep it as a tensor "
            r".*index_copy_",
        ),
    ],
)
def test_what_depends_on_values_says_what_to_do(model: type[nn.Module], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        capture(model(), batch())


class Pooled(nn.Module):
    """Bags of ids, with where each begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.linear = nn.EmbeddingBag(50, 8), nn.Linear(8, 4)

    def forward(self, ids, starts, y):
        return nn.functional.cross_entropy(self.linear(self.bags(ids, starts)), y)


def test_inputs_without_a_common_batch_say_so() -> None:
    inputs = (torch.zeros(20, dtype=torch.long), torch.arange(0, 16, 2), torch.zeros(8, dtype=torch.long))
    captured = capture(Pooled(), inputs)
    assert captured.hints == {} and len(captured.notes) == 1
    assert (
        "first sizes of the inputs differ (20, 8, 8)" in captured.notes[0]
        and "name the batch in dynamic_shapes" in captured.notes[0]
        and "on the command line" in captured.notes[0]
    )
    assert not capture(Pooled(), inputs, dynamic_shapes=((None, {0: "b"}, {0: "b"}), {})).notes
    with pytest.raises(
        InfeasibleError,
        match=r"no size of the inputs is the batch: .* name it in dynamic_shapes.*\(on the command line: let the "
        r"factory",
    ):
        autopar.compile(Pooled(), "cpu:1x2", inputs, recipe="1f1b")


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


torch.export.register_dataclass(Pair, serialized_type_name="Pair")


class OfPair(Net):
    def forward(self, pair):
        return ((self.linear(pair.x) - pair.y) ** 2).mean()


def test_dims_of_a_registered_dataclass_stay_symbolic():
    captured = capture(OfPair(), (Pair(torch.randn(8, 4), torch.randn(8, 4)),))
    assert list(captured.gm.meta["symbols"]) == ["b"] and not captured.notes


def test_what_torch_says_of_no_sizes_is_said_in_words():
    said = says(
        RuntimeError("Cannot create Dim with inconsistent min=0, max=-oo"),
        dims.explicit([], ((), {}), (), {}, inspect.signature(lambda: None)),
    )
    assert said.startswith("the model works only for some sizes") and "oo" not in said


def test_a_loss_that_does_not_run_is_said_to_be_one():
    with pytest.raises(CaptureError, match=r"(?s)Linear does not run on these inputs: Bool.*in Linear or in loss_fn;"):
        capture(nn.Linear(4, 4), (torch.zeros(8, 4),) * 3, loss_fn=nn.functional.mse_loss)
