"""Makes the casts of an autocast region explicit. Called by inline_no_grad.

Export records the values that autocast computed, but not its casts. They follow from the values: an op whose result is
bfloat16 had its float operands cast to bfloat16, and one whose result is float32 (softmax on CUDA) to float32.
"""

from __future__ import annotations

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten

KEEPS_ITS_OPERANDS = (aten.batch_norm.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device)


def write_casts(body: fx.GraphModule) -> None:
    """Casts the float operands of each op of an autocast region to the dtype that the op's recorded result has."""
    for node in edit.calls(body):
        if node.target in KEEPS_ITS_OPERANDS or node.kwargs.get("dtype") is not None or not facts.is_float(node):
            continue
        wanted = facts.tensors(node)[0].dtype
        for operand in node.all_input_nodes:
            if facts.is_tensor(operand) and facts.is_float(operand) and facts.dtype(operand) != wanted:
                with edit.before(node):
                    cast = edit.call(body.graph, aten.to.dtype, (operand, wanted), like=node)
                node.replace_input_with(operand, cast)
