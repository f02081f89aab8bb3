"""The private names of torch that autopar uses, each with its reason: one place to mend when torch moves. Those that
capture alone uses are in autopar.capture._torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._library.custom_ops import OPDEFS  # operators made by torch.library.custom_op, by name
from torch._ops import (
    OpOverload,
    OpOverloadPacket,
)  # the class of call_function targets, and of all overloads of a name
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # public in effect (docs name them)
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

# torch.export describes inputs and outputs by this module's pytrees; the public torch.utils.pytree has no paths.
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode  # documented, but without a public name


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run `call` when the backward pass now running ends, before `backward()` returns, whoever called it; torch's own
    DDP and FSDP use the same queue. There is no public name for it."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def default_store() -> dist.Store:
    """The key-value store in which the ranks of the default process group met. There is no public name for it."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def graph_is_kept() -> bool:
    """Whether the backward pass now running keeps the graph for another one (`retain_graph`); to be called in a hook of
    that backward. torch's own compiler asks in the same way; there is no public name for it."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def gradient_hooks(tensor: Tensor) -> tuple[list[Callable[[Tensor], Tensor | None]], list[Callable[[Tensor], None]]]:
    """The hooks of a tensor: those of `register_hook`, and those of `register_post_accumulate_grad_hook`. Autograd
    calls them for its own leaves only, and torch has no public name for them."""
    after: Mapping[int, Callable[[Tensor], None]] = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list((tensor._backward_hooks or {}).values()), list(after.values())


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor itself, not a view of it; any other tensor as it is.

    `to_local()` is a differentiable view and costs tens of microseconds; we look at every parameter at every step.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def maker_of(mesh: DeviceMesh) -> int:
    """The rank on which `mesh` was made: another one, where it was read from that rank's file. Its public properties
    are those of a mesh that this rank has made, but for the coordinates, which do not tell places of a pipeline."""
    rank: int = mesh._rank
    return rank


def before_numbers(check: Callable[[DTensor], None]) -> None:
    """Call `check` with each DTensor of which a number is asked (`item()`, `float()`, `bool()`), which is that of its
    local part whatever its placements. DTensor has a table of operators that are handled otherwise, without a public
    name."""

    def number(operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        check(args[0])
        return operator(local_of(args[0]))

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = number


def before_total_norms(check: Callable[[Sequence[Tensor]], None]) -> None:
    """Call `check` with the gradients of which torch.nn.utils.clip_grad_norm_ takes the norm, whoever imported it. It
    looks up this function of its module, which has no public name."""
    module: Any = clip_grad
    total_norm: Callable[..., Tensor] = module._get_total_norm

    @wraps(total_norm)
    def checked(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        check(tensors)
        return total_norm(tensors, *args, **kwargs)

    module._get_total_norm = checked


def wrap_like(local: Tensor, like: Tensor) -> Tensor:
    """`local` as a DTensor with the mesh, placements and global shape of `like`; as it is where `like` is plain.

    Gradients are wrapped at every step: the constructor is ten times cheaper than `DTensor.from_local`.
    """
    if not isinstance(like, DTensor):
        return local
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[call-arg, unused-ignore]


def give_local(tensor: Tensor, local: Tensor) -> None:
    """Make `local` what `tensor` is, or its local tensor where it is a DTensor, which has no public way for that. The
    old values stay as they are, for whoever has saved them."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = local
    else:
        tensor.data = local


def as_parameter(tensor: Tensor, trainable: bool) -> torch.nn.Parameter:
    """`tensor` itself as a parameter; it must be a leaf that nobody else holds. The constructor of Parameter would
    detach a DTensor, for which torch computes the sharding of its shape anew (a few milliseconds each), and then set
    the same attribute. There is no public way to do only that."""
    if not isinstance(tensor, DTensor):
        return torch.nn.Parameter(tensor, requires_grad=trainable)
    tensor.requires_grad_(trainable)
    tensor._is_param = True
    return tensor  # type: ignore[return-value]  # isinstance looks at that attribute


def keeping_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """A context in which autograd does not notice writes to `tensors`: for writing back the values that they have
    already, as torch's own FSDP does. There is no public name for it."""
    kept: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tuple(tensors))
    return kept


def copy_all(into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """`copy_` for each pair, with casts where dtypes differ; on a GPU in a few kernels for all of them, as torch's
    optimizers and FSDP do it. torch has no public name for it."""
    torch._foreach_copy_(list(into), list(sources))


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each of `tensors`, of one device and dtype, by `factor`, of no dims, in place, as torch's clipping does
    it. torch has no public name for it."""
    torch._foreach_mul_(list(tensors), factor)


def as_received(grad: Tensor, node: Any, index: int) -> Tensor:
    """A gradient as autograd's engine hands it to input `index` of the next node: summed over what was broadcast, in
    the dtype of the value."""
    about = node._input_metadata[index]
    return grad.sum_to_size(tuple(about.shape)).to(about.dtype)


class LocalScaler(torch.amp.GradScaler):
    """A scaler that unscales the local parts of gradients, with no collective, and says what it found.

    torch's own hands DTensors to one operator, which asks the ranks of the first of them alone whether something
    overflowed, and cannot where gradients are on the host. FSDP's scaler overrides the same method; what `step` goes by
    has no public name either.
    """

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        held = []
        for grad in (
            local_of(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ):
            held.append(grad.detach())  # a tensor that has this gradient
            held[-1].grad = grad
        found: dict[torch.device, Tensor] = super()._unscale_grads_(
            SimpleNamespace(param_groups=[{"params": held}]),  # type: ignore[arg-type]
            *args,
        )
        return found

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `unscale_(optimizer)` was called in this step; calling it twice is an error."""
        return bool(self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY)

    def overflows(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """By device, a number that is not zero where `unscale_(optimizer)` found a gradient that is none; `step` goes
        by it."""
        found: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return found


def is_view(tensor: Tensor) -> bool:
    """Whether autograd treats `tensor` as a view. A view cannot be detached in place, which zero-bubble schedules
    do."""
    return tensor._is_view()


def order_only(schedule: type[Any]) -> type[Any]:
    """A schedule class of torch.distributed.pipelining that lays out its order of compute when it is made, and nothing
    else.

    The transfers and gathers that it would place between those actions take most of the time, up to a second for 32
    ranks; there is no public way to have the order without them.
    """
    return type(
        f"{schedule.__name__}Order",
        (schedule,),
        {"_prepare_schedule_with_comms": lambda self, actions, format="compute_only": None},
    )


def with_transfers(schedule: Any) -> Mapping[int, Sequence[Any]]:
    """The actions of each place of a schedule of a class by `order_only`, with the transfers between them, as torch's
    schedules of several stages per place run them.

    Where a receive is depends on gathers and sums of torch's own wrappers too: these do nothing here, but have their
    places in the order in which torch asks which transfers are due.
    """
    schedules._PipelineScheduleRuntime._prepare_schedule_with_comms(schedule, schedule.pipeline_order)
    order: Mapping[int, Sequence[Any]] = schedule.pipeline_order_with_comms
    return order


def waits_late(schedule: type[Any]) -> bool:
    """Whether a schedule class posts each send by itself, and waits for them at the end of the step. Other classes wait
    within the step, and may have to post a send together with a receive. The common base of the former has no public
    name."""
    return issubclass(schedule, schedules._PipelineScheduleRuntime)


def post(ops: list[dist.P2POp]) -> Sequence[dist.Work]:
    """Begin point-to-point transfers in the way that torch's schedules do, since both sides must begin them in the same
    way to match."""
    return schedules._batch_p2p(ops)


class _Fakes(FakeTensorMode):
    """As FakeTensorMode; of each tensor on meta, as weights are, it makes a fake one once, where torch makes one for
    each operator that reads it, and infers the results of operators anew that read any but fake tensors."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.made: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator; torch refuses those that change sizes of what is no fake tensor."""
        if torch.Tag.inplace_view not in func.tags:
            with DisableTorchFunction():  # modes that are on would see all that is read of each tensor
                args, kwargs = pytree.tree_map_only(Tensor, self._fake, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or not tensor.is_meta:
            return tensor
        found = self.made.pop(id(tensor), None)
        if found is None or not _alike(*found):
            del found  # torch would give it again as long as it lives
            found = tensor, self.from_tensor(tensor)
        self.made[id(tensor)] = found
        return found[1]


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether tensors have one shape, dtype and order in memory."""
    return (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@contextmanager
def fake_mode() -> Iterator[None]:
    """A context in which tensors have shapes and no values, on any device; outer model code takes its tracing branches
    in it."""
    with (mode := _Fakes()):
        try:
            yield
        finally:
            mode.made.clear()  # which what the model keeps of the run would hold


def copied(function: Any, **names: Any) -> Any:
    """A copy of a function written in Python, as it is now, in which some global `names` have other values."""
    made = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def memory_of(tensor: Tensor) -> int:
    """An identifier of the memory that a tensor is a view of. Inside `torch.vmap` that of all samples; inside
    `torch.func.grad` that of the plain tensor. Modes that are on do not see that it is asked for."""
    from torch._C import DisableTorchFunction, _functorch

    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    with DisableTorchFunction():
        return tensor.untyped_storage()._cdata


def without_fake_cache() -> AbstractContextManager[None]:
    """A context in which new modes of fake tensors compute every operator, instead of looking it up in a cache. Filling
    the cache costs about as much as computing, so that it pays only where the same operators come again and again.
    There is no public name for the setting."""
    import torch._dynamo

    patched: AbstractContextManager[None] = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    return patched


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`q [b, h, l, d]`, `k, v [b, h, s, d]` -> the attention `[b, h, l, d]` and its log-sum-exp `[b, h, l]`, by the
    fused kernel of the device. No autograd.

    Public attention does not return the log-sum-exp, without which parts cannot be merged; torch's own context
    parallelism (torch.distributed.tensor.experimental) calls the same two operators.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v for one part of an attention whose whole result is `out` with log-sum-exp `lse`."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout that there is not
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, causal, unused, unused, scale=scale
        )
    return grads[0], grads[1], grads[2]


def flash_takes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether `flash_attention` has a kernel for these operands (contiguous, one head of k per head of q)."""
    if q.shape[-1] != v.shape[-1] or q.dtype != k.dtype or q.dtype != v.dtype:
        return False
    if q.device.type == "cpu":
        return q.is_floating_point()
    from torch.backends.cuda import SDPAParams, can_use_flash_attention

    return (
        q.device.type == "cuda"
        and q.shape[-1] % 8 == 0
        and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, causal, False))
    )


class Watch(TorchDispatchMode):
    """A context manager that calls `seen(operator, args, kwargs, result)` for every operator that runs inside. Where
    `instead(operator, args)` returns a tensor, that is the result, and the operator does not run."""

    def __init__(
        self,
        seen: Callable[..., None] = lambda *_: None,
        instead: Callable[[Any, tuple[Any, ...]], Tensor | None] = lambda *_: None,
    ) -> None:
        super().__init__()
        self.seen, self.instead = seen, instead

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and report it."""
        result: Any = self.instead(func, args)
        result = func(*args, **(kwargs or {})) if result is None else result
        self.seen(func, args, kwargs or {}, result)
        return result


__all__ = ["OPDEFS", "OpOverload", "OpOverloadPacket", "pytree"]


def profiling() -> bool:
    """Whether torch.profiler records this thread; only then are ranges named. There is no public name for it."""
    return torch.autograd._profiler_enabled()
