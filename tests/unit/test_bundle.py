"""Saved folders: whole or not there, over an old one too; a folder that lacks something or does not fit is refused by
name."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import bundle
from autopar.bundle import Bundle
from autopar.errors import PlanError, RunError
from autopar.runtime import main
from models import mlp

FILES = ["README.md", "constants.pt", "plan.json", "sharded.py"]


@pytest.fixture(scope="module")
def bundles() -> dict[str, Bundle]:
    """Two plans of one model."""
    model, batch = mlp.tiny()
    return {recipe: autopar.compile(model, "cpu:1x2", batch, recipe=recipe).bundle for recipe in ("ddp", "tp")}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_saving_over_an_older_plan_replaces_its_files_and_nothing_else(
    bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    folder = bundles["ddp"].save(tmp_path / "plan")
    (folder / "results.csv").write_text("mine")
    (folder / "ckpt").mkdir()
    (folder / "ckpt" / "weights.pt").write_text("mine too")
    assert bundles["tp"].save(folder) == folder
    assert names(folder) == sorted([*FILES, "results.csv", "ckpt"]) and names(tmp_path) == ["plan"]
    assert (folder / "results.csv").read_text() == "mine" and (folder / "ckpt" / "weights.pt").read_text() == "mine too"
    again = Bundle.load(folder)
    assert again.plan == bundles["tp"].plan and again.source == bundles["tp"].source
    assert oct(folder.stat().st_mode & 0o777) == "0o755"


def test_a_program_that_is_no_text_is_refused_by_name(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    folder = bundles["ddp"].save(tmp_path / "plan")
    (folder / "sharded.py").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"sharded\.py of .*plan cannot be read .*save it again"):
        Bundle.load(folder)


def test_a_plan_file_among_other_files_gets_the_rest_of_its_bundle(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    bundles["ddp"].plan.save(tmp_path / "plan.json")
    (tmp_path / "model.py").write_text("mine")
    bundles["ddp"].save(tmp_path)
    assert names(tmp_path) == sorted([*FILES, "model.py"]) and Bundle.load(tmp_path).plan == bundles["ddp"].plan


@pytest.mark.parametrize("name", ["README.md", "sharded.py", "constants.pt"])
def test_files_of_a_bundles_names_that_are_of_none_are_kept(
    bundles: dict[str, Bundle], tmp_path: Path, name: str
) -> None:
    bundles["ddp"].plan.save(tmp_path / "plan.json")
    (tmp_path / name).write_text("mine")
    with pytest.raises(
        PlanError, match=rf"has {name} that is of no saved plan and would be replaced; name another folder"
    ):
        bundles["ddp"].save(tmp_path)
    assert (tmp_path / name).read_text() == "mine" and names(tmp_path) == sorted(["plan.json", name])


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_save_that_was_killed_leaves_nothing_that_is_taken_for_a_plan(
    bundles: dict[str, Bundle], tmp_path: Path, done: int
) -> None:
    """Every mixture that a reader can meet while the files are replaced one by one."""
    folder, newer = bundles["ddp"].save(tmp_path / "plan"), bundles["tp"].save(tmp_path / "newer")
    for name in bundle.FILES[:done]:
        os.replace(newer / name, folder / name)
    with pytest.raises(
        PlanError,
        match=rf"was emitted for plan {bundles['tp'].plan.digest}, but plan.json beside it is plan "
        rf"{bundles['ddp'].plan.digest}",
    ):
        autopar.load(folder)
    assert Bundle.load(bundles["tp"].save(folder)).plan == bundles["tp"].plan


def test_a_folder_that_another_process_made_meanwhile_is_filled(
    bundles: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Bundle._write

    def slow(self: Bundle, folder: Path, name: str) -> None:
        monkeypatch.undo()
        bundles["tp"].save(tmp_path / "plan")
        writes(self, folder, name)

    monkeypatch.setattr(Bundle, "_write", slow)
    assert Bundle.load(bundles["ddp"].save(tmp_path / "plan")).plan == bundles["ddp"].plan and names(tmp_path) == [
        "plan"
    ]


def test_constants_of_an_older_version_are_read(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    folder = bundles["ddp"].save(tmp_path / "plan")
    torch.save({"rope": torch.arange(3.0)}, folder / "constants.pt")
    assert Bundle.load(folder).constants["rope"].tolist() == [0, 1, 2]


def test_a_folder_that_cannot_be_written_is_named(bundles: dict[str, Bundle]) -> None:
    with pytest.raises(
        PlanError, match=r"^/proc/plan cannot be written: No such file or directory; name another folder$"
    ):
        bundles["ddp"].save(Path("/proc/plan"))


def test_an_empty_folder_is_filled(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    assert names(bundles["ddp"].save(tmp_path / "plan")) == FILES


def test_a_file_in_the_way_is_named_and_kept(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("a file")
    with pytest.raises(PlanError, match=r"plan is a file"):
        bundles["ddp"].save(tmp_path / "plan")
    assert (tmp_path / "plan").read_text() == "a file" and names(tmp_path) == ["plan"]


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_move_that_fails_leaves_the_older_plan(
    bundles: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    folder = bundles["ddp"].save(tmp_path / "plan")
    real, calls = os.replace, []

    def fails(source: object, target: object) -> None:
        calls.append(source)
        if len(calls) == step:
            raise OSError(28, "no space left")
        real(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr("autopar.bundle.os.replace", fails)
    with pytest.raises(PlanError, match=r"cannot be written: no space left; name another folder$"):
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
    wanted = (
        rf"sharded.py was emitted for plan {bundles['ddp'].plan.digest}, but plan.json beside it is plan "
        rf"{bundles['tp'].plan.digest}"
    )
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


def emitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The emitted file as a module."""
    spec = importlib.util.spec_from_file_location("sharded", folder / "sharded.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sharded", module)
    spec.loader.exec_module(module)
    return module


def test_the_emitted_program_refuses_constants_of_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = mlp.tiny()
    one, other = (autopar.compile(model, "cpu:1x1", batch, optimizer=optimizer) for optimizer in ("adamw", "sgd"))
    folder = one.save(tmp_path / "one")
    assert main(emitted(folder, monkeypatch).Model, []) > 0
    os.replace(other.save(tmp_path / "other") / "constants.pt", folder / "constants.pt")
    with pytest.raises(
        RunError,
        match=rf"constants.pt was emitted for plan {other.plan.digest}, but sharded.py beside it is plan "
        rf"{one.plan.digest}",
    ):
        main(emitted(folder, monkeypatch).Model, [])


def test_a_plan_for_inference_says_and_runs_a_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), torch.zeros(4, 8)
    for mode, said in (("inference", "one forward on random data"), ("train", "one training step on random data")):
        made = autopar.compile(
            body,
            "cpu:1x1",
            (x,) if mode == "inference" else (x, torch.zeros(4, 16)),
            mode=mode,
            loss_fn=None if mode == "inference" else F.mse_loss,
        )
        folder = made.save(tmp_path / mode)
        assert said in (folder / "README.md").read_text()
        main(emitted(folder, monkeypatch).Model, ["--steps", "2"])
        assert [line.split(",")[0].rstrip("0123456789.") for line in capsys.readouterr().out.splitlines()] == [
            f"step {n}: {'forward' if mode == 'inference' else 'loss '}" for n in range(2)
        ]
