"""Every writer of expressions against the operator: the text, evaluated, gives what the operator gives, and its
gradients."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from autopar.codegen.expressions import EXPRESSIONS, Written, literal, qualified, write
from passes import ops

aten = torch.ops.aten


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))) + 0.5


X, Y = rand(2, 4, 6), rand(2, 4, 6)
IDS = torch.tensor([[0, 3], [2, 3]])
CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.cat.default: [(([X, Y],), {}), (([X, Y], 1), {}), (([X, Y], -1), {})],
    aten.detach.default: [((X,), {})],
    aten.neg.default: [((X,), {})],
    aten.embedding.default: [
        ((rand(4, 3), IDS), {}),
        ((rand(4, 3), IDS, 0), {}),
        ((rand(4, 3), IDS, -1), {}),
        ((rand(4, 3), IDS, 2, True), {}),
        ((rand(4, 3), IDS, -1, True), {}),
        ((rand(4, 3), IDS), {"padding_idx": 3, "scale_grad_by_freq": True}),
    ],
    aten.expand.default: [((rand(1, 4, 1), [2, 4, 6]), {})],
    aten.reshape.default: [((X, [2, 24]), {}), ((X, [8, -1]), {}), ((rand(1), []), {})],
    aten.gelu.default: [((X,), {}), ((X,), {"approximate": "tanh"})],
    aten.layer_norm.default: [
        ((X, [6]), {}),
        ((X, [6], rand(6), rand(6), 1e-3), {}),
        ((X, [4, 6], None, None, 1e-3), {}),
    ],
    aten.linear.default: [((X, rand(3, 6)), {}), ((X, rand(3, 6), rand(3)), {})],
    ops.affine: [((X, rand(6, 3), rand(3)), {})],
    aten.log_softmax.int: [((X, -1), {}), ((X, 1, torch.float32), {})],
    aten.softmax.int: [((X, -1), {}), ((X, 1, torch.float32), {})],
    aten.matmul.default: [((X, rand(6, 3)), {})],
    aten.permute.default: [((X, [2, 0, 1]), {})],
    aten.relu.default: [((X - 1,), {})],
    aten.rsqrt.default: [((X,), {})],
    aten.silu.default: [((X,), {})],
    aten.tanh.default: [((X,), {})],
    aten.scaled_dot_product_attention.default: [
        ((rand(1, 2, 4, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8)), {}),
        ((rand(1, 2, 4, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8), None, 0.0, True), {}),
        ((rand(1, 2, 4, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8), rand(4, 4)), {"scale": 0.3}),
        ((rand(1, 4, 4, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8)), {"is_causal": True, "enable_gqa": True}),
    ],
    aten.rms_norm.default: [((X, [6], None, 1e-6), {}), ((X, [6], rand(6), 1e-6), {})],
    aten.select.int: [((X, 1, 2), {}), ((X, -1, -1), {})],
    aten.slice.Tensor: [
        ((X,), {}),
        ((X, 1, 1, 3), {}),
        ((X, 0, 1, 2**63 - 1), {}),
        ((X, -1, 0, 6, 2), {}),
        ((X, 2, -2), {}),
        ((X, 1, None, 2), {}),
    ],
    aten.split_with_sizes.default: [((X, [1, 3], 1), {}), ((X, [1, 1]), {})],
    aten.sum.dim_IntList: [((X, [1]), {}), ((X, [0, 2], True), {}), ((X, [-1]), {"dtype": torch.float32})],
    aten.to.dtype: [((X, torch.float32), {})],
    aten.transpose.int: [((X, 0, 2), {})],
    aten.unsqueeze.default: [((X, 1), {})],
}
UNDERIVED = (aten.floor_divide.default, aten.floor_divide.Scalar)
"""Operators whose gradient torch does not have."""
SCALARS = {"bitwise_and": 3, "bitwise_or": 3}


def infix_calls(target: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Operands of an infix operator: tensors, or a tensor and a number; with `alpha` where there is one."""
    name, overload = str(target).split(".")[1:]
    left, right = (torch.tensor([5, 6, 7]), torch.tensor([2, 3, 4])) if "bitwise" in name else (X, Y)
    second = right if "Tensor_Tensor" in overload or overload in ("Tensor", "default") else SCALARS.get(name, 2)
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((left, second), {})]
    if any(a.name == "alpha" for a in target._schema.arguments):
        found.append(((left, second), {"alpha": 3}))
    return found


def texts(item: Any, names: dict[str, Any]) -> str:
    """The text of an argument; tensors get names."""
    if isinstance(item, Tensor):
        name = f"t{len(names)}"
        names[name] = item.requires_grad_() if item.is_floating_point() else item
        return name
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(texts(i, names) for i in item)}]"
    return repr(item)


@pytest.mark.parametrize("target", list(EXPRESSIONS), ids=qualified)
def test_the_text_computes_what_the_operator_does(target: Any) -> None:
    calls = CALLS.get(target) or infix_calls(target)
    for args, kwargs in calls:
        names: dict[str, Any] = {}
        texts([args, list(kwargs.values())], names)  # they learn
        wanted, names = target(*args, **kwargs), {}
        outs = tuple(tuple(map(str, w.shape)) for w in (wanted if isinstance(wanted, (tuple, list)) else [wanted]))
        written = Written(
            tuple(texts(a, names) for a in args), {k: texts(v, names) for k, v in kwargs.items()}, args, outs
        )
        text = write(target, written)
        got = eval(text, {"torch": torch, "F": F, **names})
        both = [list(one) if isinstance(one, (tuple, list)) else [one] for one in (got, wanted)]
        for mine, theirs in (
            both,
            *([] if target in UNDERIVED else [[gradients(one, list(names.values())) for one in both]]),
        ):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=lambda m, t=text: f"{t}: {m}")


def gradients(results: list[Tensor], operands: list[Tensor]) -> list[Tensor | None]:
    """Of `results`, pulled by numbers that are no two the same, in `operands`."""
    graded = [result for result in results if result.requires_grad]
    asked = [operand for operand in operands if operand.requires_grad]
    pulls = [torch.linspace(1, 2, result.numel()).view(result.shape).to(result.dtype) for result in graded]
    return list(torch.autograd.grad(graded, asked, pulls, allow_unused=True)) if graded else []


def test_names_of_targets() -> None:
    assert qualified(aten.cumsum.default) == "torch.ops.aten.cumsum.default"
    assert qualified(ops.count_valid) == "count_valid"
    assert (
        write(aten.cumsum.default, Written(("x", "1"), {"dtype": "torch.int64"}, (), ()))
        == "torch.ops.aten.cumsum.default(x, 1, dtype=torch.int64)"
    )


def test_an_infix_operator_with_more_arguments_is_written_as_a_call() -> None:
    text = write(aten.add.Tensor, Written(("x", "y"), {"alpha": "2"}, (), ()))
    assert text == "torch.ops.aten.add.Tensor(x, y, alpha=2)"
    assert write(aten.add.Tensor, Written(("x", "y"), {}, (), ())) == "x + y"


@given(
    st.one_of(
        st.floats(),
        st.complex_numbers(),
        st.integers(),
        st.booleans(),
        st.none(),
        st.text(),
        st.sampled_from([torch.float32, torch.strided]),
    )
)
@example(complex(0.0, -0.0))
@example(complex(-0.0, 0.0))
def test_the_text_of_a_literal_is_read_as_what_it_was(item: Any) -> None:
    read = eval(literal(item), {"torch": torch})
    assert (type(read), repr(read)) == (type(item), repr(item))


class _Side(IntEnum):
    LEFT = 3


class _Mode(StrEnum):
    MEAN = "mean"


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        (np.float64(0.5), 0.5),
        (np.float64("inf"), float("inf")),
        (np.complex128(1 + 2j), 1 + 2j),
        (_Side.LEFT, 3),
        (_Mode.MEAN, "mean"),
    ],
)
def test_what_is_a_number_or_a_text_of_another_type_is_written_as_that(item: Any, wanted: Any) -> None:
    read = eval(literal(item), {})
    assert (type(read), read) == (type(wanted), wanted)
