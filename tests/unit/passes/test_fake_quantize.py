"""Numbers as they are after quantisation, written with common operators: what torch's kernels give, bit by bit, ties
and ends of the range among them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from passes.fake_quantize import FAKE_QUANTIZED
from tests.helpers.small_graphs import normalized
from tests.unit.passes.test_small import B, targets

SCALES = torch.tensor([0.05, 0.5, 0.1, 1.5, 0.007, 2.0])


def _moved(m, x, dtype):
    """The values of `x`, with a gradient for the model's weight."""
    return x.to(dtype) + (m.w[0, 0] - m.w[0, 0].detach()).to(dtype)


def one(zero, dtype, m, x, y):
    return torch.fake_quantize_per_tensor_affine(_moved(m, x, dtype), 0.05, zero, -8, 7)


def one_tensor(zero, dtype, m, x, y):
    return torch.fake_quantize_per_tensor_affine(
        _moved(m, x, dtype), SCALES[:1], torch.tensor([zero], dtype=torch.int32), -8, 7
    )


def channels(zero, dtype, m, x, y):
    return torch.fake_quantize_per_channel_affine(
        _moved(m, x, dtype), SCALES, torch.arange(6, dtype=torch.int32) - 3 + zero, 2, -8, 7
    )


def rows(zero, dtype, m, x, y):
    return (
        torch.fake_quantize_per_channel_affine(
            m.w.to(dtype), SCALES, torch.full((6,), zero, dtype=torch.int32), 0, -8, 7
        )
        @ x.to(dtype).mT
    )


def numbers() -> torch.Tensor:
    """Halves of steps and what is beside them, and numbers out of range."""
    halves = SCALES * torch.arange(-12, 12).reshape(4, 6, 1) / 2
    return torch.cat(
        [halves, halves * (1 + 1e-6), torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(0)) * 3]
    )


@pytest.mark.parametrize(
    ("zero", "dtype"),
    [
        (1, torch.float32),
        *(
            pytest.param(zero, dtype, marks=pytest.mark.slow)
            for zero in (0, 1, -3)
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
)
@pytest.mark.parametrize("function", [one, one_tensor, channels, rows])
def test_quantized_numbers_and_their_gradients_are_those_of_the_kernels(function, zero, dtype):
    gm = normalized(partial(function, zero, dtype), numbers(), dims={"x": {0: B}})
    assert not {str(op) for op in FAKE_QUANTIZED} & set(targets(gm))
