"""Saved folders: whole or not there, over an old one too; a folder that lacks something or does not fit is refused by name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.bundle import Bundle
from autopar.errors import PlanError
from models import mlp

FILES = ["README.md", "constants.pt", "plan.json", "sharded.py"]


@pytest.fixture(scope="module")
def bundles() -> dict[str, Bundle]:
    """Two plans of one model."""
    model, batch = mlp.tiny()
    return {recipe: autopar.compile(model, "cpu:1x2", batch, recipe=recipe).bundle for recipe in ("ddp", "tp")}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_saving_over_an_older_plan_replaces_it(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    folder = bundles["ddp"].save(tmp_path / "plan")
    (folder / "left-over.txt").write_text("of the older one")
    assert bundles["tp"].save(folder) == folder
    assert names(folder) == FILES and names(tmp_path) == ["plan"]
    again = Bundle.load(folder)
    assert again.plan == bundles["tp"].plan and again.source == bundles["tp"].source
    assert oct(folder.stat().st_mode & 0o777) == "0o755"


def test_an_empty_folder_is_filled(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    assert names(bundles["ddp"].save(tmp_path / "plan")) == FILES


def test_a_file_in_the_way_is_named_and_kept(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("a file")
    with pytest.raises(PlanError, match=r"plan is a file"):
        bundles["ddp"].save(tmp_path / "plan")
    assert (tmp_path / "plan").read_text() == "a file" and names(tmp_path) == ["plan"]


@pytest.mark.parametrize("step", ["replace", "rename"])
def test_a_move_that_fails_leaves_the_older_plan(bundles: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    folder = bundles["ddp"].save(tmp_path / "plan")
    real, calls = os.replace, []

    def fails(source: object, target: object) -> None:
        calls.append(source)
        if len(calls) == (1 if step == "rename" else 2):
            raise OSError("no space left")
        real(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr("autopar.bundle.os.replace", fails)
    with pytest.raises(OSError, match="no space left"):
        bundles["tp"].save(folder)
    monkeypatch.undo()
    assert Bundle.load(folder).plan == bundles["ddp"].plan and names(tmp_path) == ["plan"]


@pytest.mark.parametrize("name", ["constants.pt", "plan.json", "sharded.py"])
def test_a_missing_file_is_named(bundles: dict[str, Bundle], tmp_path: Path, name: str) -> None:
    folder = bundles["ddp"].save(tmp_path / "plan")
    (folder / name).unlink()
    with pytest.raises(PlanError, match=rf"plan is no saved plan: {name} missing; save one with Compiled.save"):
        autopar.load(folder)


@pytest.mark.parametrize("data", [b"", b"not a zip", b"PK\x03\x04 cut short"], ids=["empty", "nonsense", "cut"])
def test_constants_that_cannot_be_read_are_named(bundles: dict[str, Bundle], tmp_path: Path, data: bytes) -> None:
    folder = bundles["ddp"].save(tmp_path / "plan")
    (folder / "constants.pt").write_bytes(data)
    with pytest.raises(PlanError, match=r"constants.pt of .*plan cannot be read \(.*\): save it again"):
        autopar.load(folder)


def test_constants_are_tensors_only(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    """Nothing that a folder holds is executed when it is read."""
    folder = bundles["ddp"].save(tmp_path / "plan")
    torch.save({"x": Evil()}, folder / "constants.pt")
    with pytest.raises(PlanError, match=r"constants.pt .*cannot be read"):
        autopar.load(folder)


class Evil:
    """Would run a command when unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("false",)


def test_a_plan_that_is_not_the_sources_is_refused(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    folder = bundles["ddp"].save(tmp_path / "plan")
    bundles["tp"].plan.save(folder / "plan.json")
    wanted = rf"sharded.py was emitted for plan {bundles['ddp'].plan.digest}, but plan.json beside it is plan {bundles['tp'].plan.digest}"
    with pytest.raises(PlanError, match=wanted):
        autopar.load(folder)


def test_constants_come_back(tmp_path: Path, bundles: dict[str, Bundle]) -> None:
    made = replace(bundles["ddp"], constants={"rope": torch.arange(3.0), "flag": torch.tensor([True])})
    again = Bundle.load(made.save(tmp_path / "plan"))
    assert {n: t.tolist() for n, t in again.constants.items()} == {"rope": [0, 1, 2], "flag": [True]}


def test_tracebacks_show_the_lines_of_the_source(bundles: dict[str, Bundle]) -> None:
    import traceback

    broken = replace(bundles["ddp"], source="def f():\n    return 1 / 0  # here\n")
    with pytest.raises(ZeroDivisionError) as caught:
        broken.namespace()["f"]()
    assert "return 1 / 0  # here" in "".join(traceback.format_exception(caught.value))
