"""What model code does on the way: caches that forward keeps, regions without autocast, results of classes of its own,
conditions on the batch."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.verify import graph_rows
from passes import facts
from tests.helpers.captures import output_names

WIDTH = 8
X = torch.randn(4, WIDTH)


def same(model: nn.Module, x: Tensor, captured_of: Tensor | None = None):
    """What is captured of `model`, which computes what the model does."""
    captured = capture(model, (x if captured_of is None else captured_of,))
    rows, notes = graph_rows(model, captured, (x,), {}, training=True)
    assert rows and not notes and all(row.ok for row in rows), rows
    return captured


class Map(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Keeping(Map):
    """Makes a bias for as many positions as there are, once, and keeps it; loops over the positions, so that their
    number is fixed at the second attempt."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        if "none" in how:
            self.register_buffer("bias", None, persistent=False)

    def forward(self, x):
        if getattr(self, "bias", None) is None or self.bias.shape[0] < x.shape[1]:
            bias = torch.arange(x.shape[1]).to(x.dtype)[:, None]
            if "registered" in self.how:
                self.register_buffer("bias", bias, persistent=False)
            else:
                self.bias = bias
        x = x + self.bias[: x.shape[1]]
        return torch.stack([self.linear(x[:, number]) for number in range(x.shape[1])]).square().mean()


@pytest.mark.parametrize("how", ["registered", "none before, registered", "none before, assigned", "assigned"])
def test_what_forward_keeps_is_made_anew_for_each_attempt(how):
    captured = capture(Keeping(how), (torch.randn(4, 5, WIDTH),), dynamic_shapes=(({0: "b", 1: "s"},), {}))
    assert list(captured.hints) == ["b"] and not captured.valueless and not captured.constants
    same(Keeping(how), torch.randn(4, 5, WIDTH))


class InFull(Map):
    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            hidden = self.linear(x)
            with torch.no_grad():
                scale = self.linear(x).abs().amax()
            return (hidden / scale).square().mean()


def test_regions_without_autocast_on_the_device_of_a_tensor():
    """The scale in it had gradients."""
    same(InFull(), torch.randn(4, WIDTH))


class Narrow(Map):
    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            return self.linear(x).square().mean()


def test_autocast_is_refused_where_the_plan_computes_in_another_dtype():
    """It was computed in float32."""
    said = r"computes in bfloat16 under torch.autocast, and the plan would compute it in float32; .* precision='bf16'"
    with pytest.raises(CaptureError, match=said):
        capture(Narrow(), (X,))
    capture(Narrow().bfloat16(), (X.bfloat16(),))


class Cache:
    """No pytree."""

    def __init__(self, kept):
        self.kept = kept


class Caching(Map):
    def forward(self, x):
        hidden = self.linear(x)
        return {"loss": hidden.square().mean(), "cache": Cache(hidden), "others": (hidden, Cache(x))}


def test_results_of_other_classes_are_left_out():
    captured = capture(Caching(), (torch.randn(4, WIDTH),))
    assert output_names(captured) == ("loss", "others.0") and captured.structure == {
        "loss": 0,
        "cache": None,
        "others": (1, None),
    }
    assert [note for note in captured.notes if "Cache" in note] == [
        "output cache is a Cache: it is None in the sharded module",
        "output others.1 is a Cache: it is None in the sharded module",
    ]


class Large(Map):
    """Takes another way for large batches, as some upsampling does."""

    def forward(self, x):
        hidden = self.linear(x)
        return (hidden * 2 if x.shape[0] >= 64 else hidden.relu()).square().mean()


@pytest.mark.parametrize(("batch", "least", "most"), [(4, 0, 63), (128, 64, 2**17)])
def test_batches_with_conditions(batch, least, most):
    captured = same(Large(), torch.randn(batch, WIDTH))
    assert dict(captured.hints) == {"b": batch}
    assert [note[: len("b may be 2 to 63:")] for note in captured.notes] == (
        ["b may be 2 to 63:"] if most < 2**17 else []
    )
    assert {name: (span[0], min(span[1], 2**17)) for name, span in facts.spans(captured.gm).items()} == {
        "b": (least, most)
    }
    same(Large(), torch.randn(batch + 3, WIDTH), torch.randn(batch, WIDTH))


class Growing(Map):
    """A cache that begins as an empty vector."""

    def forward(self, x):
        kept = torch.tensor([], dtype=x.dtype)
        for _ in range(2):
            kept = torch.cat([kept, self.linear(x)], dim=-2)
        return kept.square().mean()


def test_empty_vectors_among_tensors_of_any_rank():
    same(Growing(), torch.randn(4, 3, WIDTH))


def test_a_model_in_evaluation_is_planned_as_it_trains():
    dropping, plain = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *more).eval() for more in ([nn.Dropout(0.5)], [nn.ReLU()])
    )
    loss = {"loss_fn": lambda out: out.square().mean()}
    x = torch.randn(4, WIDTH)
    (note,) = capture(dropping, (x,), **loss).notes
    assert note.startswith("the model is in evaluation, and planned as it trains")
    assert not capture(dropping.train(), (x,), **loss).notes and not capture(plain, (x,), **loss).notes


def _as_fsdp(model):
    """What fully_shard makes of a module, without ranks to shard it over."""
    model.__class__ = type(f"FSDP{type(model).__name__}", (FSDPModule, type(model)), {})
    return model


def test_a_model_whose_weights_have_no_size_yet_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
    with pytest.raises(
        CaptureError,
        match=r"0.weight, 0.bias, 1.weight, ... of Sequential have no size yet \(a lazy module\): call the model once "
        r"on a batch",
    ):
        autopar.compile(model, "cpu:1x2", (torch.zeros(4, 8),), mode="inference")
    model(torch.randn(4, 8))
    assert autopar.compile(model, "cpu:1x2", (torch.zeros(4, 8),), mode="inference").plan.ranks == 2


@pytest.mark.parametrize(
    ("wrap", "why"),
    [
        (torch.jit.script, "ScriptModule; give autopar the Python module"),
        (_as_fsdp, "FSDPModule; give autopar the model before fully_shard"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_models_that_are_made_for_ranks_already_are_refused(wrap, why, inside):
    wrapped = wrap(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError) as caught:
        capture(
            nn.Sequential(wrapped) if inside else wrapped,
            (torch.randn(4, WIDTH),),
            loss_fn=lambda out: out.square().mean(),
        )
    assert why in str(caught.value) and ("module 0 is" in str(caught.value)) == inside


@dataclass
class Given:
    """No pytree either, but fields with names."""

    loss: torch.Tensor
    others: tuple[torch.Tensor, ...]
    cache: object = None


@dataclass
class Registered(Given):
    """One that torch knows."""


torch.export.register_dataclass(Registered, serialized_type_name="tests.unit.capture.test_habits.Registered")


class Recording(Map):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        hidden = self.linear(x)
        return {"all": self.kind(hidden.square().mean(), (hidden, self.kind(hidden.sum(), ())))}


@pytest.mark.parametrize("kind", [Given, Registered])
def test_dataclasses_are_read_by_their_fields(kind):
    captured = capture(Recording(kind), (torch.randn(4, WIDTH),))
    assert output_names(captured) == ("loss", "all.others.0", "all.others.1.loss") and not captured.notes
    assert captured.structure == {
        "all": {"loss": 0, "others": (1, {"loss": 2, "others": (), "cache": None}), "cache": None}
    }
    model = Recording(kind)
    same(model, torch.randn(4, WIDTH))


class Numbered(Map):
    def forward(self, x):
        hidden = self.linear(x)
        return {"loss": hidden.square().mean(), 1: hidden, 2: {0: None}}


def test_keys_that_are_numbers_stay_numbers():
    assert capture(Numbered(), (torch.randn(4, WIDTH),)).structure == {"loss": 0, 1: 1, 2: {0: None}}


class Pair(NamedTuple):
    x: Tensor
    more: Tensor


class Fed(Map):
    def forward(self, first, *others, scale=1.0, **kwargs):
        first = first["x"] if isinstance(first, dict) else first[0] if isinstance(first, tuple) else first
        return (
            self.linear(first * scale + sum(other[0] if isinstance(other, list) else other for other in others))
            .square()
            .mean()
        )


@pytest.mark.parametrize(
    ("args", "kwargs", "wanted"),
    [
        (
            ({"x": X, "more": {"y": X}}, [X]),
            {"scale": 2.0},
            {"first": {"x": "first_x", "more": {"y": "first_more_y"}}, "others_0": ("others_0_0",), "scale": "scale"},
        ),
        (
            (Pair(X, X),),
            {"scale": 2.0, "also": (), "further": [{}, None, {}]},
            {
                "first": {"x": "first_x", "more": "first_more"},
                "scale": "scale",
                "also": (),
                "further": ((), "further_1"),
            },
        ),
        ((X, X), {"scale": 2.0}, {}),
        (({"x": X, torch.float32: X},), {}, {}),
    ],
)
def test_arguments_that_hold_several_inputs_are_told(args, kwargs, wanted):
    assert dict(capture(Fed(), args, kwargs).nested) == wanted
    if wanted:
        assert f"NESTED = {wanted!r}" in autopar.compile(Fed(), "cpu:1x1", (args, kwargs), recipe="single").source


class Naming(Map):
    def forward(self, x):
        hidden = self.linear(x)
        return {"loss": hidden.square().mean(), "pairs": [Pair(hidden, Pair(x, None))]}


def test_named_tuples_are_plain_ones_and_that_is_told():
    captured = capture(Naming(), (X,))
    assert captured.structure == {"loss": 0, "pairs": ((1, (2, None)),)}
    assert captured.notes == (
        "the model returns a Pair: it is a plain tuple in the sharded module (x, more, in this order)",
    )


class Word(str, Enum):  # noqa: UP042  whose str() is "Word.HIDDEN", unlike that of a StrEnum
    HIDDEN = "hidden"


class Keyed(Map):
    def __init__(self, *keys):
        super().__init__()
        self.keys = keys

    def forward(self, x):
        return {"loss": self.linear(x).square().mean(), **{key: x * number for number, key in enumerate(self.keys)}}


@pytest.mark.parametrize(
    ("keys", "wanted", "told"),
    [
        ((Word.HIDDEN, HTTPStatus.OK), ("hidden", 200), 0),
        (
            ((0, (Word.HIDDEN, 2.5)), (), 0.5, True, None, b"x", "it's"),
            ((0, ("hidden", 2.5)), (), 0.5, True, None, b"x", "it's"),
            0,
        ),
        ((1, "1", "1_1"), (1, "1", "1_1"), 0),
        ((torch.float32, (math.inf, 1)), ("torch.float32", "(inf, 1)"), 2),
    ],
)
def test_keys_of_outputs_are_those_of_the_model_where_a_file_can_write_them(keys, wanted, told):
    model = Keyed(*keys)
    compiled = autopar.compile(model, "cpu:1x1", (X,), recipe="single")
    assert sum("the model returns a dict with the key" in note for note in compiled.plan.notes) == told
    for value, key, made in zip(model(X).values(), ("loss", *wanted), compiled(X).items(), strict=True):
        assert made[0] == key
        torch.testing.assert_close(made[1], value)
    same(model, X)


def test_keys_of_outputs_that_would_be_one_text_are_refused():
    with pytest.raises(
        CaptureError, match=r"the keys torch.float32 and 'torch.float32', which are both 'torch.float32'"
    ):
        capture(Keyed(torch.float32, "torch.float32"), (X,))


class Opaque(Map):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind([self.linear(x).square().mean()])


def test_what_no_program_can_make_again_is_refused_by_name():
    with pytest.raises(CaptureError, match="returns a deque, which torch flattens"):
        capture(Opaque(deque), (torch.randn(4, WIDTH),))
    with pytest.raises(
        CaptureError,
        match="no scalar loss in train mode, got no outputs; output is a Cache, into which nobody looks",
    ):
        capture(Opaque(Cache), (torch.randn(4, WIDTH),))


class Checkpoints(Map):
    """A part that changes buffers, where it is a norm."""

    def __init__(self, part: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, self.linear(x), use_reentrant=self.reentrant).square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
def test_buffers_that_change_in_a_checkpoint_are_told(reentrant: bool) -> None:
    """torch changes them twice in a step."""
    x = torch.randn(6, WIDTH)
    norm, tanh = (capture(Checkpoints(part, reentrant), (x,)).notes for part in (nn.BatchNorm1d(WIDTH), nn.Tanh()))
    assert any(re.search(r"buffers change in a checkpoint \(test_habits.py:\d+\)", note) for note in norm) and not tanh
