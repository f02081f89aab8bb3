"""The cluster file: it reads back as it was, and an interruption leaves the old one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.calibrate import write
from autopar.calibrate.write import text
from autopar.cli import calibrating
from autopar.cluster import Cluster, presets
from autopar.errors import ClusterError

from .made import machine


@pytest.mark.parametrize("name", presets())
def test_every_preset_reads_back(name: str, tmp_path: Path) -> None:
    cluster = Cluster.parse(f"{name}:2x4")
    write(cluster, tmp_path / "c.toml", "about it")
    assert (
        Cluster.parse(tmp_path / "c.toml") == cluster
        and Cluster.parse(tmp_path / "c.toml").to_dict() == cluster.to_dict()
    )
    assert (tmp_path / "c.toml").read_text().startswith("# about it\n")


def test_a_measured_one_reads_back(tmp_path: Path) -> None:
    write(machine(), tmp_path / "c.toml")
    assert Cluster.parse(tmp_path / "c.toml").to_dict() == machine().to_dict()
    assert 'name = "known"' in text(machine())


@pytest.mark.parametrize("name", ["\U0001f680 \u00e9", 'a "b" \\ c', "a\nb\t\x7f\x00", "\u2028"])
def test_names_of_any_characters_read_back(name: str, tmp_path: Path) -> None:
    known = machine()
    named = replace(
        known,
        name=name,
        device=replace(known.device, sources={name: name, "peak_flops": "a", "peak_flops.float32": "b", "": "c"}),
    )
    write(named, tmp_path / "c.toml")
    assert Cluster.parse(tmp_path / "c.toml").to_dict() == named.to_dict()


def test_interrupted_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.toml"
    write(machine(), path)
    before = path.read_bytes()

    def interrupted(*_: object, progress: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrating, "calibrate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrating.calibrate_command(path, "cpu", 2, 1.0, None)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "name, device, message",
    [
        ("c.json", "cpu", "ends in .toml"),
        ("c.toml", "tpu", "wanted cpu or cuda"),
        ("file/c.toml", "cpu", "cannot be written to"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(
    name: str, device: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrating, "calibrate", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=message):
        calibrating.calibrate_command(tmp_path / name, device, 2, 1.0, None)
