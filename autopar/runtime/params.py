"""Parameters and buffers at rest: how they are declared, made and filled.

A parameter is a DTensor on the whole mesh under its original name. A layout with sections (`S0/3`) has no DTensor
placement that is safe (strided shards lose their order when two meet, and checkpoints refuse them), so such a parameter
is a plain `Shard` of the *rank-major reordering* of the global tensor; checkpoint.py undoes it at every door, behind
which values lie on another mesh (Mesh.model_order). One that rests on a single coordinate (`O1`) is a `Shard(0)` whose
rows all lie there, which DTensor has no name for either: the same doors move it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar._torch import as_parameter, keeping_versions, local_of, wrap_like
from autopar.errors import RunError
from autopar.layout import Layout, dim_of, is_placed, is_shard, local_shape, most_elements, parse, sections_of
from autopar.runtime.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter or buffer at rest: global shape, dtype name ("float32"), layout (without partial entries).

    leaf        the layout in which the forward reads it; "": as it rests. Where it differs, the leaf is whole on
                axes on which the parameter rests cut: it is gathered once per step, and its gradient, partial on
                these axes, is reduce-scattered
    each        that reduce-scatter runs after every microbatch, else once per step
    compute     the dtype of the leaf; "": as it rests. Gradients are accumulated, reduced and kept in `dtype`
    host        it rests with its gradient in host memory (pinned, where the mesh is of accelerators), and the
                optimizer steps there; the leaf is on the device
    host_state  only the optimizer's state rests in host memory (runtime.host_state)
    sync        mesh axes on which gradients are left partial, and summed once per backward
    trainable   it has a gradient
    reached     its gradient comes from here, too: a stage of a pipeline may only read it for a value without one
    persistent  of a buffer: it belongs to the state dict
    """

    shape: tuple[int, ...]
    dtype: str
    layout: str
    sync: tuple[int, ...] = ()
    trainable: bool = True
    reached: bool = True
    persistent: bool = True
    leaf: str = ""
    each: bool = False
    compute: str = ""
    host: bool = False
    host_state: bool = False

    @property
    def entries(self) -> Layout:
        """The layout, parsed."""
        return parse(self.layout)

    @property
    def leaf_entries(self) -> Layout:
        """The layout of the leaf, parsed."""
        return parse(self.leaf) if self.leaf else self.entries

    @property
    def apart(self) -> bool:
        """Whether the leaf is another tensor than what rests."""
        return self.host or bool(self.compute) or self.leaf_entries != self.entries

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it; raises RunError on an unknown name."""
        return _dtype(self.dtype)

    @property
    def sectioned(self) -> bool:
        """Whether the DTensor does not say where the rows lie: the local part is several sections, or on one
        coordinate."""
        return any(is_placed(e) or (is_shard(e) and len(sections_of(e)) > 1) for e in self.entries)

    @property
    def partial_grad(self) -> Layout:
        """How the gradient of the leaf lies before it is synchronised."""
        pairs = zip(self.leaf_entries, self.entries, strict=True)
        return tuple("P" if a in self.sync or leaf != rest else leaf for a, (leaf, rest) in enumerate(pairs))

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return local_shape(self.shape, self.entries, mesh.sizes, mesh.coord)

    def leaf_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of this rank's leaf."""
        return local_shape(self.shape, self.leaf_entries, mesh.sizes, mesh.coord)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise RunError(f"{name!r} is no torch dtype; expected a name such as 'float32'")
    return found


class Built(Protocol):
    """A built model."""

    @property
    def _held(self) -> Mapping[str, Held]: ...


@dataclass(eq=False)
class Held:
    """One parameter or buffer of a built module: the registered tensor, and its leaf, which is the local part of that
    tensor or is gathered from it (`runtime.leaves`), with the tables that hold the leaf."""

    name: str
    info: Param
    owner: dict[str, Any]  # `_parameters` or `_buffers` of the nn.Module that holds it
    key: str
    readers: list[tuple[dict[str, Tensor], str]]  # the `w` or `b` tables that hold the leaf, and the name there
    leaf: Tensor
    version: tuple[int, ...] = ()  # of the registered tensor when the leaf was last gathered from it
    ready: Callable[[], None] | None = None  # waits until the leaf is filled, where it is another tensor

    @property
    def tensor(self) -> Tensor:
        """The registered tensor: a Parameter that is a DTensor, or a buffer."""
        found: Tensor = self.owner[self.key]
        return found

    @property
    def local(self) -> Tensor:
        """The local part of the registered tensor."""
        return local_of(self.tensor)

    def leaf_bytes(self, mesh: Mesh) -> int:
        """Bytes of the leaf on the rank that has most of it: what all ranks go by where they decide which collectives
        follow each other."""
        return most_elements(self.info.shape, self.info.leaf_entries, mesh.sizes) * self.leaf.element_size()

    def gradient_bytes(self, mesh: Mesh) -> int:
        """Bytes of the whole gradient of the leaf on the rank that has most of it, in the dtype of what rests, in which
        it is summed."""
        return most_elements(self.info.shape, self.info.leaf_entries, mesh.sizes) * self.local.element_size()

    def stale(self) -> bool:
        """Whether the registered tensor no longer is the one that `leaf` is made of (moved, cast, frozen, replaced)."""
        local, leaf = self.local, self.leaf
        same = self.info.host or leaf.device == local.device if self.info.apart else local.data_ptr() == leaf.data_ptr()
        return not same or leaf.dtype != self._computes_in or leaf.requires_grad != self.tensor.requires_grad

    @property
    def _computes_in(self) -> torch.dtype:
        """The dtype of the leaf: as the plan says, else that of the registered tensor, which users may have cast."""
        return _dtype(self.info.compute) if self.info.compute else self.local.dtype

    @torch.inference_mode(False)
    def renew(self, mesh: Mesh) -> None:
        """Make a new leaf, which aliases the registered tensor or is yet to be gathered from it, and hand it to the
        readers."""
        local = self.local
        where = mesh.device if self.info.host else local.device
        leaf = (
            torch.empty(self.info.leaf_shape(mesh), dtype=self._computes_in, device=where)
            if self.info.apart
            else local.detach()
        )
        self.leaf, self.version = leaf.requires_grad_(self.tensor.requires_grad), ()
        if leaf.requires_grad and leaf.dtype != local.dtype:
            leaf.grad_dtype = local.dtype  # autograd casts each gradient before it adds it
        for table, key in self.readers:
            table[key] = self.leaf

    def on_device(self, dtype: torch.dtype) -> Tensor:
        """What rests, in another dtype, on the device of the leaf."""
        return self.local.detach().to(dtype).to(self.leaf.device, non_blocking=True)

    def state(self) -> tuple[int, ...]:
        """Version counters that change whenever the values of the registered tensor may have."""
        return optimizer_steps(), self.tensor._version, self.local._version


def grad_at_rest(param: Tensor) -> Tensor | None:
    """The gradient of a parameter, with the placements of the parameter. What users compute from a gradient (minus its
    mean, projected) may have got other placements from DTensor: it is redistributed, which may be a collective
    operation."""
    if isinstance(param.grad, DTensor) and isinstance(param, DTensor) and param.grad.placements != param.placements:
        param.grad = param.grad.redistribute(placements=param.placements)
    return param.grad


@contextmanager
def filling(held: Sequence[Held]) -> Iterator[None]:
    """Inside, what rests of `held` is brought to their leaves. Where a registered tensor is unchanged since the last
    time, the leaf keeps its version counter, so that autograd graphs that saved it can still run their backward, as on
    one device; else autograd raises an error there."""
    states = [one.state() for one in held]
    changed = [one for one, state in zip(held, states, strict=True) if state != one.version]
    with torch.no_grad(), keeping_versions([one.leaf for one in held if one not in changed]):
        yield
    for one in changed:
        increment_version(one.leaf)  # collectives that write to it do not
    for one, state in zip(held, states, strict=True):
        one.version = state


_steps = [0]


def optimizer_steps() -> int:
    """The optimizer steps of this process so far: fused optimizers change DTensors without a trace in their version
    counters."""
    return _steps[0]


def _stepped(*_: Any) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_stepped)


def placements(layout: Layout) -> tuple[Placement, ...]:
    """DTensor placements of a layout at rest; sections are dropped (see the module docstring)."""
    return tuple(Shard(dim_of(e)) if is_shard(e) else Shard(0) if is_placed(e) else Replicate() for e in layout) or (
        Replicate(),
    )


def distribute(
    local: Tensor, shape: tuple[int, ...], layout: Layout, mesh: Mesh, *, model_order: bool = False
) -> Tensor:
    """`local` as a DTensor of global `shape`; as it is where the mesh is one rank without torch.distributed.
    `model_order`: its rows are in the model's order, and those of its weight at rest are not."""
    on = mesh.model_order if model_order else mesh.device_mesh
    if on is None:
        return local
    stride = torch.empty(shape, device="meta").stride()
    if local.device.type != mesh.device_type:  # from_local would bring it to the device
        like = DTensor.from_local(
            local.new_empty(0, device=mesh.device),
            on,
            placements(layout),
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        return wrap_like(local, like)
    return DTensor.from_local(local, on, placements(layout), run_check=False, shape=torch.Size(shape), stride=stride)


def empty(name: str, info: Param, mesh: Mesh, *, buffer: bool) -> Tensor:
    """A parameter or buffer without values: filled with nan where its dtype has nan, so that a step before weights are
    loaded is seen to be wrong (fresh memory is often zeros, which would train). Buffers that rest whole are plain
    tensors. Raises RunError where the layout has more axes than the mesh."""
    try:
        local = torch.empty(
            info.local_shape(mesh),
            dtype=info.torch_dtype,
            device="cpu" if info.host else mesh.device,
            pin_memory=info.host and mesh.device.type == "cuda",
        )
    except IndexError as error:
        raise RunError(f"{name}: layout {info.layout} does not belong to {mesh}") from error
    if local.is_floating_point() or local.is_complex():
        local.fill_(math.nan)
    if buffer:
        return local if not any(map(is_shard, info.entries)) else distribute(local, info.shape, info.entries, mesh)
    return as_parameter(distribute(local, info.shape, info.entries, mesh), info.trainable)


class Branch(nn.Module):
    """An inner module of the tree of original names. It holds parameters and never runs, so calling it and registering
    forward or backward hooks on it raise RunError."""

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise RunError(
            "the parts of a sharded model hold parameters and do not run by themselves, so they cannot be called and "
            "hooks of theirs would never be; let the model give what you need among its outputs before it is compiled "
            "(hooks of parameters are called)"
        )

    forward = _refused
    register_forward_hook = register_forward_pre_hook = _refused
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refused

    def train(self, mode: bool = True) -> Self:
        """The mode of the whole model, which sets it for its parts; raises RunError on another one, also by
        `eval()`."""
        if mode != self.training:
            raise RunError(
                f"{'train' if mode else 'eval'}() of a part of a sharded model would change nothing: parts hold "
                "parameters, and what drops or takes statistics of the batch is in the emitted program, for all of "
                f"the model alike. Call {'train' if mode else 'eval'}() of the whole model; for a batch norm that "
                "trains on the statistics it has, or a part without dropout, call eval() of that part before the "
                "model is compiled"
            )
        return self


def place(
    root: nn.Module, name: str, tensor: Tensor, *, buffer: bool, persistent: bool = True
) -> tuple[dict[str, Any], str]:
    """Register `tensor` under the dotted `name`, in `Branch` modules that are made as needed; gives the table that
    holds it and its key.

    Works on the tables of nn.Module, because a name of the model may be an attribute of ours.
    """
    *path, key = name.split(".")
    module: nn.Module = root
    for part in path:
        inner = module._modules.get(part)
        if inner is None:
            inner = module._modules[part] = Branch()
        module = inner
    table: dict[str, Any] = module._buffers if buffer else module._parameters
    table[key] = tensor
    if buffer and not persistent:
        module._non_persistent_buffers_set.add(key)
    return table, key
