"""This machine measured: the constants of the cost model, from runs of a minute.

    calibrate("cpu", ranks=4) -> Calibration     a Cluster, how well it fits, what was left out
    clock.py            how long a run takes while all ranks do the same
    cold_operands.py    operands that other work has pushed out of the caches, as in a step
    machine.py          what one rank does: matmuls, memory, arithmetic, attention, starting operators, the optimizer
    network.py          what ranks do together: collectives by size and number of members
    samples.py          what was measured, and what of it makes no sense
    nonnegative_fit.py  robust fits of constants that cannot be negative
    fit_device.py       samples -> Device
    fit_level.py        samples -> Level
    write.py            Cluster -> TOML

What is not measured (the memory's usable share, a GPU's peak) comes from the preset of the device.
"""

from __future__ import annotations

from autopar.calibrate.clock import Clock
from autopar.calibrate.fits import Fit, Fits
from autopar.calibrate.run import Calibration, calibrate, cores_here, fitted, here, taken
from autopar.calibrate.samples import Rejected, Sample
from autopar.calibrate.write import write

__all__ = [
    "Calibration",
    "Clock",
    "Fit",
    "Fits",
    "Rejected",
    "Sample",
    "calibrate",
    "cores_here",
    "fitted",
    "here",
    "taken",
    "write",
]
