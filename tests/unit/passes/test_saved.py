"""The table of what autograd keeps, against what `saved_tensors_hooks` sees."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from autopar._torch import pytree
from autopar.rules.experts import kept_bytes
from autopar.rules.language import Call, Tensor
from autopar.rules.site import Site
from passes import ops
from passes.saved import MOVES, SAVED, saved_positions
from passes.tables import VIEWS
from tests.helpers.kept_by_table import kept_by_table
from tests.unit.rules.samples import fill
from tests.unit.rules.table import SAMPLES as PROVEN

aten = torch.ops.aten


def r(*sizes, grad=True):
    return (
        torch.rand(*sizes, dtype=torch.float64, requires_grad=grad) + 0.5
        if not grad
        else (torch.rand(*sizes, dtype=torch.float64) + 0.5).requires_grad_()
    )


IDS = torch.tensor([[0, 2], [1, 1], [3, 0]])
MOVED = {
    aten.channel_shuffle.default: (2,),
    aten.constant_pad_nd.default: ([0, 1],),
    aten.flip.default: ([1],),
    aten.pixel_shuffle.default: (2,),
    aten.pixel_unshuffle.default: (2,),
    aten.repeat.default: ([2, 1, 1, 1],),
    aten.roll.default: ([1], [1]),
    aten.select_scatter.default: (r(4, 6, 6), 1, 2),
    aten.slice_scatter.default: (r(4, 2, 6, 6), 1, 2, 4),
}
"""What they take behind a tensor of four dims."""
BETWEEN = (
    "halves(lambda first, second: F.silu(first) * second)",
    "lambda x: F.relu(x)",
    "lambda x: F.gelu(x)",
    "pairs(lambda even, odd: (torch.clamp(odd, -7.0, 7.0) + 1) * ((y0 := torch.clamp(even, None, 7.0)) * "
    "torch.sigmoid(y0 * 1.702)))",
)
"""What may be between the layers of an expert."""
IDS16 = torch.arange(32).reshape(16, 2) % 4
SAMPLES = {
    **{
        target: lambda t=target: (t, (r(40, 50),))
        for target in SAVED
        if target
        in (
            aten.abs.default,
            aten.cos.default,
            aten.erf.default,
            aten.exp.default,
            aten.gelu.default,
            aten.fft_fft.default,
            aten.fft_ifft.default,
            aten.fft_rfft.default,
            aten.fft_rfft2.default,
            aten.fft_rfftn.default,
            aten.hardswish.default,
            aten.hardtanh.default,
            aten.leaky_relu.default,
            aten.log.default,
            aten.neg.default,
            aten.reciprocal.default,
            aten.relu.default,
            aten.rsqrt.default,
            aten.sigmoid.default,
            aten.silu.default,
            aten.sin.default,
            aten.softplus.default,
            aten.elu.default,
            aten.sqrt.default,
            aten.sum.default,
            aten.tanh.default,
        )
    },
    **{target: lambda t=target: (t, (r(4, 8, 6, 6), *MOVED.get(t, ()))) for target in MOVES},
    **{
        target: lambda t=target, gates=gates, states=states: (
            t,
            (
                r(5, 4, 3, grad=False),
                r(1, 5, 2, grad=False) if states == 1 else [r(1, 5, 2, grad=False)] * 2,
                [r(gates * 2, 3), r(gates * 2, 2)],
                False,
                1,
                0.0,
                True,
                False,
                True,
            ),
        )
        for target, gates, states in (
            (aten.gru.input, 3, 1),
            (aten.lstm.input, 4, 2),
            (aten.rnn_relu.input, 1, 1),
            (aten.rnn_tanh.input, 1, 1),
        )
    },
    aten.mv.default: lambda: (aten.mv.default, (r(40, 50), r(50, grad=False))),
    aten.dot.default: lambda: (aten.dot.default, (r(50), r(50))),
    aten.addr.default: lambda: (aten.addr.default, (r(40, 50), r(40), r(50))),
    aten.vdot.default: lambda: (aten.vdot.default, (r(50, grad=False), r(50))),
    aten.stack.default: lambda: (aten.stack.default, ([r(3, 4), r(3, 4)],)),
    ops.as_complex: lambda: (ops.as_complex, (r(3, 2),)),
    aten.view_as_real.default: lambda: (aten.view_as_real.default, (torch.view_as_complex(r(3, 2)),)),
    aten.add.Tensor: lambda: (aten.add.Tensor, (r(4, 50), r(50))),
    aten.amax.default: lambda: (aten.amax.default, (r(40, 50), [-1])),
    aten.avg_pool2d.default: lambda: (aten.avg_pool2d.default, (r(2, 3, 8, 8), [2, 2])),
    aten.binary_cross_entropy_with_logits.default: lambda: (
        aten.binary_cross_entropy_with_logits.default,
        (r(40, 50), r(40, 50, grad=False), None, None, 2),
    ),
    aten.bmm.default: lambda: (aten.bmm.default, (r(2, 3, 40), r(2, 40, 6))),
    aten.cat.default: lambda: (aten.cat.default, ([r(3, 4), r(3, 5)], 1)),
    aten.clamp.default: lambda: (aten.clamp.default, (r(40, 50), 0.6, 0.9)),
    aten.conv1d.default: lambda: (aten.conv1d.default, (r(2, 6, 50), r(4, 6, 3))),
    aten.conv2d.default: lambda: (aten.conv2d.default, (r(2, 6, 9, 9, grad=False), r(4, 6, 3, 3))),
    aten.cumsum.default: lambda: (aten.cumsum.default, (r(40, 50), -1)),
    aten.div.Tensor: lambda: (aten.div.Tensor, (r(40, 50), r(50))),
    aten.dropout.default: lambda: (aten.dropout.default, (r(40, 50), 0.0, True)),
    aten.einsum.default: lambda: (aten.einsum.default, ("ij,jk->ik", [r(3, 40), r(40, 6)])),
    aten.embedding.default: lambda: (aten.embedding.default, (r(5, 40), IDS)),
    aten.gather.default: lambda: (aten.gather.default, (r(3, 4), 1, IDS)),
    aten.index.Tensor: lambda: (aten.index.Tensor, (r(5, 40), [IDS])),
    aten.index_select.default: lambda: (aten.index_select.default, (r(5, 40), 0, IDS[0])),
    aten.layer_norm.default: lambda: (aten.layer_norm.default, (r(4, 50), [50], r(50), r(50))),
    aten.log_softmax.int: lambda: (aten.log_softmax.int, (r(40, 50), -1)),
    aten.masked_fill.Scalar: lambda: (aten.masked_fill.Scalar, (r(40, 50), torch.rand(40, 50) > 0.5, 0.0)),
    aten.matmul.default: lambda: (aten.matmul.default, (r(2, 3, 40), r(40, 6))),
    aten.max_pool2d.default: lambda: (aten.max_pool2d.default, (r(2, 3, 16, 16), [2, 2])),
    aten.masked_fill.Tensor: lambda: (
        aten.masked_fill.Tensor,
        (r(40, 50), torch.rand(40, 50) > 0.5, torch.tensor(0.0, dtype=torch.float64)),
    ),
    aten.scatter.src: lambda: (aten.scatter.src, (r(3, 4), 1, IDS, r(3, 2))),
    aten.scatter.value: lambda: (aten.scatter.value, (r(3, 4), 1, IDS, 1.0)),
    aten.scatter_add.default: lambda: (aten.scatter_add.default, (r(3, 4), 1, IDS, r(3, 2))),
    aten.mse_loss.default: lambda: (aten.mse_loss.default, (r(40, 50), r(40, 50, grad=False), 2)),
    aten.mul.Tensor: lambda: (aten.mul.Tensor, (r(40, 50), r(40, 50, grad=False))),
    aten.pad.default: lambda: (aten.pad.default, (r(4, 5), [0, 1])),
    aten.pow.Tensor_Scalar: lambda: (aten.pow.Tensor_Scalar, (r(40, 50), 3)),
    aten.rms_norm.default: lambda: (aten.rms_norm.default, (r(4, 50), [50])),
    aten.rsub.Scalar: lambda: (aten.rsub.Scalar, (r(4, 5), 1.0)),
    aten.scaled_dot_product_attention.default: lambda: (
        aten.scaled_dot_product_attention.default,
        (r(2, 4, 64, 32), r(2, 4, 64, 32), r(2, 4, 64, 32), None, 0.0, True),
    ),
    aten.softmax.int: lambda: (aten.softmax.int, (r(40, 50), -1)),
    aten.sub.Tensor: lambda: (aten.sub.Tensor, (r(4, 50), r(50))),
    aten.sum.dim_IntList: lambda: (aten.sum.dim_IntList, (r(4, 5), [1])),
    aten.to.dtype: lambda: (aten.to.dtype, (r(4, 5), torch.float32)),
    aten.topk.default: lambda: (aten.topk.default, (r(40, 50), 3)),
    aten.where.ScalarOther: lambda: (aten.where.ScalarOther, (torch.rand(40, 50) > 0.5, r(40, 50), 0.0)),
    aten.where.self: lambda: (aten.where.self, (torch.rand(40, 50) > 0.5, r(40, 50), r(40, 50))),
    ops.ctc_each: lambda: (
        ops.ctc_each,
        (r(9, 3, 5), torch.arange(6).reshape(3, 2) % 4, torch.full((3,), 9), torch.full((3,), 2), 4, False),
    ),
    ops.cross_entropy_each: lambda: (ops.cross_entropy_each, (r(3, 2, 50), IDS, -100, 0.0)),
    ops.bag: lambda: (ops.bag, (r(4, 50), IDS16, r(16, 2))),
    ops.ragged_bags: lambda: (ops.ragged_bags, (r(4, 50), IDS16.reshape(-1), torch.arange(0, 32, 2), r(32))),
    aten.embedding_bag.padding_idx: lambda: (
        aten.embedding_bag.padding_idx,
        (r(4, 50), IDS16.reshape(-1), torch.arange(0, 32, 2), True, 0, False, None, False, None),
    ),
    ops.experts: lambda: (ops.experts, (r(16, 8), IDS16, r(16, 2), r(4, 8, 12), r(4, 6, 10), BETWEEN[0])),
    ops.fill_rows: lambda: (ops.fill_rows, (r(8, 50, 4), torch.arange(50).expand(8, 50) < 3, r(8, 3, 4))),
    ops.grouped_matmul: lambda: (ops.grouped_matmul, (r(8, 16), r(2, 16, 6), torch.tensor([4, 8]))),
    aten.pairwise_distance.default: lambda: (aten.pairwise_distance.default, (r(40, 50), r(40, 50))),
    ops.noised: lambda: (ops.noised, (r(3, 40, 50), torch.rand(3, 40, 50), 0.5)),
    ops.statistic: lambda: (ops.statistic, (r(1, 50, 1, 1), 6, torch.ones(50))),
    ops.cross_entropy_sum: lambda: (ops.cross_entropy_sum, (r(3, 2, 50), IDS, -100, 0.0)),
}


def expected_bytes(target, args):
    """What the formula says that a layer of experts keeps on one device."""
    tensors = [Tensor(tuple(arg.shape), itemsize=8) for arg in args if isinstance(arg, torch.Tensor)]
    return kept_bytes(Site(tensors, (), (), call=Call(target, args, {}, ())))


EXTRA = {
    # states and gates (passes/recurrent.py)
    aten.gru.input: 40 * (7 * 2 * 4 - 2),
    aten.lstm.input: 40 * (7 * 2 * 4 - 4),
    aten.rnn_relu.input: 40 * 2 * 4,
    aten.rnn_tanh.input: 40 * 2 * 4,
    # the mask, here in the dtype of the result, in emitted programs a byte for each element
    aten.dropout.default: 8 * 40 * 50,
    aten.max_pool2d.default: 8 * 2 * 3 * 8 * 8,
    aten.scaled_dot_product_attention.default: 8 * 2 * 4 * 64 + 64,
    aten.layer_norm.default: 2 * 8 * 4,
    aten.rms_norm.default: 8 * 50,
    aten.pairwise_distance.default: 8 * 40 * 50,
    ops.ctc_each: 8 * 3 * 9 * (2 * 2 + 1),  # of each sample and step, its targets and the places around them
    ops.cross_entropy_each: 8,
    ops.cross_entropy_sum: 8,
    # of each pair whose it is, and of each token where its pairs are, how many, and a maximum
    ops.bag: 8 * (16 * 2 + 3 * 16),
    ops.ragged_bags: 8 * (16 * 2 + 3 * 16),
    aten.embedding_bag.padding_idx: 8 * (16 * 2 + 3 * 16),
    ops.experts: expected_bytes(*SAMPLES[ops.experts]()),
}
"""Bytes that a row may leave out: masks, statistics, pooling indices, counts."""


WITHOUT_ROW = (
    aten.alpha_dropout.default, aten.complex.default, aten.conj.default,
    aten.feature_alpha_dropout.default, aten.feature_dropout.default, aten.fft_ihfft.default, aten.group_norm.default,
    aten.instance_norm.default, aten.linalg_cond.default, aten.linalg_cond.p_str,
    aten.linalg_matrix_norm.default, aten.linalg_matrix_norm.str_ord, aten.linalg_norm.default,
    aten.linalg_norm.ord_str, aten.lu_unpack.default, aten.native_layer_norm.default,
    aten.resolve_conj.default,
)  # fmt: skip
"""Operators that are taken to keep all operands, which autograd does not, or not as they are."""


def test_every_row_has_a_sample():
    assert not set(WITHOUT_ROW) & set(SAVED) and set(WITHOUT_ROW) <= set(PROVEN)
    assert set(SAVED) - set(VIEWS) == set(SAMPLES) | (set(PROVEN) & set(SAVED) - set(VIEWS))
    assert set(SAMPLES) <= set(SAVED)


@pytest.mark.parametrize(
    "target",
    [target for target in PROVEN if target not in SAMPLES and target not in WITHOUT_ROW],
    ids=lambda target: str(target).split(" at 0x")[0],
)
def test_row_agrees_with_autograd_on_the_samples_of_rules(target):
    """Of operands and results, those of which autograd keeps the storage."""
    for one in PROVEN[target]:
        for graded in (1, 9):
            args, kwargs = fill((list(one.args), dict(one.kwargs)))
            wanted = [
                item
                for item in pytree.tree_leaves((args, kwargs))
                if isinstance(item, torch.Tensor) and item.requires_grad
            ]
            for item in wanted[graded:]:
                item.requires_grad_(False)
            operands = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
            kept: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda tensor: tensor
            ):
                made = target(*args, **kwargs)
            tensors = [*operands, *(item for item in pytree.tree_leaves(made) if isinstance(item, torch.Tensor))]
            if any(tensor.requires_grad for tensor in tensors[len(operands) :]):
                storages, seen = (
                    [tensor.untyped_storage().data_ptr() for tensor in tensors],
                    {tensor.untyped_storage().data_ptr() for tensor in kept},
                )
                expected = kept_by_table(target, args, kwargs, made).positions
                assert {storages[place] for place in expected} == seen & set(storages), (one, graded, expected)


@pytest.mark.parametrize("target", SAMPLES, ids=lambda target: str(target).split(" at 0x")[0])
def test_row_agrees_with_autograd(target):
    function, args = SAMPLES[target]()
    operands = [item for item in torch.utils._pytree.tree_leaves(args) if isinstance(item, torch.Tensor)]
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        seen = kept.get(storage.data_ptr(), 0) + tensor.numel() * tensor.element_size()
        kept[storage.data_ptr()] = min(storage.nbytes(), seen)  # parts of one tensor add up to it
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*args)
    tensors = [*operands, *(result if isinstance(result, (tuple, list)) else [result])]
    wanted = {
        tensors[position].untyped_storage().data_ptr(): tensors[position].numel() * tensors[position].element_size()
        for position in saved_positions(target, [item.requires_grad for item in operands])
    }
    assert sum(wanted.values()) <= sum(kept.values()) <= sum(wanted.values()) + EXTRA.get(target, 0)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("biased", [False, True])
def test_what_experts_keep_is_as_the_formula_says(between, biased):
    columns = 6 if between.startswith("lambda") else 12
    args = (r(16, 8), IDS16, r(16, 2), r(4, 8, columns), r(4, 6, 10), between, *([r(4, columns)] if biased else []))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ops.experts(*args)
    weights = [w.untyped_storage().data_ptr() for w in args[3:5]]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    assert sum(size for place, size in storages.items() if place not in weights) == expected_bytes(ops.experts, args)


def test_nothing_is_kept_without_gradients():
    assert saved_positions(aten.mul.Tensor, [False, False]) == ()
    assert saved_positions(aten.mul.Tensor, [True, False]) == (1,)
    assert saved_positions(aten.mul.Tensor, [True]) == ()  # times a number
    assert saved_positions(F.relu, [True, False]) == (0, 1)  # no row: all operands
