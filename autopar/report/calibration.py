"""A calibration for a person: each constant with how well it fits, and what was left out."""

from __future__ import annotations

from rich.console import Group, RenderableType

from autopar.calibrate import Calibration, Fit
from autopar.report.grid import grid
from autopar.text import seconds, three


def calibration(found: Calibration) -> Group:
    """The whole report."""
    table = grid(f"{found.cluster.label}, measured", "constant", "value", "samples", "mean error", "of")
    for fit in found.fits.found:
        table.add_row(
            fit.name, _value(fit), str(fit.samples), f"{100 * fit.error:.1f} %" if fit.samples > 2 else "-", fit.about
        )
    parts: list[RenderableType] = [table]
    if found.fits.rejected:
        parts += [
            "",
            f"{len(found.fits.rejected)} of {len(found.samples)} measurements make no sense and were left out:",
        ]
        parts += [f"  {each}" for each in found.fits.rejected]
    if found.fits.impossible:
        parts += ["", f"{len(found.fits.impossible)} constants come out as no machine has them and stay as they were:"]
        parts += [f"  {each}" for each in found.fits.impossible]
    return Group(*parts)


def _value(fit: Fit) -> str:
    if (fit.name.endswith("_s") and not fit.name.endswith("bytes_s")) or " on " in fit.name:
        return seconds(fit.value)
    if fit.name.endswith("bytes_s"):
        return f"{three(fit.value / 1e9)} GB/s"
    if "flops" in fit.name:
        return f"{three(fit.value / 1e9)} GFLOP/s"
    return f"{fit.value:.3g}"
