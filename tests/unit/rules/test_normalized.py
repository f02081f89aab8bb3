"""Operators that normalised graphs never have need no rule: whatever the arguments, a pass writes them as others."""

from __future__ import annotations

import pytest
import torch

from autopar.rules import RULES
from tests.helpers.export import targets
from tests.helpers.small_graphs import data, normalized

aten = torch.ops.aten

GONE = {
    aten._log_softmax.default: lambda x: (x, -1, False),
    aten._softmax.default: lambda x: (x, -1, False),
    aten._to_copy.default: lambda x: (x,),
    aten.addmm.default: lambda x: (x, x, x),
    aten.alias.default: lambda x: (x,),
    aten.baddbmm.default: lambda x: (x[None], x[None], x[None]),
    aten.batch_norm.default: lambda x: (x, None, None, None, None, True, 0.1, 1e-5, False),
    aten.clone.default: lambda x: (x,),
    aten.contiguous.default: lambda x: (x.t(),),
    aten.empty.memory_format: lambda x: ((0, 6),),
    aten.flatten.using_ints: lambda x: (x,),
    aten.lift_fresh_copy.default: lambda x: (x,),
    aten.mean.default: lambda x: (x,),
    aten.mean.dim: lambda x: (x, [1]),
    aten.mm.default: lambda x: (x, x),
    aten.new_empty.default: lambda x: (x, (0, 6)),
    aten.new_full.default: lambda x: (x, x.shape, 2.0),
    aten.new_ones.default: lambda x: (x, x.shape),
    aten.new_zeros.default: lambda x: (x, x.shape),
    aten.squeeze.default: lambda x: (x[None],),
    aten.to.dtype_layout: lambda x: (x,),
}


@pytest.mark.parametrize("target", GONE, ids=str)
def test_what_passes_write_otherwise_has_no_rule(target) -> None:
    gm = normalized(lambda m, x, y: target(*GONE[target](x @ m.w)) * m.w.sum(), data(6, 6))
    assert target not in RULES and str(target) not in targets(gm)
