"""The tensors in arguments and results."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import torch
from transformers.modeling_outputs import BaseModelOutput

from autopar.capture.leaves import tensors_of

Pair = namedtuple("Pair", ("left", "right"))


def test_tensors_are_found_in_every_container_in_the_order_of_leaves() -> None:
    a, b, c, d, e = (torch.empty(()) for _ in range(5))
    w = torch.nn.Parameter(torch.empty(()))
    tree = (a, [1, None, slice(2), {"y": Pair(b, [c]), "x": w}], OrderedDict(k=(d, "text")), BaseModelOutput(e))
    assert [id(found) for found in tensors_of(tree)] == [id(one) for one in (a, b, c, w, d, e)]
    assert [id(found) for found in tensors_of(a)] == [id(a)]
    assert tensors_of((1, "text", torch.float32)) == []
