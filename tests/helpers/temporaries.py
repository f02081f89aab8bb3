"""The most memory that one call and its backward really take, and what the tables say of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch import pytree
from autopar.memory.habits import EMITTED
from autopar.memory.local import Local
from autopar.memory.operators import backward_bytes, forward_bytes, hands_on
from autopar.memory.summed_gradients import made_whole
from autopar.problem.graph import Op
from autopar.problem.view_ops import makes_view
from autopar.rules.language import Call
from autopar.rules.language import Tensor as Shape
from tests.helpers.peak import allocations
from tests.unit.rules.samples import Case, fill


@dataclass(frozen=True)
class Both:
    """Bytes beside operands, as they were counted and as they are predicted, and of all that is there anyway."""

    counted: float
    predicted: float
    beside: float

    @property
    def close(self) -> bool:
        """Whether a peak is met within a seventh, small numbers left out."""
        return abs(self.counted - self.predicted) <= 32 + (self.beside + self.counted) / 7


class _Given(torch.autograd.Function):
    """A gradient that nobody else holds; `summed`: that of a sum, one number that is seen at full size."""

    @staticmethod
    def forward(ctx: Any, summed: bool, *results: Tensor) -> Tensor:
        ctx.summed, ctx.like = summed, [(result.shape, result.dtype) for result in results]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(torch.ones(() if ctx.summed else shape, dtype=dtype).expand(shape) for shape, dtype in ctx.like)


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements, however many of them are in one place."""
    return tensor.numel() * tensor.element_size()


def _narrow(tensor: Tensor) -> Tensor:
    wanted = {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(wanted).requires_grad_(tensor.requires_grad or tensor.is_complex())


def _leaves(tree: Any) -> list[Tensor]:
    return [item for item in pytree.tree_leaves(tree) if isinstance(item, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _op(target: Any, args: Any, kwargs: Any, made: Any) -> Op:
    """The call as the memory of a plan sees it."""
    graph, shapes = fx.Graph(), []

    def held(tensor: Tensor) -> fx.Node:
        node = graph.placeholder(f"x{len(shapes)}")
        node.meta["val"] = _alike(tensor)
        shapes.append(_shape(tensor))
        return node

    node = graph.call_function(target, *pytree.tree_map_only(Tensor, held, (tuple(args), dict(kwargs))))
    node.meta["val"] = pytree.tree_map_only(Tensor, _alike, made)
    queue = iter(shapes)
    args, kwargs = pytree.tree_map_only(Tensor, lambda _: next(queue), (tuple(args), dict(kwargs)))
    results = _leaves(made)
    call = Call(target, args, kwargs, tuple(map(_shape, results)))
    return Op(
        "it",
        "",
        node,
        "op",
        call,
        tuple((f"x{i}", 0) for i in range(len(shapes))),
        out_dtypes=tuple(result.dtype for result in results),
    )


def _alike(tensor: Tensor) -> Tensor:
    """A tensor without memory: graphs are let go when Python's collector comes by."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _shape(tensor: Tensor) -> Shape:
    return Shape(
        tuple(tensor.shape),
        tensor.requires_grad,
        floating=tensor.is_floating_point() or tensor.is_complex(),
        itemsize=tensor.element_size(),
    )


def _kept(body: Callable[[], Any], known: Sequence[Tensor]) -> float:
    """Bytes of what autograd keeps of neither operands nor results."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = body()
    there = {_place(tensor) for tensor in (*known, *_leaves(made))}
    return sum(size for place, size in kept.items() if place not in there)


def numbers_graded(case: Case) -> tuple[int, ...]:
    """How many operands may have gradients: one, and all of them where there are several that can."""
    able = sum(_narrow(tensor).requires_grad for tensor in _leaves(fill((list(case.args), dict(case.kwargs)))))
    return (1, able) if able > 1 else (1,)


def all_ways(target: Any, case: Case, graded: int) -> tuple[Both | None, Both | None, Both | None]:
    """Forward, backward, and backward of a sum of the results, of a call in float32 of whose operands the first
    `graded` of those have gradients that can; None of one that gives its operand, or has no gradient."""
    args, kwargs = pytree.tree_map_only(Tensor, _narrow, fill((list(case.args), dict(case.kwargs))))
    wanted = {id(tensor) for tensor in [tensor for tensor in _leaves((args, kwargs)) if tensor.requires_grad][:graded]}
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda tensor: tensor if id(tensor) in wanted else tensor.detach(), (args, kwargs)
    )
    operands = _leaves((args, kwargs))
    extra = _kept(lambda: target(*args, **kwargs), operands)
    results: list[Any] = []
    counted = max(allocations(lambda: results.append(target(*args, **kwargs))), default=0)
    op, made = _op(target, args, kwargs, results[0]), _leaves(results.pop())
    if not makes_view(op) and any(_place(result) in map(_place, operands) for result in made):
        return None, None, None
    local = Local(op, [*map(nbytes, operands)], [*map(nbytes, made)], extra, on_cpu=True)
    new = sum(
        {_place(result): nbytes(result) for result in made if _place(result) not in map(_place, operands)}.values()
    )
    beside = sum(local.ins) + sum(local.outs) + extra
    forward = Both(counted, new + extra + forward_bytes(local, (), EMITTED), beside)
    if not wanted or not any(result.requires_grad for result in made):
        return forward, None, None
    whole = _backward(made, operands, local, beside, summed=False)
    allocations(lambda: results.append(target(*args, **kwargs)))  # the profiler sees what goes if it saw it come
    made = _leaves(results.pop())
    return forward, whole, _backward(made, operands, local, beside, summed=True)


def _backward(made: Sequence[Tensor], operands: Sequence[Tensor], local: Local, beside: float, *, summed: bool) -> Both:
    """Of a call that made `made`. `summed`: the gradient of these is that of a sum."""
    ends = [result for result in made if result.requires_grad]
    loss, given, one = (
        _Given.apply(summed, *ends),
        sum(result.element_size() if summed else nbytes(result) for result in ends),
        torch.ones(()),
    )
    leaves, results = [tensor for tensor in operands if tensor.requires_grad], list[Any]()
    counted = max(
        allocations(lambda: results.append(torch.autograd.grad(loss, leaves, one, allow_unused=True))), default=0
    )
    used = [gradient is not None for gradient in results.pop()]
    gradients = sum(
        local.ins[i]
        for i, there in zip((i for i, tensor in enumerate(operands) if tensor.requires_grad), used, strict=True)
        if there and not hands_on(local.op, i, local)
    )
    return Both(counted, given + gradients + backward_bytes(local, (), EMITTED) + made_whole(local, given), beside)
