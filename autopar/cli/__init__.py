"""The command line: `autopar plan | emit | run | verify | explain | simulate | memory | profile | calibrate | recipes | clusters`.

    app.py       what each command takes (imports no torch, so that help is quick)
    console.py   output, progress, errors, files
    rebuild.py   from a plan file back to the model that it was made for
    planning.py, emitting.py, running.py, verifying.py, explaining.py, simulating.py, fitting.py, lists.py   one command each
"""

from autopar.cli.app import main

__all__ = ["main"]
