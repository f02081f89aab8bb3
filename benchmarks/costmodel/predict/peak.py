"""The peak of the memory of a *given* configuration: its plan, walked with the habits of the software that runs it."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.cluster import Cluster
from autopar.memory import Prediction, predict
from benchmarks.costmodel.predict.given import given_plan
from benchmarks.costmodel.predict.setup import Setup

MIXED, PURE = "bf16", "bfloat16"
"""Mixed precision: computed in 16 bits, with masters and optimizer state of 32; and all in 16. float16 takes as many
bytes as bfloat16."""


def peak(gm: fx.GraphModule, setup: Setup, cluster: Cluster) -> Prediction:
    """Bytes at the peak of each place under `setup`, computed in 16 bits. `gm` was captured in bfloat16 with all its
    blocks.

    Raises PlanError where the configuration cannot be planned.
    """
    given = given_plan(gm, setup, cluster, MIXED if setup.software.masters else PURE)
    habits = replace(setup.software.habits, gradient_bytes=setup.software.gradient_bytes)
    return predict(given.program, given.plan, habits)
