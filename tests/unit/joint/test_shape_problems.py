"""The Problems of a shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from autopar.joint import shape_problems
from autopar.joint.shape_problems import Models


def test_costs_are_of_what_happens_once_per_step_in_the_same_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """With state on the host the same choices take another update."""
    monkeypatch.setattr(shape_problems, "costs", lambda program, micro, once, choice, forward, apart: [once, choice])
    micro: Any = type("Micro", (), {"links": [type("Link", (), {"program": None})]})
    once, forward = cast(Any, "on devices"), cast(Any, None)
    devices: Any = Models(micro, once, forward)
    assert devices.plain_costs((0,), apart=True) == ["on devices", (0,)]
    assert devices.plain_costs((0,), apart=True) is devices.plain_costs((0,), apart=True)
    assert replace(devices, once="on hosts").plain_costs((0,), apart=True) == ["on hosts", (0,)]
