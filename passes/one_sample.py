"""Values computed from sizes that are the same for every sample, computed for one sample and expanded.

Positions and masks are written for the whole batch, `arange(s).expand(b, s)`, and then read with `arange(b)` as one of
the indices: a batch that is cut by ranks or by microbatches would have to know which of its samples it has. A value
that turns out the same for all samples at several sizes is computed once more with a batch of one, and expanded: the
expansion is cut as any other value. So are values of the heads of all samples in one dim, for the heads of one. Random
numbers for a batch are drawn like a tensor of its sizes, so that a rank draws for its own samples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from passes import edit, facts
from passes.evaluate import depends_on_sizes_only, evaluate, is_random, is_size, trials
from passes.spellings import reshape_sizes

aten = torch.ops.aten

BATCH = facts.symbol("b")
DRAWN: dict[Any, Any] = {aten.rand.default: aten.rand_like.default, aten.randn.default: aten.randn_like.default}
"""Random operators -> the operator that draws like a given tensor."""
Batches = dict[sympy.Symbol, tuple[fx.Node, int]]
"""Symbol of a batch -> an input that has it, and the dim along which."""


def one_sample(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops with devices dropped.
    does: values that depend on sizes only, and are the same for each sample, are computed for one sample and expanded.
           Random numbers are drawn like an expanded tensor.
    gives: values of sizes that can be split by samples, since an expanded dim can."""
    batches, of_sizes = _batches(gm), _of_sizes(gm)
    made: dict[fx.Node, fx.Node | int] = {}
    for node in edit.calls(gm) if batches else ():
        symbol = _batch_of(node, batches)
        if symbol is None:
            continue
        if node.target in DRAWN and any(_expression(size) == symbol for size in facts.value(node).shape):
            _draw(node, symbol, batches[symbol])
        elif node in of_sizes and (readers := [user for user in node.users if user not in of_sizes]):
            cone = depends_on_sizes_only(node)
            if cone is not None and all(_can(maker, symbol) for maker in cone) and _same(cone, symbol):
                for maker in cone:
                    _make(maker, symbol, made)
                with edit.before(node):
                    wide = _expand(made[node], node, symbol, batches[symbol])
                for user in readers:
                    user.replace_input_with(node, wide)
    return edit.finish(gm)


def _batches(gm: fx.GraphModule) -> Batches:
    """The symbols along which inputs have samples, each with the first such input: the batch, or dim 0 of an input that
    has none."""
    found: Batches = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta.get("role") == "input" and (shape := facts.value(node).shape):
            dim = next((dim for dim, size in enumerate(facts.shape(node)) if size == BATCH), 0)
            expr = _expression(shape[dim])
            if expr is not None and expr.is_Symbol:
                found.setdefault(expr, (node, dim))
    return found


def _batch_of(node: fx.Node, batches: Batches) -> sympy.Symbol | None:
    """The batch symbol of the tensor that `node` gives: it is the size of a dim, or divides the size of exactly one dim
    (samples and heads merged). None where there is none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    for symbol in batches:
        each = [
            _per_sample(size, symbol)
            for size in value.shape
            if (expr := _expression(size)) is not None and symbol in expr.free_symbols
        ]
        if each and None not in each and sum(n != 1 for n in each) <= 1:
            return symbol
    return None


def _per_sample(size: int | torch.SymInt, symbol: sympy.Symbol) -> sympy.Expr | None:
    """`size / batch`: 1 for the dim of samples itself; None where the batch does not divide `size`."""
    expr = _expression(size)
    each = None if expr is None else sympy.cancel(expr / symbol)
    return None if each is None or symbol in each.free_symbols or sympy.fraction(each)[1] != 1 else each


def _expression(size: int | torch.SymInt) -> sympy.Expr | None:
    """The sympy expression of a symbolic size; None for a number."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _of_sizes(gm: fx.GraphModule) -> dict[fx.Node, None]:
    """The calls that give sizes, or depend on sizes only."""
    found: dict[fx.Node, None] = {}
    for node in edit.calls(gm):
        if is_size(node) or (not is_random(node) and all(operand in found for operand in node.all_input_nodes)):
            found[node] = None
    return found


def _can(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """Whether the size `node` can be computed for a batch of one: it does not depend on the batch, is the batch, or is
    computed from such sizes. True for nodes that are no sizes."""
    if (
        not is_size(node)
        or (expr := _expression(node.meta["val"])) is None
        or expr == symbol
        or symbol not in expr.free_symbols
    ):
        return True
    return node.target is not aten.sym_size.int and all(_can(operand, symbol) for operand in node.all_input_nodes)


def _same(cone: list[fx.Node], symbol: sympy.Symbol) -> bool:
    """Whether the last node of `cone` equals, for every sample, its value for a batch of one, in all trials."""
    for trial in trials(cone, (symbol,)):
        try:
            whole, one = evaluate(cone, trial), evaluate(cone, replace(trial, sizes={**trial.sizes, symbol: 1}))
        # what is exported for several samples need not run for one, nor with constants scaled
        except (RuntimeError, IndexError):
            return False
        if (
            whole.dtype != one.dtype
            or whole.dim() != one.dim()
            or any(n % each for n, each in zip(whole.shape, one.shape, strict=True) if each)
        ):
            return False
        if not torch.equal(
            whole, one.repeat([n // each if each else 1 for n, each in zip(whole.shape, one.shape, strict=True)])
        ):
            return False
    return True


def _make(node: fx.Node, symbol: sympy.Symbol, made: dict[fx.Node, fx.Node | int]) -> None:
    """`node` computed for a batch of one, inserted before it; nodes that do not depend on the batch are reused."""
    if node in made:
        return
    expr = _expression(node.meta["val"]) if is_size(node) else None
    if expr == symbol:
        made[node] = 1
        return
    if expr is not None and symbol in expr.free_symbols:
        for operand in node.all_input_nodes:
            _make(operand, symbol, made)
    old = (node.args, node.kwargs)
    args, kwargs = fx.map_arg(old, lambda n: made.get(n, n))
    if (args, kwargs) == old:
        made[node] = node
        return
    with edit.before(node):
        made[node] = edit.call(node, node.target, *args, **kwargs)


def _expand(one: fx.Node | int, node: fx.Node, symbol: sympy.Symbol, owner: tuple[fx.Node, int]) -> fx.Node:
    """`one` expanded to the batch of `node`, inserted before it; for a merged dim of samples and heads, expanded and
    reshaped. `owner`: an input with that batch, and the dim along which."""
    count, shape = edit.size(*owner), facts.value(node).shape
    each = [_per_sample(size, symbol) for size in shape]
    sizes: list[fx.Node | int] = [count if n == 1 else -1 for n in each]
    flat = [dim for dim, n in enumerate(each) if n is not None and n != 1]
    for dim in flat:
        one = edit.call(node, aten.unsqueeze.default, one, dim)
        sizes.insert(dim, count)
    wide = edit.call(node, aten.expand.default, one, sizes)
    return edit.call(node, aten.reshape.default, wide, reshape_sizes(wide, node)) if flat else wide


def _draw(node: fx.Node, symbol: sympy.Symbol, owner: tuple[fx.Node, int]) -> None:
    """Random numbers drawn like an expanded tensor of one sample."""
    given = node.args[0]
    assert isinstance(given, (list, tuple))
    sizes = [
        1 if _expression(size) == symbol else asked for size, asked in zip(facts.value(node).shape, given, strict=True)
    ]
    with edit.before(node):
        one = edit.call(node, aten.zeros.default, sizes, dtype=facts.dtype(node))
        new = edit.call(node, DRAWN[node.target], _expand(one, node, symbol, owner))
    edit.replace(node, new)
