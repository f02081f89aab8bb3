"""Operators that an emitted program calls and torch does not have."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import RunError
from autopar.runtime import registered


@torch.library.custom_op("autopar_registered::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    """What it is given, as it is."""
    return x.clone()


def test_what_is_there_is_there():
    registered({"autopar_registered.same.default": "", "aten.add.Tensor": "torch"})


@pytest.mark.parametrize(
    ("name", "module", "said"),
    [
        ("autopar_registered.other.default", "mylib.ops", "import mylib.ops, which registers it"),
        ("autopar_registered.same.out", "", "load the library, that registers it"),
        ("autopar_nobody.same.default", "", "operator autopar_nobody.same.default, which nothing has registered"),
    ],
)
def test_what_is_missing_is_named(name, module, said):
    with pytest.raises(RunError) as caught:
        registered({name: module})
    assert said in str(caught.value)
