"""autopar: an automatic parallelizer for PyTorch.

    model = autopar.compile(model, cluster, example_inputs)

Names are imported on first use, so that `import autopar` is cheap and no import order matters.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_WHERE = {
    "compile": "autopar.api",
    "diff": "autopar.report.difference",
    "load": "autopar.api",
    "Compiled": "autopar.compiled",
    "Cluster": "autopar.cluster",
    "GradScaler": "autopar.runtime",
    "Plan": "autopar.plan",
    "AutoparError": "autopar.errors",
    "CaptureError": "autopar.errors",
    "InfeasibleError": "autopar.errors",
    "PlanError": "autopar.errors",
    "ClusterError": "autopar.errors",
    "LayoutError": "autopar.errors",
    "RuleError": "autopar.errors",
    "RunError": "autopar.errors",
}

__all__ = [
    "AutoparError",
    "CaptureError",
    "Cluster",
    "ClusterError",
    "Compiled",
    "GradScaler",
    "InfeasibleError",
    "LayoutError",
    "Plan",
    "PlanError",
    "RuleError",
    "RunError",
    "__version__",
    "compile",
    "diff",
    "load",
]

if TYPE_CHECKING:
    from autopar.api import compile, load
    from autopar.cluster import Cluster
    from autopar.compiled import Compiled
    from autopar.errors import (
        AutoparError,
        CaptureError,
        ClusterError,
        InfeasibleError,
        LayoutError,
        PlanError,
        RuleError,
        RunError,
    )
    from autopar.plan import Plan
    from autopar.report.difference import diff
    from autopar.runtime import GradScaler


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
