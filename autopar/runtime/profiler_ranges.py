"""What the runtime does, as ranges of torch.profiler; nothing outside of a profile.

autopar all_gather 0 4194304      a step of a reshard: kind, mesh axis, bytes that a group holds together
                                  (runtime.count)
autopar sync all_reduce 0         a collective for many gradients or leaves at once (runtime.coalesced)
"""

from __future__ import annotations

import contextlib

from torch.profiler import record_function

from autopar._torch import profiling

PREFIX = "autopar"


def mark(*what: object) -> contextlib.AbstractContextManager[object]:
    """A range called `what`, where a profile is being taken."""
    return record_function(" ".join(map(str, (PREFIX, *what)))) if profiling() else contextlib.nullcontext()
