"""The Python blocks of README.md and docs/ run, and say nothing untrue about the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """All blocks of a page, one after the other, in one fresh interpreter."""
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_the_cluster_files_of_the_docs_are_some(tmp_path: Path) -> None:
    from autopar import Cluster

    found = []
    for text in blocks(ROOT / "docs" / "clusters.md", "toml"):
        (tmp_path / "ours.toml").write_text(text)
        found.append(Cluster.parse(tmp_path / "ours.toml"))
    one, parts = found
    assert one.label == "ours:4x8" and one.levels[0].bandwidth_bytes_s == 25e9
    assert parts.label == "ours" and [part.devices for part in parts.parts] == [16, 16] and parts.parts[1].device.usable_memory == 0.85


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_options_in_the_pages_exist() -> None:
    """Every --option of the pages is one of the command line; what stands before `autopar` is for torchrun."""
    from typer.main import get_command

    from autopar.cli.app import app

    group = get_command(app)
    known = {name for command in (group, *group.commands.values()) for option in command.params for name in option.opts}
    for page in (ROOT / "README.md", ROOT / "docs" / "cli.md", ROOT / "docs" / "clusters.md"):
        own = re.sub(r"torchrun .*?(?=autopar )", "", page.read_text())
        named = set(re.findall(r"(?<=[\s`\[])--[a-z][a-z-]*", own))
        assert named <= known, f"{page.name}: {named - known}"


def test_the_demo_runs_on_a_small_model() -> None:
    done = subprocess.run([sys.executable, "examples/demo.py", f"{ROOT}/models/mlp.py:tiny"], cwd=ROOT, capture_output=True,
                          text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr + done.stdout
    assert "All values agree with the single device" in done.stdout
    assert done.stdout.count("gloo ranks: ") == 2 and "strategy         ddp" in done.stdout


def test_the_tests_that_hold_the_traps_exist() -> None:
    """docs/torch-traps.md names files under tests/, and tests in them by the beginning of their name."""
    for entry in re.findall(r"`((?:dist|unit)/[^`]+)`(?:, `(::[^`]+)`)?", (ROOT / "docs" / "torch-traps.md").read_text()):
        path, _, name = entry[0].partition("::")
        text = (ROOT / "tests" / path).read_text()
        for wanted in filter(None, (name, entry[1].removeprefix("::"))):
            assert f"def {wanted.removesuffix('...')}" in text, f"{path} has no test {wanted}"
