"""What operators keep for the backward, against autograd; and those that are left out where a block is run again: their
backward must not need what running them would have made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from autopar._torch import pytree
from autopar.runtime import replay
from passes import ops
from passes.kernel_extras import BESIDE, BY_GRADIENTS
from passes.saved import saved_positions
from tests.helpers.kept_by_table import kept_by_table, tensors
from tests.unit.passes.test_saved import SAMPLES
from tests.unit.rules.samples import T, case, f, fill, i, reseed
from tests.unit.rules.table import SAMPLES as PROVEN


def proven(one: Any) -> tuple[list[Any], dict[str, Any]]:
    return fill((list(one.args), dict(one.kwargs)))


def sampled(make: Callable[[], Any]) -> tuple[list[Any], dict[str, Any]]:
    return list(make()[1]), {}


aten = torch.ops.aten
CALLS = {
    **{target: [partial(proven, one) for one in calls] for target, calls in PROVEN.items()},
    **{target: [partial(sampled, make)] for target, make in SAMPLES.items()},
}
"""Of each operator, functions that give arguments."""


def keeps_own(target: Any, operands: list[Tensor]) -> bool:
    """Whether an operator is run again for its backward, by the tables."""
    return (
        target in BESIDE
        or target in BY_GRADIENTS
        or any(place >= len(operands) for place in saved_positions(target, [x.requires_grad for x in operands]))
    )


def rubbish(
    size: Any, stride: Any, *, dtype: torch.dtype, device: torch.device, fresh: Any = torch.empty_strided
) -> Tensor:
    """What uninitialised memory may hold."""
    made: Tensor = fresh(size, stride, dtype=dtype, device=device)
    return made.fill_(
        torch.nan
        if dtype.is_floating_point or dtype.is_complex
        else 1
        if dtype == torch.bool
        else torch.iinfo(dtype).max
    )


@pytest.mark.parametrize("target", CALLS, ids=lambda target: str(target).split(" at 0x")[0])
def test_an_operator_that_is_left_out_has_its_gradients(target: Any) -> None:
    for arguments in CALLS[target]:
        reseed()
        args, kwargs = arguments()
        operands, tape = tensors((args, kwargs)), replay.Tape()
        wanted = [x for x in operands if x.requires_grad]
        if keeps_own(target, operands) or not wanted:
            continue
        found = []
        for again in (False, True):
            with (
                replay.recording(tape, again=again),
                mock.patch.object(torch, "empty_strided", rubbish) if again else nullcontext(),
            ):
                made = [
                    x
                    for x in tensors(replay.skip(lambda args=args, kwargs=kwargs: target(*args, **kwargs)))
                    if x.requires_grad
                ]
            if made:
                found.append(torch.autograd.grad(made, wanted, [torch.ones_like(x) for x in made], allow_unused=True))
        for first, second in zip(*found, strict=True) if found else ():
            assert (first is None and second is None) or torch.equal(first, second)


OTHERWISE: dict[Any, str] = {
    **dict.fromkeys(
        (aten.dropout.default, aten.embedding_bag.padding_idx, ops.bag, ops.ragged_bags),
        "kernels of accelerators and of emitted programs keep other masks and counts than those of the CPU",
    ),
    **dict.fromkeys(
        (aten.gru.input, aten.lstm.input, aten.rnn_relu.input, aten.rnn_tanh.input),
        "fused on accelerators; test_recurrent.py has the CPU's",
    ),
    **dict.fromkeys(
        (ops.cross_entropy_each, ops.cross_entropy_sum),
        "logits stand for the logarithms of probabilities, which are as large",
    ),
    ops.experts: "counted in autopar.rules.experts",
}
"""Operators of which the tables say something else than what the CPU keeps, and why."""


FURTHER = {
    aten.binary_cross_entropy_with_logits.default: [case(f(5, 4), f(5, 4), T((5, 4), "c"), T((4,), "c"), 2)],
    **{
        target: [
            case(f(2, 4, *(8,) * dims), f(6, 4, *(kernel,) * dims), f(6), [1] * dims, padding, [dilation])
            for kernel in (2, 4, 5)
            for dilation in (1, 2)
            for padding in ("same", "valid")
            if dilation * (kernel - 1) < 8
        ]
        for dims, target in enumerate((aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding), 1)
    },
    aten.cosine_embedding_loss.default: [
        case(f(64, 8), f(64, 8), T((64,), "t"), 0.1, 2),
        case(f(64, 8), f(1, 8), T((64,), "t"), 0.1, 1),
    ],
    aten.cross_entropy_loss.default: [
        case(f(5, 7), labels, T((7,), "t"), reduction, -100, smoothed)
        for labels, smoothed in ((i(7, 5), 0.0), (i(7, 5), 0.1), (T((5, 7), "t"), 0.0))
        for reduction in (0, 1)
    ],
    **{
        target: [case(f(5, 4), size) for size in (2, 16)]
        for target in (aten.fft_fft.default, aten.fft_ifft.default, aten.fft_ihfft.default, aten.fft_rfft.default)
    },
    **{
        target: [case(f(5, 4), [16, 2], [0, 1]), case(f(5, 4), [2, 16]), case(f(5, 4, 4), [8, 8], [0, 2])]
        for target in (aten.fft_rfft2.default, aten.fft_rfftn.default)
    },
    aten.ldexp.Tensor: [case(f(16, 8), f(8)), case(f(8), i(4, 16, 8))],
    aten.poisson_nll_loss.default: [
        case(f(5, 4), T((5, 4), "p"), log, full, 1e-8, 2) for log in (True, False) for full in (True, False)
    ],
    aten.kl_div.default: [case(f(5, 4), f(5, 4), 2, log_target=True)],
    aten.linalg_matrix_power.default: [case(T((5, 4, 4), "d"), power) for power in (-3, 0, 1, 6)],
}
"""Calls that are no samples of rules."""


def in_float32(value: Any) -> Any:
    """As models compute: statistics are of float32, too."""
    narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    return (
        value.detach().to(narrow[value.dtype]).requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.dtype in narrow
        else value
    )


@pytest.mark.parametrize(
    "target", [target for target in CALLS if target not in OTHERWISE], ids=lambda target: str(target).split(" at 0x")[0]
)
def test_all_that_autograd_keeps_is_counted(target: Any) -> None:
    """Up to a few numbers, with a gradient of the first operand alone and of all."""
    for arguments in [*CALLS[target], *(partial(proven, one) for one in FURTHER.get(target, ()))]:
        for alone in (True, False):
            reseed()
            args, kwargs = pytree.tree_map(in_float32, arguments())
            others = [x for x in tensors((args, kwargs)) if x.requires_grad][1:]
            if alone and not others:
                continue  # the first is all
            for operand in others if alone else ():
                operand.requires_grad_(False)
            check_what_is_kept(target, args, kwargs)


def check_what_is_kept(target: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x) is None or x, lambda x: x
    ):
        made = target(*args, **kwargs)
    if any(x.requires_grad for x in tensors(made)):
        operands = tensors((args, kwargs))
        counted = kept_by_table(target, args, kwargs, made)
        known = {[*operands, *tensors(made)][place].untyped_storage().data_ptr() for place in counted.positions}
        held = sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in known)
        beside = counted.extra_bytes + sum(operands[place].nbytes for place in counted.copies)
        assert float(beside) == pytest.approx(held, abs=200 if target is aten.triplet_margin_loss.default else 16), (
            args,
            kwargs,
        )


def test_what_is_counted_otherwise_has_calls() -> None:
    assert set(OTHERWISE) <= set(CALLS)
