"""The mesh of ranks that an emitted module runs on.

A `Mesh` is made when the emitted file is imported; its process groups are made with the first model (`meet`), when
torch.distributed runs. Ranks are numbered row by row: the last axis varies fastest, as in torch's DeviceMesh.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import RunError
from autopar.layout import chunk

_MESHES: list[Mesh] = []
PIPELINE = "pipeline"
"""The name of the pipeline axis in torch's mesh."""


def _grow_segments() -> None:
    """Set torch's CUDA allocator to segments that can grow, unless it is running already or the user has configured it.
    Plans count on all that `usable_memory` leaves: with segments of fixed size, 7 of 80 GiB could not be allocated at a
    peak of 73 GiB (Llama-3 8B on an H100)."""
    if not torch.cuda.is_initialized() and "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def device_here(kind: str) -> torch.device:
    """The device of this rank, of that kind. Raises RunError where this machine has none."""
    if kind == "cpu":
        return torch.device(kind)
    if not torch.accelerator.is_available():
        raise RunError(
            f"the plan is for {kind} devices, and torch finds none here: its module, parameters and steps are for "
            "machines that have them. `autopar verify` and `autopar run` take a saved plan to CPU ranks; to train on "
            'CPUs, plan for them (cluster "cpu:1x4"). plan, source, save() and verify() work everywhere'
        )
    return torch.device(kind, torch.accelerator.current_device_index())


def sends_from_host(device_type: str, group: dist.ProcessGroup | None = None) -> bool:
    """Whether ranks of `group` (None: all) have tensors on GPUs and can only send host memory to each other:
    point-to-point transfers of gloo, unlike its collectives, read GPU memory as if it were the host's, which crashes
    the process."""
    return device_type == "cuda" and dist.is_initialized() and "cuda:gloo" in dist.get_backend_config(group).split(",")


class Mesh:
    """Mesh axes `names` of `sizes` ranks, on devices of `device_type` ("cpu", "cuda").

    With `places` above 1 there is one such mesh for each place of the pipeline axis, which is the outermost; a rank
    sees the mesh of its own place. The axes `behind` have a second process group each, for collectives in the
    background. `branches`: operators run on some coordinates only (`placed`), so that gradients come in a different
    order on each rank. Meshes with equal arguments are the same object and share process groups. Everything except
    sizes and names needs torch.distributed, unless there is one rank.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    device_type: str
    places: int
    number: int
    behind: tuple[int, ...]
    branches: bool
    pipeline: dist.ProcessGroup
    _world: dist.ProcessGroup | None
    _second: dict[int, dist.ProcessGroup]

    def __new__(
        cls,
        sizes: Sequence[int],
        names: Sequence[str],
        device_type: str = "cpu",
        places: int = 1,
        behind: Sequence[int] = (),
    ) -> Mesh:
        key = (tuple(sizes), tuple(names), device_type, places, tuple(behind))
        for known in _MESHES:
            if (known.sizes, known.names, known.device_type, known.places, known.behind) == key:
                return known
        if len(key[0]) != len(key[1]) or any(n < 1 for n in key[0]):
            raise RunError(
                f"mesh of sizes {key[0]} and axis names {key[1]}: want one name per axis and sizes of 1 or more"
            )
        if device_type == "cuda":
            _grow_segments()
        mesh = super().__new__(cls)
        mesh.sizes, mesh.names, mesh.device_type, mesh.places, mesh.behind = key
        mesh.number, mesh.branches, mesh._world = len(_MESHES), False, None
        _MESHES.append(mesh)
        return mesh

    def __reduce__(self) -> tuple[object, ...]:
        return Mesh, (self.sizes, self.names, self.device_type, self.places, self.behind)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))
        return f"Mesh({axes}, {self.device_type}{f', {self.places} places' if self.places > 1 else ''})"

    @property
    def ranks(self) -> int:
        """How many ranks there are in all, on every place."""
        return math.prod(self.sizes) * self.places

    @cached_property
    def device_mesh(self) -> DeviceMesh | None:
        """Torch's mesh; None on one rank without torch.distributed. Raises RunError where the number of ranks is
        wrong."""
        if not dist.is_initialized():
            if self.ranks == 1:
                return None
            raise RunError(
                f"the plan needs {self.ranks} ranks ({self}), but torch.distributed is not initialised; "
                f"start it with torchrun --nproc-per-node={self.ranks}, or use autopar run"
            )
        if dist.get_world_size() != self.ranks:
            raise RunError(
                f"wrong number of ranks: got {dist.get_world_size()}, wanted {self.ranks} ({self}); "
                f"start with --nproc-per-node={self.ranks} or plan for {dist.get_world_size()} ranks"
            )
        if self.places > 1 and sends_from_host(self.device_type):
            raise RunError(
                "a pipeline on GPUs sends what is in their memory from place to place, which gloo cannot: start one "
                f"rank per GPU with NCCL ({self.ranks} GPUs), or run it on CPU ranks"
            )
        sizes, names = (self.sizes, self.names) if self.sizes else ((1,), ("one",))
        if self.places > 1:
            sizes, names = (self.places, *sizes), (PIPELINE, *names)
        whole, self._world = init_device_mesh(self.device_type, sizes, mesh_dim_names=names), dist.group.WORLD
        self._second = self._second_groups(sizes, names, whole)
        if self.places == 1:
            return whole
        self.pipeline = whole.get_group(PIPELINE)
        return whole[names[1:]]

    def meet(self) -> DeviceMesh | None:
        """`device_mesh`, after making its process groups if they do not exist yet: a collective operation of all ranks,
        and the first one of every model. If torch.distributed was started, or shut down, since they were made, all
        groups are made anew.

        All ranks must make all groups in the same order: torch names a group by how many this process has made before,
        and a rank that skipped one would connect to members of another group and wait there.

        Raises RunError where the number of ranks is wrong.
        """
        if dist.group.WORLD is not self._world:
            self.forget()
        return self.device_mesh

    def check_met(self, met: DeviceMesh | None) -> None:
        """Raise RunError unless `meet` still gives `met`, on whose ranks the parameters of a module lie."""
        if self.ranks > 1 and self.meet() is not met:
            raise RunError(
                "torch.distributed was shut down and started again since this module was made, and its parameters lie "
                "on ranks that are gone: make another one of the plan (autopar.load, or autopar.compile) and fill it "
                "with what was saved before (load_full, or torch.distributed.checkpoint)"
            )

    def _second_groups(
        self, sizes: tuple[int, ...], names: tuple[str, ...], first: DeviceMesh
    ) -> dict[int, dist.ProcessGroup]:
        """The second process groups of the axes `behind`. All ranks make them here, in the same order, even those that
        never use them."""
        if not self.behind:
            return {}
        whole, more = init_device_mesh(self.device_type, sizes, mesh_dim_names=names), len(sizes) - len(self.sizes)
        made = {axis: (whole.get_group(axis + more), first.get_group(axis + more)) for axis in self.behind}
        # torch gives an axis of all ranks the default group every time
        return {axis: dist.new_group() if second is known else second for axis, (second, known) in made.items()}

    @property
    def place(self) -> int:
        """The place of this rank on the pipeline axis."""
        return 0 if self.places == 1 else dist.get_rank() // math.prod(self.sizes)

    @cached_property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The ranks with the coordinates of this one on all places, in order; None where there is one place."""
        if self.places == 1 or self.device_mesh is None:
            return None
        return self.pipeline

    def places_group(self, places: Sequence[int]) -> dist.ProcessGroup:
        """The ranks with the coordinates of this one on some `places`; a collective operation of all ranks."""
        self.meet()
        inner = math.prod(self.sizes)
        groups = [dist.new_group([place * inner + at for place in places]) for at in range(inner)]
        found: dist.ProcessGroup = groups[dist.get_rank() % inner]
        return found

    @cached_property
    def coord(self) -> tuple[int, ...]:
        """This rank's coordinate on each axis."""
        if self.device_mesh is None or not self.sizes:
            return (0,) * len(self.sizes)
        found = self.device_mesh.get_coordinate()
        if found is None:
            raise RunError(f"rank {dist.get_rank()} is no part of {self}")
        return tuple(found)

    @cached_property
    def model_order(self) -> DeviceMesh | None:
        """Another mesh of torch's with the same ranks and groups, for values in the model's order of weights that rest
        in another one: torch refuses operators of tensors on unlike meshes, where rows of both orders would be mixed
        in silence."""
        here = self.device_mesh
        if here is None or here.mesh_dim_names is None:
            return None
        names = tuple(f"{name}, rows in the model's order" for name in here.mesh_dim_names)
        groups = [here.get_group(axis) for axis in range(here.ndim)]
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0], self.device_type, here.mesh, mesh_dim_names=names
        )

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The process group of this rank along each axis; None on axes that need none."""
        device_mesh = self.device_mesh
        return tuple(None if device_mesh is None else device_mesh.get_group(axis) for axis in range(len(self.sizes)))

    @cached_property
    def behind_groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The process groups of this rank along each axis for collectives in the background. A group runs its
        collectives one after the other, so collectives that compute waits for would queue behind gathers for later
        blocks. Therefore the axes `behind` have a second group of the same ranks (as with Megatron-LM's
        --create-all-gather-group)."""
        return (
            tuple(self._second.get(axis, group) for axis, group in enumerate(self.groups))
            if self.device_mesh is not None
            else self.groups
        )

    def group(self, axis: int, *, behind: bool = False) -> dist.ProcessGroup | None:
        """The process group of this rank along `axis`; with `behind`, the one for collectives in the background."""
        return (self.behind_groups if behind else self.groups)[axis]

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return device_here(self.device_type)

    def span(self, size: int, axes: Sequence[int]) -> tuple[int, int]:
        """`[start, stop)` of this rank's chunk of `size` cut by `axes`, major first."""
        start, stop = 0, size
        for axis in axes:
            first, last = chunk(stop - start, self.sizes[axis], self.coord[axis])
            start, stop = start + first, start + last
        return start, stop

    def local(self, size: int, axes: Sequence[int]) -> int:
        """The length of this rank's chunk of `size` cut by `axes`, major first."""
        start, stop = self.span(size, axes)
        return stop - start

    def even(self, name: str, size: int, axes: Sequence[int], why: str, *, parts: int = 1) -> None:
        """Raise RunError unless `size`, called `name`, divides by the ranks of `axes`, or by the `parts` that ranks and
        microbatches take of a batch. `why` names the operator that needs it."""
        ways = parts * math.prod(self.sizes[a] for a in axes)
        if size % ways:
            who = "parts that ranks and microbatches take of it" if parts > 1 else "ranks that cut it"
            raise RunError(
                f"{name} = {size} does not divide by the {ways} {who} on {self}, which {why} needs: it reshapes or "
                f"joins cut dims; use {' or '.join(map(str, _multiples(size, ways)))}, or plan for another mesh"
                f"{' or fewer microbatches' if parts > 1 else ''}"
            )

    def forget(self) -> None:
        """Drop the process groups."""
        self._world = None
        for name in ("device_mesh", "model_order", "coord", "groups", "behind_groups", "pipeline_group"):
            self.__dict__.pop(name, None)


def _multiples(size: int, of: int) -> list[int]:
    """The multiples of a number next to `size`."""
    return sorted({size // of * of or of, -(-size // of) * of})


def mesh_number(number: int) -> Mesh:
    """The mesh with that `number`: how compiled graphs, which hold ints only, refer to one."""
    return _MESHES[number]
