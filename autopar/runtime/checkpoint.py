"""State in and out of a sharded module, as whole tensors or as DTensor state dicts, always under original names and
with rows in original order (also where a parameter rests in sections)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch import local_of, maker_of
from autopar.errors import RunError
from autopar.layout import Layout, dim_of, is_placed, is_shard
from autopar.runtime.cuts import own
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import relayout
from autopar.runtime.params import Held, distribute
from autopar.runtime.state_copies import StateCopies

EXTRA = "_extra_state"
"""What torch calls the state of a module that is no tensor."""


@torch.no_grad()
def load_full(
    held: Iterable[Held],
    aliases: Mapping[str, str],
    state: Mapping[str, Tensor],
    mesh: Mesh,
    *,
    strict: bool,
    held_already: Container[str] = (),
    elsewhere: Iterable[str] = (),
) -> None:
    """Copy this rank's part of each whole tensor in `state` into `held`; no communication. Sparse tensors are made
    dense. Names in `held_already` may be missing from `state`; `elsewhere` names what other places of a pipeline hold.
    Values that are no tensors (extra state of modules) are ignored.

    Raises RunError when a name is missing, a shape differs or a tensor has no values, and with `strict` when a name is
    unknown; then nothing was copied.
    """
    if not isinstance(state, Mapping):
        raise RunError(f"state is a {type(state).__name__}; wanted a state dict of the model, whole tensors by name")
    held = list(held)
    names = {h.name: [h.name, *(alias for alias, name in aliases.items() if name == h.name)] for h in held}
    found = {h.name: next((state[n] for n in names[h.name] if n in state), None) for h in held}
    missing = [name for name, value in found.items() if value is None and name not in held_already]
    known = {*aliases, *elsewhere, *(n for ns in names.values() for n in ns)}
    unknown = (
        [name for name, value in state.items() if name not in known and isinstance(value, Tensor)] if strict else []
    )
    wrong = [
        f"{h.name}: got {_described(value)}, wanted {h.info.shape}"
        for h in held
        if (value := found[h.name]) is not None
        and (
            not isinstance(value, Tensor)
            or isinstance(value, DTensor)
            or value.is_meta
            or tuple(value.shape) != h.info.shape
        )
    ]
    if missing or unknown or wrong:
        raise _does_not_fit(missing, unknown, wrong)
    for h in held:
        value = found[h.name]
        if value is not None:
            dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
            h.local.copy_(own(dense, h.info.entries, mesh.sizes, mesh.coord))


def _does_not_fit(missing: Sequence[str], unknown: Sequence[str], wrong: Sequence[str]) -> RunError:
    """The error of a state dict with missing and unknown names, and values of wrong shapes."""
    found = "".join(
        f"; {what}: {', '.join(items[:5])}{' ...' if len(items) > 5 else ''}"
        for what, items in (("missing", missing), ("unknown", unknown), ("wrong shape", wrong))
        if items
    )
    return RunError(f"state dict does not fit the planned model{found}{_prefixed(missing, unknown)}")


def _prefixed(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """What to do where all names that are missing are there with one prefix in front (`module.`, `_orig_mod.`); else
    empty."""
    if not missing or not unknown:
        return ""
    prefix = next((name.removesuffix(missing[0]) for name in unknown if name.endswith(f".{missing[0]}")), "")
    if not prefix or not {prefix + name for name in missing} <= set(unknown):
        return ""
    return (
        f". The missing names are there with {prefix!r} in front, as wrappers make them: give "
        f"{{name.removeprefix({prefix!r}): value for name, value in state.items()}}"
    )


def _described(value: Any) -> str:
    """A value of a state dict, in words for an error."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if isinstance(value, DTensor):
        return "a DTensor, which load_state_dict() takes"
    return f"{tuple(value.shape)}{' on the meta device, without values' if value.is_meta else ''}"


@torch.no_grad()
def full_state_dict(held: Iterable[Held], aliases: Mapping[str, str], mesh: Mesh) -> dict[str, Tensor]:
    """Whole tensors on every rank, on the CPU; a collective operation. Tied names share one tensor."""
    found = {h.name: whole(h.local, h, mesh).cpu() for h in held if h.info.persistent}
    return found | {alias: found[name] for alias, name in aliases.items() if name in found}


def whole(local: Tensor, h: Held, mesh: Mesh) -> Tensor:
    """The whole tensor of which `local` is this rank's part, cut as `h` is (the parameter, its gradient, a moment of
    the optimizer); a collective operation."""
    out = relayout(local.detach().to(mesh.device), h.info.entries, ("R",) * len(mesh.sizes), h.info.shape, mesh, h.name)
    return out.clone() if out.data_ptr() == local.data_ptr() else out


def plain(layout: Layout) -> Layout:
    """`layout` without sections and placements (`O1`), which no DTensor placement can express: cut in order, or
    replicated."""
    return tuple(f"S{dim_of(e)}" if is_shard(e) else "R" if is_placed(e) else e for e in layout)


def unsection(local: Tensor, h: Held, mesh: Mesh) -> Tensor:
    """`local`, this rank's part of a parameter that rests in sections, as a DTensor with its rows in original order; a
    collective operation."""
    moved = relayout(local.detach().to(mesh.device), h.info.entries, plain(h.info.entries), h.info.shape, mesh, h.name)
    return distribute(moved.contiguous(), h.info.shape, plain(h.info.entries), mesh, model_order=True)


def install(
    module: nn.Module,
    held: Mapping[str, Held],
    aliases: Mapping[str, str],
    mesh: Mesh,
    copies: StateCopies,
    elsewhere: Iterable[str] = (),
) -> None:
    """Add hooks to `module` so that `state_dict` and `load_state_dict` have rows in original order, and loading takes
    whole tensors as well. On loading, extra state of the user's modules and entries of other places (`elsewhere`) are
    ignored. `copies` watches the values of other rows that `state_dict` gives."""
    table = dict(held) | {alias: held[name] for alias, name in aliases.items()}
    others = [name for name in dict.fromkeys(elsewhere) if name not in table]

    def saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for name, h in table.items():
            if h.info.sectioned and prefix + name in state:
                state[prefix + name] = copies.gave(name, unsection(local_of(state[prefix + name]), h, mesh))

    def loading(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        copies.loaded(name for name in table if prefix + name in state)
        for name, h in table.items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor):
                state[prefix + name] = at_rest(value, h, mesh)
        extra = [
            name
            for name, value in state.items()
            if not isinstance(value, Tensor) and name.startswith(prefix) and name.endswith(EXTRA)
        ]
        for name in (*extra, *(prefix + name for name in others if prefix + name in state)):
            del state[name]

    module.register_state_dict_post_hook(saved)
    module.register_load_state_dict_pre_hook(loading)


@torch.no_grad()
def at_rest(value: Tensor, h: Held, mesh: Mesh) -> Tensor:
    """What is loaded, a whole tensor or a DTensor in original order, as the parameter lies."""
    if not isinstance(h.tensor, DTensor):
        return value
    if not isinstance(value, DTensor):
        if tuple(value.shape) != h.info.shape:
            return value  # load_state_dict reports it with all the others
        local = own(value, h.info.entries, mesh.sizes, mesh.coord).contiguous().to(h.local.device)
        return distribute(local, h.info.shape, h.info.entries, mesh)
    _check_own(value, h)
    if h.info.sectioned:
        wanted = distribute(torch.empty_like(h.local), h.info.shape, plain(h.info.entries), mesh, model_order=True)
        assert isinstance(wanted, DTensor), "a mesh with DTensor parameters has a device mesh"
        check_order(value, h.name, mesh)
        if value.device_mesh != wanted.device_mesh:
            raise RunError(
                f"{h.name}: the loaded tensor lies on another mesh; load a state dict with whole tensors, or through "
                "torch.distributed.checkpoint into model.state_dict()"
            )
        local = relayout(
            value.redistribute(placements=wanted.placements).to_local(),
            plain(h.info.entries),
            h.info.entries,
            h.info.shape,
            mesh,
            h.name,
        )
    else:
        return value
    return distribute(local, h.info.shape, h.info.entries, mesh)


def check_order(value: DTensor, name: str, mesh: Mesh) -> None:
    """Raise RunError where `value`, of a weight that rests in another order than the model's, may be in that order:
    it was made of the parameter, or on its mesh, and not of what `state_dict()` gave."""
    if value.device_mesh == mesh.device_mesh:
        raise RunError(
            f"{name}: the weight rests in another order than the model's, and so does what is loaded if it was made of "
            "parameters() (an average of weights, the optimizer's own state). Copy it into the parameter "
            "(`param.data.copy_(value)` for each of named_parameters()), make it of what state_dict() or "
            "optimizer_state_dict() gives, or load whole tensors (load_full)"
        )


def part_of_another(value: DTensor) -> int | None:
    """The rank that wrote `value` into a file of its own, where this rank's part is another one: torch takes what is
    read for this rank's part. None where the parts are the same, as those of replicas are."""
    mesh, writer, here = value.device_mesh, maker_of(value.device_mesh), dist.get_rank()
    # in a pipeline a mesh that is read is that of this rank's place, wherever it was written
    there, own = ((mesh.mesh == rank).nonzero().tolist() for rank in (writer, here))
    cut = [axis for axis, placement in enumerate(value.placements) if placement.is_shard()]
    same = there and own and all(there[0][axis] == own[0][axis] for axis in cut)
    return None if same else writer


def _check_own(value: DTensor, h: Held) -> None:
    """Raise RunError where `value` is the part of another rank."""
    if (rank := part_of_another(value)) is not None:
        raise RunError(
            f"{h.name}: what is loaded is the part of rank {rank}, and this is rank {dist.get_rank()}. torch.save of "
            "state_dict() on one rank saves that rank's part alone: save model.full_state_dict(), called on all ranks, "
            "for load_full, or use torch.distributed.checkpoint"
        )
