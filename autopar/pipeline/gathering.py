"""When the leaves of a stage are gathered that are gathered once per step (runtime.leaves): those of each block while
the block before it runs in the first forward, those of its first block while its place does what comes before: from the
last block of the stage before it on, in the first forward of that, or from the begin of the step. Until they are there
compute has the share 1 - contention of the device, and the stage cannot begin.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gathering:
    """The gathers of a stage.

    longer_s     by which its first forward takes longer, as leaves are gathered and copied beside it
    ahead_s      seconds of those that come before
    block_s      seconds of its own last block, and of what comes behind that, in a forward
    contention   the share of the device that they take from compute
    """

    longer_s: float = 0.0
    ahead_s: float = 0.0
    block_s: float = 0.0
    contention: float = 0.0


NOTHING = Gathering()
