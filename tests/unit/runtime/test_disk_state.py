"""Optimizer state in mapped files: the same numbers, and the bytes really are in the files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from autopar.errors import RunError
from autopar.runtime.disk_state import keep_on_disk

SHAPES = ((5, 7), (3,), (2, 3, 4))
Kind = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def mapped(tensor: Tensor) -> int:
    """Bytes of the mapped file, which has no name any more, that the memory of `tensor` begins; 0 where it is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(address, 16) for address in line.split()[0].split("-"))
        if start == tensor.data_ptr():
            return stop - start if line.split()[1] == "rw-s" and line.endswith("(deleted)") else 0
    return 0


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.randn_like(param)
    optimizer.step()


def state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Its state that is shaped as its parameter, in the order of parameters and keys."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [
        value
        for p in params
        for _, value in sorted(optimizer.state[p].items())
        if isinstance(value, Tensor) and value.shape == p.shape and value.dim()
    ]


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_steps(kind: Kind, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    second = [nn.Parameter(p.detach().clone()) for p in first]
    plain, kept = kind(first), kind(second)
    keep_on_disk(kept, tmp_path / "state")
    for number in range(4):
        step(plain, number)
        step(kept, number)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for right, found in zip(state(plain), state(kept), strict=True):
        name = found.untyped_storage().filename
        assert (
            torch.equal(found, right)
            and mapped(found) >= found.nbytes
            and name is not None
            and Path(name).parent == tmp_path / "state"
        )
    assert state(kept) and not list((tmp_path / "state").iterdir())


def models(count: int) -> list[nn.ParameterList]:
    torch.manual_seed(0)
    return [nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES) for _ in range(count)]


def several(optimizers: list[torch.optim.Optimizer]) -> None:
    for number, optimizer in enumerate(optimizers):
        step(optimizer, number)


def forgotten(optimizers: list[torch.optim.Optimizer]) -> None:
    """The state of one parameter begins anew."""
    del optimizers[0].state[optimizers[0].param_groups[0]["params"][0]]


def changed(optimizers: list[torch.optim.Optimizer]) -> None:
    """A parameter in front goes, another one comes."""
    kept = optimizers[0].param_groups[0]["params"]
    del kept[0]
    kept.append(nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize("between", [several, forgotten, changed])
def test_no_state_is_in_the_file_of_another(
    between: Callable[[list[torch.optim.Optimizer]], None], tmp_path: Path
) -> None:
    """Of other optimizers and ranks that have the same folder, or of parameters that had state before."""
    plain, kept = ([torch.optim.AdamW(model.parameters(), lr=0.1) for model in models(2)] for _ in range(2))
    for optimizer in kept:
        keep_on_disk(optimizer, tmp_path)
    for optimizers in (plain, kept):
        for _ in range(2):
            several(optimizers)
            between(optimizers)
            several(optimizers)
    for a, b in zip(plain, kept, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(state(a), state(b), strict=True)) and all(map(mapped, state(b)))


def test_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    """Into the state that torch makes for it by a step, as `load_optimizer_state_dict` does: that of the new optimizer
    is in files too, and so is what is loaded."""
    first, second = models(1)[0], models(1)[0]
    before, after = torch.optim.AdamW(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters(), lr=0.1)
    for optimizer in (before, after):
        keep_on_disk(optimizer, tmp_path)
    step(before, 1)
    saved = copy.deepcopy(get_optimizer_state_dict(first, before))
    made = get_optimizer_state_dict(second, after)
    after.state.clear()
    for name, values in made["state"].items():  # in place, as torch.distributed.checkpoint reads
        for key, value in values.items():
            value.copy_(saved["state"][name][key])
    set_optimizer_state_dict(second, after, made)
    assert all(torch.equal(x, y) for x, y in zip(state(before), state(after), strict=True))
    step(before, 2)
    step(after, 2)
    assert all(torch.equal(x, y) for x, y in zip(state(before), state(after), strict=True)) and all(
        map(mapped, state(after))
    )


def test_what_is_not_on_the_host_is_refused(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.empty(4, device="meta"))
    parameter.grad = torch.empty(4, device="meta")
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    keep_on_disk(optimizer, tmp_path)
    with pytest.raises(RunError, match="is on meta: only state in the memory of the host"):
        optimizer.step()
