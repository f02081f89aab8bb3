"""The command line as a process: a fresh one, or a fork of this one, which has torch in memory already (seconds
less)."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import torch
from typer.testing import CliRunner

from autopar.cli import main
from autopar.cli.app import app
from autopar.runtime.launch import _die_with

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0


def autopar(*arguments: str, cwd: Path = ROOT, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `autopar *arguments` in `cwd`, with what it wrote and its exit code. A `fresh` process has nothing
    imported."""
    if not fresh:
        _imported()
        return forked(partial(_called, arguments), cwd)
    return subprocess.run(
        [sys.executable, "-m", "autopar", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def forked(body: Callable[[], Any], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Call `body` in a fork of this process, in `cwd`, with what it wrote and its exit code."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = multiprocessing.get_context("fork").Process(target=_inside, args=(body, cwd, out, err, os.getpid()))
        child.start()
        child.join(TIMEOUT_S)
        late = child.is_alive()
        if late:
            child.kill()
            child.join()
        said = [(stream.seek(0), stream.read())[1] for stream in (out, err)]
    assert not late, f"{body} was not done after {TIMEOUT_S:g} s: {said}"
    return subprocess.CompletedProcess(str(body), child.exitcode or 0, *said)


@cache
def _imported() -> None:
    """Import here what commands import when they run: each fork would do so again, which takes longer than most
    commands."""
    CliRunner().invoke(app, ["plan", f"{ROOT}/models/mlp.py:tiny", "--cluster", "cpu:1x1", "--recipe", "single"])


def _inside(body: Callable[[], Any], cwd: Path, out: IO[str], err: IO[str], parent: int) -> None:
    """What the fork does; multiprocessing ends it with the exit code, or the traceback, that `body` leaves."""
    _die_with(parent)
    torch.set_num_threads(1)
    os.chdir(cwd)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    body()


def _called(arguments: tuple[str, ...]) -> None:
    sys.argv = ["autopar", *arguments]
    main()
