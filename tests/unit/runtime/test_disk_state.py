"""Optimizer state in mapped files: the same numbers, and the bytes really are in the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.errors import RunError
from autopar.runtime.disk_state import keep_on_disk


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_steps(kind, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((5, 7), (3,), (2, 3, 4))]
    second = [nn.Parameter(p.detach().clone()) for p in first]
    plain, kept = kind(first), kind(second)
    keep_on_disk(kept, tmp_path / "state")
    for _ in range(4):
        for a, b in zip(first, second, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        plain.step()
        kept.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    files = sorted((tmp_path / "state").iterdir())
    state = [t for p in second for t in kept.state[p].values() if isinstance(t, torch.Tensor) and t.shape == p.shape]
    assert len(files) == len(state) > 0
    assert sum(f.stat().st_size for f in files) == sum(t.nbytes for t in state)
    name = "exp_avg" if "exp_avg" in kept.state[second[0]] else "momentum_buffer"
    on_disk = torch.frombuffer(bytearray((tmp_path / "state" / f"0.{name}").read_bytes()), dtype=dtype).view(5, 7)
    assert torch.equal(on_disk, plain.state[first[0]][name])


def test_what_is_not_on_the_host_is_refused(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.empty(4, device="meta"))
    parameter.grad = torch.empty(4, device="meta")
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    keep_on_disk(optimizer, tmp_path)
    with pytest.raises(RunError, match="is on meta: only state in the memory of the host"):
        optimizer.step()
