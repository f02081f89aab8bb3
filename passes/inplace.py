"""Replaces in-place ops by their functional twins.

`y = x.view(...); y.mul_(2); use(x)` is only the same without mutation when whoever sees the memory of `x` later gets
the new value. So: later uses of the mutated value use the twin's result; where the base of a view, or another view of
the same memory, is used later, the result is written back into the base (`slice_scatter`, `select_scatter`, ...), and
the other view is taken of that anew.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes._torch import OpOverload
from passes.copied import COPIED
from passes.drop_noops import CASTS, copies, drop_what_gives_itself
from passes.grads import needs_grad
from passes.scatters import SCATTERS

aten = torch.ops.aten

SEEN_ANEW = {*SCATTERS, aten.expand.default}
"""Views that follow from values and sizes alone, however these lie in memory."""

HELD = "held"
"""Key in `meta` of a view of memory that was written to: a value that is there already and equals the view. Such views
stay until all writes are replaced, because they, or the owner of their memory, may be written to again."""


def inplace(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: provenance; batch norm in training mode already decomposed.
    does: replaces in-place calls by functional ones and redirects the later uses; a changed buffer becomes an output.
    gives: functional ops only; ValueError with the source line where memory is shared in a way it cannot follow."""
    drop_what_gives_itself(gm)
    for node in edit.calls(gm):
        if isinstance(node.target, OpOverload) and "out" in node.kwargs:
            _written_in_place(node)
    for node in edit.calls(gm, aten.fill_diagonal_.default):
        _masked_diagonal(node)
    for node in edit.calls(gm):
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            _functionalize(gm, node)
    for node in edit.calls(gm):
        if (value := node.meta.pop(HELD, None)) is not None:
            edit.replace(node, value)
    return edit.finish(gm)


def _written_in_place(node: fx.Node) -> None:
    """`op(..., out=x)` as `x.copy_(op(...))`."""
    target, kwargs = node.target, dict(node.kwargs)
    assert isinstance(target, OpOverload)
    out = kwargs.pop("out")
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if a.name != "out"]
    packet = target.overloadpacket
    twins = [
        twin
        for name in packet.overloads()
        for twin in [getattr(packet, name)]
        if not twin._schema.is_mutable
        and [(a.name, str(a.type)) for a in twin._schema.arguments if not _about_what_is_made(a)] == wanted
    ]
    if not twins or not isinstance(out, fx.Node):
        raise ValueError(f"{facts.where(node)}: {target} changes its operands and has no functional twin")
    with edit.before(node):
        result = edit.call(node, twins[0], *node.args, **kwargs)
        written = edit.call(node, aten.copy_.default, out, result)
    edit.replace(node, written)


def _masked_diagonal(node: fx.Node) -> None:
    """`fill_diagonal_` of a matrix as `masked_fill_` where the row number equals the column number. It stays where the
    diagonal wraps in a tall matrix."""
    given = edit.args_of(node)
    x = given["self"]
    if facts.rank(x) != 2 or given["wrap"]:
        return
    with edit.before(node):
        rows, columns = (edit.call(node, aten.arange.default, edit.size(x, dim)) for dim in (0, 1))
        mask = edit.call(node, aten.eq.Tensor, edit.call(node, aten.unsqueeze.default, rows, 1), columns)
        filled = edit.call(node, aten.masked_fill_.Scalar, x, mask, given["fill_value"])
    edit.replace(node, filled)


def _about_what_is_made(argument: Any) -> bool:
    """Whether an argument says the dtype or device of a new tensor, which `out` has already."""
    return (
        argument.kwarg_only
        and argument.has_default_value()
        and argument.name in ("device", "dtype", "layout", "pin_memory")
    )


def _functionalize(gm: fx.GraphModule, node: fx.Node) -> None:
    """Replace one in-place call by its functional twin. Raises ValueError where it shares memory in a way that cannot
    be followed."""
    _check_changed(node)
    base = node.args[0]
    assert isinstance(base, fx.Node)
    if node.target in TURNED:
        _turned(node, base)
        return
    if facts.shape(node) != facts.shape(base):
        raise ValueError(
            f"{facts.where(node)}: {node.target} changes the size of a tensor in place, and values of a graph have one "
            "size: use what gives a new tensor (reshape, slices, F.pad)"
        )
    chain = _view_chain(base)
    root = chain[-1]
    check_root(node, root)
    siblings = _siblings(node, chain)
    _check_gradients(gm, node, chain, siblings)
    with edit.before(node):
        new = whole = _twin(node, base)
    if root.meta.get("role") == "buffer" or siblings or _used_later(chain[1:], node):
        new, whole = _write_back(node, chain, new)
    node.replace_all_uses_with(new)
    edit.redirect_later(base, new, behind=node)
    for view in siblings:
        with edit.before(node):
            seen = _seen_anew(node, view, root, whole)
        edit.redirect_later(view, seen, behind=node)
    if root.meta.get("role") == "buffer":
        edit.mutate_buffer(gm, root, whole, behind=node)
    gm.graph.erase_node(node)


def _check_changed(node: fx.Node) -> None:
    """Raise ValueError where an operator changes other operands than its first (observers of fake quantisation), or
    gives nothing (a user's own): it has no functional twin."""
    schema = node.target._schema  # type: ignore[union-attr]
    changed = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if changed != [schema.arguments[0].name] or not schema.returns:
        raise ValueError(
            f"{facts.where(node)}: {node.target} changes {', '.join(changed)} beside what it gives, and has no "
            "functional twin: write it with operators that give new values and copy these into buffers (of modules "
            "for quantisation: torch.aminmax, then torch.fake_quantize_per_tensor_affine with scale and zero point in "
            "buffers)"
        )


def _turned(node: fx.Node, base: fx.Node) -> None:
    """Operators that change the metadata of a tensor and not its memory (squeeze_, detach_): later uses read the
    functional result, other views are unaffected."""
    with edit.before(node):
        new = edit.call(node, functional(node), *node.args)
    edit.redirect_later(base, new, behind=node)
    edit.replace(node, new)


def _view_chain(base: fx.Node) -> list[fx.Node]:
    """`base`, the value that it is a view of, and so on up to the owner of the memory."""
    chain = [base]
    while _is_view(chain[-1]):
        parent = chain[-1].args[0]
        assert isinstance(parent, fx.Node)
        chain.append(parent)
    return chain


def _is_view(node: fx.Node) -> bool:
    """Whether the result of `node` may share the memory of its first operand."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    if not isinstance(node.target, OpOverload):
        return False
    if (
        node.meta.get(COPIED)
        or node.target in (aten.clone.default, aten.lift_fresh_copy.default)
        or (node.target in CASTS and copies(node))
    ):
        return False
    return any(item.alias_info is not None and not item.alias_info.is_write for item in node.target._schema.returns)


def check_root(node: fx.Node, root: fx.Node) -> None:
    """Raise ValueError where the memory belongs to an input, a constant or a trained parameter: only buffers may
    change. A parameter that does not train becomes a buffer."""
    role = root.meta.get("role")
    # no optimizer trains it: an average of other weights (momentum encoders), which forward keeps as it does buffers
    if role == "param" and not facts.is_trained(root):
        role = root.meta["role"] = "buffer"
    if role in ("param", "input", "constant"):
        name = root.meta.get("fqn") or root.meta.get("input")
        what = {
            "param": "use a changed copy, for example w = self.w.clamp(-1, 1), or change it behind the optimizer's "
            "step",
            "input": "work on a copy, for example x = x.clone()",
            "constant": "this tensor is none of the model's parameters and buffers (a plain attribute, a global, a "
            "buffer of loss_fn): make it a buffer (register_buffer), or work on a copy",
        }[role]
        raise ValueError(
            f"{facts.where(node)} changes {role} {name} in place ({node.target}); only buffers may change in forward: "
            f"{what}"
        )


def _check_gradients(gm: fx.GraphModule, node: fx.Node, chain: list[fx.Node], siblings: list[fx.Node]) -> None:
    """Raise ValueError for a change without gradients (under no_grad or through a detached view) to a value that has
    one, where that or one of `siblings` is used later: torch keeps the old gradient, which the functional twin
    cannot."""
    cut = next((place for place, view in enumerate(chain) if view.target is aten.detach.default), None)
    behind = chain[cut + 1 :] if cut is not None else chain if node.meta.get("no_grad") else []
    if not behind or behind[-1].meta.get("no_grad") or not needs_grad(gm)[behind[0]]:
        return
    if siblings or _used_later(behind, node) or (cut is None and node.users):
        raise ValueError(
            f"{facts.where(node)} changes in place ({node.target}) what {behind[0].name} ({facts.where(behind[0])}) "
            "holds, without gradients, and gradients of it flow later: a graph cannot; build the new value, for "
            "example x = x + (new - x).detach()"
        )


def _used_later(values: list[fx.Node], node: fx.Node) -> bool:
    """Whether one of `values` is read after `node`."""
    return any(node < user for value in values for user in value.users)


def _write_back(node: fx.Node, chain: list[fx.Node], new: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Write the changed view `new` back into each value in `chain` that it is a view of, for later uses. Mark with HELD
    the views that then hold the same as a node that is there already."""
    written = [new]
    for view, parent in itertools.pairwise(chain):
        scatter = SCATTERS.get(view.target)
        if scatter is None:
            raise ValueError(
                f"{facts.where(node)} changes a view in place ({node.target} on {view.target}) whose base is used "
                "later; autopar cannot write it back: work on a copy of the view, or build the result with "
                "torch.where or cat"
            )
        with edit.before(node):
            written.append(scatter(parent, written[-1], view))
    seen = whole = written.pop()
    edit.redirect_later(chain[-1], whole, behind=node)
    for view, value in zip(chain[-2::-1], reversed(written), strict=True):
        with edit.before(node):
            seen = edit.call(view, view.target, seen, *view.args[1:], **view.kwargs)
        seen.meta[HELD] = value
        edit.redirect_later(view, seen, behind=node)
    return seen, whole


def _siblings(node: fx.Node, chain: list[fx.Node]) -> list[fx.Node]:
    """Other views of the memory of `chain` that were made before the change `node` and are used after it. Raises
    ValueError for one that cannot be taken anew."""
    root, found = chain[-1], list[fx.Node]()
    for view in dict.fromkeys((*_views_below(root, node), *_shared(chain[0], node))):
        if view in chain or not _used_later([view], node):
            continue
        *path, owner = _view_chain(view)
        if owner is not root or any(step.target not in SEEN_ANEW for step in path):
            raise ValueError(
                f"{facts.where(node)} changes in place ({node.target}) what {view.name} ({facts.where(view)}) also "
                "sees and uses later: work on a copy, for example x = x.clone()"
            )
        found.append(view)
    return found


def _seen_anew(node: fx.Node, view: fx.Node, root: fx.Node, whole: fx.Node) -> fx.Node:
    """What `view`, a view of `root`, is of `whole`: the new value of `root` behind the change `node`."""
    if view is root:
        return whole
    parent = view.args[0]
    assert isinstance(parent, fx.Node)
    return edit.call(node, view.target, _seen_anew(node, parent, root, whole), *view.args[1:], **view.kwargs)


def _views_below(value: fx.Node, node: fx.Node) -> Iterator[fx.Node]:
    """The views of `value`, and views of these, that were made before `node`."""
    for user in list(value.users):
        if user < node and _is_view(user) and user.args[0] is value:
            yield user
            yield from _views_below(user, node)


def _shared(value: fx.Node, node: fx.Node) -> Iterator[fx.Node]:
    """Values in the memory of `value` made before `node` by operators whose schema does not declare an alias (einsum,
    meshgrid, unsafe_chunk)."""
    memory = facts.value(value).untyped_storage()
    for other in value.graph.nodes:
        if other is node:
            return
        if facts.is_tensor(other) and other.meta["val"].untyped_storage() is memory:
            yield other


def _twin(node: fx.Node, base: fx.Node) -> fx.Node:
    """The functional call that computes what `base` holds after the in-place call `node`; detached where that writes
    without gradients."""
    target = node.target
    if target is aten.copy_.default:
        # what it is now: it may change later, and what was read before stays
        result = edit.call(node, aten.clone.default, node.args[1])
    elif target is aten.zero_.default:
        result = edit.call(node, aten.zeros_like.default, base)
    elif target is aten.fill_.Scalar:
        result = edit.call(node, aten.full_like.default, base, node.args[1])
    else:
        args = node.args
        if target is aten.bernoulli_.float:  # whose twin has no default
            args = (node.args[0], edit.args_of(node)["p"])
        result = edit.call(node, functional(node), *args, **node.kwargs)
    result = edit.cast(result, facts.dtype(base), like=node)
    if facts.shape(result) != facts.shape(base):
        sizes = [edit.size(base, dim) for dim in range(facts.rank(base))]
        result = edit.call(node, aten.expand.default, result, sizes)
    return edit.call(node, aten.detach.default, result) if node.meta.get("no_grad") else result


TWINS: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,  # `normal` draws for sizes or for means
}
"""In-place operators -> functional ones with another name or other arguments."""

TURNED = tuple(
    getattr(packet, overload)
    for packet in (
        aten.detach_,
        aten.squeeze_,
        aten.swapaxes_,
        aten.swapdims_,
        aten.t_,
        aten.transpose_,
        aten.unsqueeze_,
    )
    for overload in packet.overloads()
)
"""In-place operators that change only the metadata of a tensor, or stop its gradient."""


def functional(node: fx.Node) -> Callable[..., Any]:
    """The functional op of an in-place one: `add_.Tensor` -> `add.Tensor`. Raises ValueError when there is none."""
    target = node.target
    assert isinstance(target, OpOverload)
    if target in TWINS:
        return TWINS[target]
    namespace, name = target._schema.name.split("::")
    plain = "__" + name[3:] if name.startswith("__i") else name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    same = [
        getattr(packet, target._overloadname, None),
        *(getattr(packet, overload) for overload in (packet.overloads() if packet else ())),
    ]
    twins = [
        twin for twin in same if twin is not None and not twin._schema.is_mutable and _types(twin) == _types(target)
    ]
    if plain == name or not twins:
        raise ValueError(f"{facts.where(node)}: {target} changes its operands and has no functional twin")
    return twins[0]


def _types(operator: OpOverload) -> list[str]:
    """The types of an operator's arguments: they tell apart `pow.Tensor_Scalar` and `pow.Scalar` (a number to the power
    of a tensor), which `pow_.Scalar` is not."""
    return [str(argument.type) for argument in operator._schema.arguments]
