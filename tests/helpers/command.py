"""The command line as a process: a fresh one, or a fork of this one, which has torch in memory already (seconds
less)."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import torch

from autopar.runtime.launch import _die_with

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0


def autopar(*arguments: str, cwd: Path = ROOT, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `autopar *arguments` in `cwd`, with what it wrote and its exit code. A `fresh` process has nothing
    imported."""
    if fresh:
        return subprocess.run(
            [sys.executable, "-m", "autopar", *arguments],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = multiprocessing.get_context("fork").Process(
            target=_command, args=(arguments, cwd, out, err, os.getpid())
        )
        child.start()
        child.join(TIMEOUT_S)
        late = child.is_alive()
        if late:
            child.kill()
            child.join()
        said = [(stream.seek(0), stream.read())[1] for stream in (out, err)]
    assert not late, f"autopar {' '.join(arguments)} was not done after {TIMEOUT_S:g} s: {said}"
    return subprocess.CompletedProcess(arguments, child.exitcode or 0, *said)


def _command(arguments: tuple[str, ...], cwd: Path, out: IO[str], err: IO[str], parent: int) -> None:
    """What the fork does; multiprocessing ends it with the exit code, or the traceback, that `main` leaves."""
    _die_with(parent)
    torch.set_num_threads(1)
    os.chdir(cwd)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["autopar", *arguments]
    from autopar.cli import main

    main()
