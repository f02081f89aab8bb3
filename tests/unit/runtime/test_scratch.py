"""Temporary folders: those of a process that was killed go with the next one; those that are in use, or are none of
ours, stay."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from autopar.runtime.scratch import Scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary ones."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed() -> Path:
    """The folder of a process that was killed."""
    end, there = os.pipe()
    child = os.fork()
    if not child:
        made = Scratch()
        os.write(there, made.name.encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(there)
    os.waitpid(child, 0)
    with os.fdopen(end, "rb") as said:
        return Path(said.read().decode())


def test_what_a_killed_process_left_goes_with_the_next(temporary: Path) -> None:
    left = killed()
    (left / "store").write_text("x")
    assert left.is_dir()
    with Scratch() as mine:
        assert [str(path) for path in temporary.iterdir()] == [mine]
    assert not list(temporary.iterdir())


def test_what_is_held_or_none_of_ours_stays(temporary: Path) -> None:
    kept = [temporary / name for name in ("autopar-being-made", "autopar-file", "autopar-link", "mine")]
    kept[0].mkdir()
    kept[1].write_text("x")
    kept[3].mkdir()
    (kept[3] / "held.lock").write_text("")
    kept[2].symlink_to(kept[3])
    with Scratch() as one, Scratch() as other:
        assert Path(one).is_dir() and Path(other).is_dir()
    assert sorted(temporary.iterdir()) == sorted(kept) and (kept[3] / "held.lock").exists()


def test_a_fork_holds_the_folder_of_its_parent() -> None:
    end, there = os.pipe()
    child = os.fork()
    if not child:
        made = Scratch()
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(there, f"{os.getpid()} {made.name}".encode())
        os.close(there)
        signal.pause()
    os.close(there)
    os.waitpid(child, 0)
    with os.fdopen(end, "rb") as said:
        fork, _, left = said.read().decode().partition(" ")
    try:
        with Scratch():
            assert Path(left).is_dir()
    finally:
        os.kill(int(fork), signal.SIGKILL)
