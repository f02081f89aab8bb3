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
from torch import Tensor, fx

from autopar._torch import pytree
from autopar.runtime import replay
from passes import ops
from passes.kernel_extras import BESIDE, BY_GRADIENTS, beside
from passes.saved import saved_positions
from tests.unit.passes.test_saved import SAMPLES
from tests.unit.rules.samples import T, case, f, fill
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


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


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
        torch.manual_seed(0)
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
    **dict.fromkeys(
        (aten.float_power.Scalar, aten.float_power.Tensor_Scalar, aten.float_power.Tensor_Tensor),
        "computed in float64, of which copies are kept",
    ),
    aten.conv1d.padding: "an even kernel keeps an image that is padded by one more",
    aten.cosine_embedding_loss.default: "a few numbers for each row",
    aten.fft_ihfft.default: "pads what is shorter",
    aten.ldexp.Tensor: "the powers of 2",
    ops.experts: "counted in autopar.rules.experts",
}
"""Operators of which the tables say something else than what the CPU keeps, and why."""


FURTHER = {
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


def counted_bytes(target: Any, args: Any, kwargs: Any, made: Any) -> float:
    """What is kept beside operands and results, by the table."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    graph = fx.Graph()
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[place] = graph.placeholder(f"x{place}")
            leaves[place].meta["val"] = leaf.detach()
    given, named = pytree.tree_unflatten(leaves, spec)
    node = graph.call_function(target, tuple(given), named)
    node.meta["val"] = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, made)
    return float(beside(node, [x.requires_grad for x in tensors((args, kwargs))]))


@pytest.mark.parametrize(
    "target", [target for target in CALLS if target not in OTHERWISE], ids=lambda target: str(target).split(" at 0x")[0]
)
@pytest.mark.parametrize("graded", [1, 9])
def test_all_that_autograd_keeps_is_counted(target: Any, graded: int) -> None:
    """Up to a few numbers, with a gradient of the first operand alone and of all."""
    for arguments in [*CALLS[target], *(partial(proven, one) for one in FURTHER.get(target, ()))]:
        torch.manual_seed(0)
        args, kwargs = pytree.tree_map(in_float32, arguments())
        for operand in [x for x in tensors((args, kwargs)) if x.requires_grad][graded:]:
            operand.requires_grad_(False)
        kept: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.setdefault(x.untyped_storage().data_ptr(), x) is None or x, lambda x: x
        ):
            made = target(*args, **kwargs)
        if any(x.requires_grad for x in tensors(made)):
            operands = tensors((args, kwargs))
            places = saved_positions(target, [x.requires_grad for x in operands])
            known = {[*operands, *tensors(made)][place].untyped_storage().data_ptr() for place in places}
            held = sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in known)
            assert counted_bytes(target, args, kwargs, made) == pytest.approx(
                held, abs=200 if target is aten.triplet_margin_loss.default else 16
            ), (args, kwargs)


def test_what_is_counted_otherwise_has_calls() -> None:
    assert set(OTHERWISE) <= set(CALLS)
