"""Temporary memory of CPU kernels, beyond operands and results. `CPU` replaces the rows of memory.temporaries there;
read by memory.operators."""

from __future__ import annotations

from functools import partial
from typing import Any

from autopar.memory import matrices, recurrent
from autopar.memory.local import Bytes, Local, nothing, taken
from autopar.memory.temporaries import aten
from autopar.rules.arguments import named

WIDE = 4  # bytes of a float32
POINT = (1, 1)  # a kernel of one pixel is a product


def _blocks(formula: str, local: Local) -> float:
    """Copies of images that oneDNN's convolutions reorder to blocks of channels and back; none for kernels of one
    pixel, which are matmuls."""
    return 0.0 if tuple(local.op.call.ins[1].sizes[2:]) == POINT else taken(formula)(local)


def _scores(local: Local) -> float:
    """One tensor of attention scores in float32 or wider, where attention is not fused; else 0."""
    _, key, value = local.op.call.ins[:3]
    return _wide(local) * key.sizes[-2] / value.sizes[-1] if local.op.copies else 0.0


def _scored(local: Local) -> float:
    """Forward of attention that is not fused: the scores before the softmax, where there is no dropout. For narrower
    dtypes first queries, keys and values in float32, before they are scaled and reordered; later softmax and result
    before they are cast back."""
    scores, dropped = _scores(local), bool(local.given("dropout_p"))
    if local.op.call.outs[0].itemsize >= WIDE:
        return scores * (not dropped)
    wide = sum(local.ins[:3]) * WIDE / local.op.call.outs[0].itemsize if local.op.copies else 0.0
    return wide + max(scores * (not dropped), 0.5 * scores + _wide(local) * (wide > 0))


def _scored_back(local: Local) -> float:
    """Backward of attention that is not fused: the gradient of the softmax, and without dropout that of the scores,
    which is counted less what is freed by then; the gradient of the values exists already."""
    times, made = WIDE / min(WIDE, local.op.call.outs[0].itemsize), sum(local.ins[i] for i in range(3) if local.grad(i))
    if not local.op.copies:
        return 0.0
    if local.given("dropout_p"):
        return max(0.0, _scores(local) + local.ins[2] * times + _wide(local) * (times > 1) - made)
    return max(0.0, 2 * _scores(local) - made)


def _wide(local: Local) -> float:
    """The result in the dtype in which a norm's plain operators compute: float32 or wider."""
    return local.out * max(1.0, WIDE / local.op.call.outs[0].itemsize)


def _norm(local: Local) -> float:
    """The result in that dtype before it is cast, where that is wider."""
    return _wide(local) if _wide(local) > local.out else 0.0


def _norm_forward(local: Local) -> float:
    """The normalised rows before they are multiplied by a weight without a gradient, which does not keep them."""
    return _norm(local) + _wide(local) * (len(local.ins) > 1 and not local.grad(1))


def _norm_back(local: Local) -> float:
    """Backward of rms_norm. For the rows: the gradient of the normalised rows, that of the rows from their product,
    that of the mean, and two tensors of the square; less what has been freed by then. For the weight alone: its
    gradient at full size, and the cast gradient of the result."""
    graded, *weight = (each.grad for each in local.op.call.ins)
    if not graded:
        return _wide(local) + _norm(local)
    return (5 - any(weight)) * _wide(local) - local.ins[0] - local.out


CPU: dict[Any, tuple[Bytes, Bytes]] = {
    **dict.fromkeys(
        named("conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding"),
        (partial(_blocks, "o"), partial(_blocks, "a+o")),
    ),
    **dict.fromkeys(
        named("conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"),
        (lambda local: local.out * (len(local.ins) - 1), taken("a+o")),
    ),
    # channels last
    **dict.fromkeys(
        named(
            "upsample_nearest2d.default upsample_nearest2d.vec upsample_bilinear2d.default upsample_bilinear2d.vec "
            "_upsample_nearest_exact2d.vec"
        ),
        (taken("a+o"), nothing),
    ),
    **dict.fromkeys(named("_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec"), (taken("0.6o"), nothing)),
    **matrices.CPU,
    **recurrent.CPU,
    aten.rms_norm.default: (_norm_forward, _norm_back),
    aten.scaled_dot_product_attention.default: (_scored, _scored_back),
}
"""Operator -> (forward, backward), where the kernel on a CPU consists of several operators, or copies its operands."""
