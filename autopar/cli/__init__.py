"""The command line: `autopar plan | emit | run | verify | explain | diff | simulate | memory | profile | calibrate |
recipes | clusters`.

    app.py       what each command takes (imports no torch, so that help is quick)
    command.py   what all of them have in common: examples, and a check of the files that they write
    console.py   output, progress, errors, files
    signals.py   Ctrl-C and other ends
    rebuild.py   from a plan file back to the model that it was made for
    planning.py, emitting.py, running.py, verifying.py, explaining.py, differing.py, simulating.py, fitting.py,
    profiling.py,
    calibrating.py, lists.py, presets.py   one command each
"""

import os
import sys

from autopar.cli.signals import exits

__all__ = ["main"]


def main() -> None:
    """The console script. Errors of autopar end as one message on stderr and exit code 1, usage errors with 2, Ctrl-C
    with 130."""
    _open()
    with exits():
        from autopar.cli.app import main as run  # here: it takes a second, in which Ctrl-C is heard too

        run()


def _open() -> None:
    """Open os.devnull in place of standard streams that the caller has closed. Otherwise files that a command opens
    would get their file descriptors, and everything that is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  it is open as long as the process
