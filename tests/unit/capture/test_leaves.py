"""The tensors in arguments and results, and what is asked of them past modes."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutput

from autopar._torch import memory_of
from autopar.capture._torch import fakes_past_modes
from autopar.capture.leaves import tensors_of

Pair = namedtuple("Pair", ("left", "right"))


def test_tensors_are_found_in_every_container_in_the_order_of_leaves() -> None:
    a, b, c, d, e = (torch.empty(()) for _ in range(5))
    w = torch.nn.Parameter(torch.empty(()))
    tree = (a, [1, None, slice(2), {"y": Pair(b, [c]), "x": w}], OrderedDict(k=(d, "text")), BaseModelOutput(e))
    assert [id(found) for found in tensors_of(tree)] == [id(one) for one in (a, b, c, w, d, e)]
    assert [id(found) for found in tensors_of(a)] == [id(a)]
    assert tensors_of((1, "text", torch.float32)) == []


class Counting(TorchFunctionMode):
    """How many functions and attributes of tensors are seen."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_modes_do_not_see_what_capture_itself_asks_of_tensors() -> None:
    """Of each weight they saw ten times as much as a model does with it."""

    def exported(how: AbstractContextManager[None]) -> int:
        with how, Counting() as counting:
            torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(4, 2),), strict=False)
        return counting.seen

    assert exported(fakes_past_modes()) < 0.7 * exported(nullcontext())
    tensor = torch.empty(())
    with Counting() as counting:
        memory_of(tensor)
    assert counting.seen == 0
