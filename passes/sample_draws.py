"""Draws of random numbers for each sample read an input, so that they are split by samples as it is.

    torch.randint(0, steps, (x.shape[0],))  ->  torch.randint_like(x[:, 0], 0, steps)

Made from sizes they would be the same on all ranks and for all microbatches, of which no part is that of a microbatch.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten
LIKE: dict[Any, Any] = {
    aten.rand.default: aten.rand_like.default,
    aten.randn.default: aten.randn_like.default,
    aten.randint.default: aten.randint_like.default,
    aten.randint.low: aten.randint_like.low_dtype,
}
"""Draws from sizes, and those with the sizes of a tensor."""
BATCH = facts.symbol("b")
IN_LIST = re.compile(r"\.\d+(\.|$)")  # a module path inside of a list of blocks


def sample_draws(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops; `noises` before it, which looks for draws from sizes.
    does: draws outside of lists of blocks whose first size is the batch take their sizes from an input. Blocks would be
        given that input.
    gives: draws with the sizes of a tensor."""
    inputs = [
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if node.meta.get("role") == "input"
        and BATCH in facts.shape(node)
        and 0 not in facts.shape(node)  # it has no element of each sample
        and not facts.dtype(node).is_complex
    ]
    source = min(inputs, key=facts.rank, default=None)
    for node in edit.calls(gm, *LIKE) if source is not None else ():
        drawn_per_sample = facts.shape(node)[:1] == (BATCH,) and node.kwargs.get("generator") is None
        if drawn_per_sample and not IN_LIST.search(node.meta.get("module", "")):
            assert source is not None
            _read(node, source)
    return edit.finish(gm)


def _read(node: fx.Node, source: fx.Node) -> None:
    """Replace a draw by one with the sizes of a view of `source`, an input."""
    *numbers, size = node.args
    with edit.before(node):
        rows, samples = source, facts.shape(source).index(BATCH)
        for dim in range(facts.rank(source) - 1):
            rows = edit.call(node, aten.select.int, rows, int(dim >= samples), 0)
        for _ in range(facts.rank(node) - 1):
            rows = edit.call(node, aten.unsqueeze.default, rows, -1)
        rows = edit.call(node, aten.expand.default, rows, size) if facts.rank(node) > 1 else rows
        form = torch.contiguous_format
        drawn = edit.call(node, LIKE[node.target], rows, *numbers, dtype=facts.dtype(node), memory_format=form)
    edit.replace(node, drawn)
