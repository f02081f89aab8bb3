"""What sums of gradients over places take: in the dtype that gradients add up in, over the link of the host where they
rest there."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cluster import Cluster
from autopar.pipeline.shared_weights import Shared, shared_weights
from autopar.pipeline.stage_views import views
from autopar.plan import Plan
from autopar.problem.read_graph import read
from autopar.runtime import places
from autopar.runtime.params import Held, Param
from tests.helpers.verify import by_stages, subject


def _shared(plan: Plan, dtype: torch.dtype = torch.float32) -> Shared:
    """The tied table of a GPT-2 that is computed with in `dtype`."""
    who = subject("hf-gpt2")
    program = read(who.captured.gm, plan.hints, training=True)
    program.ops.update({op.name: replace(op, out_dtypes=(dtype,)) for op in program.ops.values() if op.role == "param"})
    (found,) = shared_weights(
        program, plan, views(program, plan), Cluster.from_dict(dict(plan.cluster)).places(plan.places, plan.mesh)
    )
    return found


def test_bytes_are_those_of_gradients_and_the_host_is_paid_for() -> None:
    plan = by_stages(subject("hf-gpt2"), (1,), "single", 2, 4, "1f1b")
    plain = _shared(plan)
    assert _shared(replace(plan, precision="bf16"), torch.bfloat16) == plain  # summed in float32
    assert _shared(replace(plan, offload="optimizer")) == plain
    link_bytes_s = Cluster.from_dict(dict(plan.cluster)).device.host_link_bytes_s
    assert _shared(replace(plan, offload="parameters")).seconds - plain.seconds == pytest.approx(
        2 * plain.nbytes / link_bytes_s
    )


class _Talked(Exception):
    """Ranks would talk now."""


def test_ranks_talk_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no tensor of the host. (A device without a backend stands for an accelerator.)"""

    def all_reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        raise _Talked(str(tensor.device))

    monkeypatch.setattr(places.dist, "all_reduce", all_reduce)
    weight = nn.Parameter(torch.ones(2))
    held = Held("w", Param((2,), "float32", "R", host=True), OrderedDict(w=weight), "w", [], torch.ones(2))
    group: Any = None
    with (
        pytest.raises(_Talked, match="meta"),
        places.Shared(("w",), group, True, torch.device("meta")).summing({"w": held}),
    ):
        weight.grad = torch.ones(2)
