"""A plan as it runs, under torch.profiler, against what was predicted for it.

profile(case, steps) -> Profile     rows: an operator, a collective, the optimizer; seconds measured and predicted
label.py      the emitted source with a profiler range around each operator
record.py     on ranks: some steps, and some more under the profiler
attribute.py  from the profiler's events to seconds by operator and collective, forward and backward
predicted.py  the same from the simulation
refit.py      a cluster whose constants explain what was measured
"""

from __future__ import annotations

from autopar.profile.profile import Case, Profile, Row, profile
from autopar.profile.refit import refit

__all__ = ["Case", "Profile", "Row", "profile", "refit"]
