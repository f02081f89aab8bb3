"""The command line without a model: usage, lists, errors, files."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from autopar import __version__
from autopar.calibrate import calibrate
from autopar.calibrate.run import LEAST_S, MOST_S
from autopar.cli import main
from autopar.cli.console import show, write_json
from autopar.errors import ClusterError
from tests.helpers.command import ROOT, autopar


def test_help_lists_every_command() -> None:
    done = autopar("--help", fresh=True)
    assert done.returncode == 0
    for name in (
        "plan",
        "emit",
        "run",
        "verify",
        "explain",
        "diff",
        "simulate",
        "memory",
        "profile",
        "calibrate",
        "recipes",
        "clusters",
    ):
        assert f"\n  {name} " in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2]  # what a command does was cut off in the middle


def test_the_version_is_that_of_the_package() -> None:
    done = autopar("--version")
    assert (done.returncode, done.stdout) == (0, f"autopar {__version__}, torch {torch.__version__}\n")


def test_help_tells_the_two_plans_of_diff_apart() -> None:
    done = autopar("diff", "--help")
    assert done.returncode == 0 and "{OLD} {NEW}" in done.stdout


def test_wrong_usage_is_exit_code_2() -> None:
    done = autopar("plan", fresh=True)
    assert done.returncode == 2 and "MODEL" in done.stderr and not done.stdout


@pytest.mark.parametrize("seconds", [LEAST_S / 2, MOST_S + 1, float("inf"), float("nan")])
def test_a_calibration_that_would_not_end_is_refused_before_it_begins(tmp_path: Path, seconds: float) -> None:
    done = autopar("calibrate", "-o", str(tmp_path / "c.toml"), "--ranks", "1", "--seconds", str(seconds))
    assert done.returncode == 2 and "--seconds" in done.stderr and not any(tmp_path.iterdir())
    with pytest.raises(ClusterError, match=r"a calibration of .* seconds; wanted 1 to 3600"):
        calibrate("cpu", 1, seconds=seconds)


def test_a_calibration_on_more_ranks_than_memory_holds_is_refused_before_it_begins(tmp_path: Path) -> None:
    """Each rank loads torch: they were all started, and the machine swapped or ended some."""
    done = autopar("calibrate", "-o", str(tmp_path / "c.toml"), "--device", "cpu", "--ranks", "100000")
    assert (
        done.returncode == 1
        and "a calibration on 100000 ranks takes 43945 GiB of memory" in done.stderr
        and "wanted at most" in done.stderr
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPUs")
def test_a_calibration_of_gpus_that_are_not_there_says_so(tmp_path: Path) -> None:
    """It was refused for 0 ranks, which nobody had asked for."""
    done = autopar("calibrate", "-o", str(tmp_path / "c.toml"), "--device", "cuda")
    assert done.returncode == 1 and "a calibration of 'cuda' devices; wanted cpu, or cuda on a machine" in done.stderr
    assert not any(tmp_path.iterdir())


def test_lists(tmp_path: Path) -> None:
    done = autopar("clusters", "--json", "-")
    names = [cluster["name"] for cluster in json.loads(done.stdout)]
    assert {"h100", "cpu"} <= set(names)
    table = autopar("clusters", fresh=True).stdout
    assert all(name in table for name in names)
    done = autopar("recipes", "--json", str(tmp_path / "recipes.json"))
    recipes = json.loads((tmp_path / "recipes.json").read_text())
    assert done.returncode == 0 and {"ddp", "zero3", "tp"} <= {recipe["name"] for recipe in recipes}
    assert all(recipe["name"] in done.stdout for recipe in recipes)


@pytest.mark.parametrize("arguments", ["clusters", "clusters --json -"])  # which need no torch
def test_a_stdout_that_takes_no_more_is_said(arguments: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m autopar {arguments} > /dev/full", shell=True, capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr.partition(";")[0]) == (
        1,
        "error: cannot write to stdout: No space left on device",
    )


def test_streams_that_are_closed_end_no_command(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m autopar clusters --json {tmp_path}/out.json >&- 2>&- <&-", shell=True, cwd=ROOT
    )
    assert done.returncode == 0 and json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))


def test_what_needs_no_torch_does_not_wait_for_it() -> None:
    look = (
        "import sys; from typer.testing import CliRunner; from autopar.cli.app import app; CliRunner().invoke(app, "
        "sys.argv[1:]); print('torch' in sys.modules)"
    )
    for command in ("--help", "clusters"):
        done = subprocess.run([sys.executable, "-c", look, command], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n", command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "hf:nowhere.json", "--cluster", "cpu:1x4"), "no Hugging Face config file nowhere.json"),
        (("plan", "models/mlp.py:nothing", "--cluster", "cpu:1x4"), "has no 'nothing'"),
        (("plan", "models/mlp.py:tiny", "--cluster", "abacus:1x4"), "there is no preset 'abacus'"),
        (
            ("plan", "models/mlp.py:tiny", "--cluster", "cpu:1x4", "--mesh", "two"),
            "mesh 'two': wanted sizes joined by x",
        ),
        (
            ("plan", "models/mlp.py:tiny", "--cluster", "cpu:1x4", "--precision", "int3"),
            "precision 'int3': wanted one of auto, float32",
        ),
        (("plan", "models/mlp.py:tiny", "--cluster", "cpu:1x4", "--precision", "bf17"), "(near: bf16)"),
        (("plan", "models/mlp.py:tiny", "--cluster", "A100:1x8"), "there is no preset 'A100'; known: a100-40, "),
        (("explain", "nowhere.json"), "cannot read plan nowhere.json"),
        (("emit", "README.md", "-o", "out"), "not a plan: the text is no JSON"),
        (("memory", "nowhere.json"), "cannot read plan nowhere.json"),
        (("memory", "README.md"), "README.md: not a plan: the text is no JSON"),
        (
            ("memory", "plan.json", "--batch", "8", "--cluster", "cpu:1x4", "--shown", "3"),
            "--cluster, --batch: plan.json is a plan, which has its own cluster, sizes",
        ),
        (("memory", "models/mlp.py:tiny", "--shown", "3"), "--shown: tensors are shown of the peak of a plan"),
        (
            ("memory", "models/mlp.py:tiny", "--cluster", "cpu:1x2", "--recipe", "fast"),
            "unknown recipe 'fast'; known are single, ddp",
        ),
        (("memory", "models/mlp.py"), "say which function makes the model: models/mlp.py:FUNCTION"),
        (("simulate", "docs"), "cannot read plan docs/plan.json: No such file or directory; wanted a file that"),
        (("simulate", "README.md"), "not a plan: the text is no JSON"),
        (("simulate", "README.md"), "error: README.md: not a plan"),
        (
            ("recipes", "--json", "/proc/out.json"),
            "cannot write /proc/out.json: No such file or directory; name another file",
        ),
        (
            ("plan", "models/mlp.py:tiny", "--cluster", "cpu:1x2", "-o", "-", "--json", "-"),
            "--output and --json are both -; wanted another file for --json",
        ),
        (("explain", "README.md", "--json", "docs/../README.md"), "PLAN and --json are both README.md; wanted another"),
        (
            ("plan", "hf:models/hf/tiny/gpt2.json", "--precision", "int3", "-o", "models/hf/tiny/gpt2.json"),
            "MODEL and --output are both gpt2.json; wanted another file for --output",
        ),
        (
            ("plan", "models/mlp.py:tiny", "--precision", "int3", "--json", "models/mlp.py"),
            "MODEL and --json are both mlp.py; wanted another file for --json",
        ),
        (("emit", "nowhere.json", "-o", "README.md"), "README.md is a file: name another folder"),
        (("simulate", "nowhere.json", "--trace", "docs"), "cannot write the trace to docs: it is a folder"),
    ],
)
def test_errors_are_one_message(arguments: tuple[str, ...], said: str) -> None:
    done = autopar(*arguments)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


@pytest.mark.parametrize("option", ["--recipe", "--optimizer"])
def test_memory_refuses_unknown_names_before_it_captures(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("the model is captured")

    monkeypatch.setattr("autopar.cli.fitting.capture_in", never)
    done = autopar("memory", "models/mlp.py:tiny", "--cluster", "cpu:1x2", option, "nonsense")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "'nonsense'" in done.stderr


def test_a_fresh_process_says_the_same() -> None:
    """Here with what is imported already, there without."""
    here, there = (
        autopar("plan", "models/mlp.py:nothing", "--cluster", "cpu:1x4", fresh=fresh) for fresh in (False, True)
    )
    assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    for arguments in (("--debug", "explain", "nowhere.json"), ("explain", "nowhere.json", "--debug")):
        done = autopar(*arguments)
        assert done.returncode == 1 and "Traceback" in done.stderr and "PlanError" in done.stderr


def _interrupted(
    arguments: tuple[str, ...], folder: Path, begun: Callable[[Path], bool]
) -> subprocess.CompletedProcess[str]:
    """A command whose whole group of processes has Ctrl-C as soon as it has `begun`, which looks at what it writes. It
    hears Ctrl-C as under a terminal: what a shell starts in the background ignores it, and so do its children."""
    out = folder / "out"
    with (
        out.open("w") as file,
        subprocess.Popen(
            [sys.executable, "-m", "autopar", *arguments],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        ) as child,
    ):
        try:
            deadline = time.monotonic() + 120
            while not begun(out) and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            os.killpg(child.pid, signal.SIGINT)
            _, said = child.communicate(timeout=60)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(arguments, child.returncode, out.read_text(), said)


def test_ctrl_c_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert (
        autopar("plan", "models/mlp.py:tiny", "--cluster", "cpu:1x2", "--recipe", "ddp", "-o", str(plan)).returncode
        == 0
    )
    done = _interrupted(
        ("run", str(plan), "--steps", "1000000", "--json", str(tmp_path / "run.json")),
        tmp_path,
        lambda out: "step 2:" in out.read_text(),
    )
    assert (done.returncode, done.stderr) == (
        130,
        "interrupted; no file is half-written\n",
    ) and "step 2:" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plan.json"]


@pytest.mark.parametrize(
    "where", ["autopar.cli.app.main", "autopar.cli.app.writable", "autopar.cli.lists.recipes_command"]
)
def test_an_interrupt_anywhere_in_a_command_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    monkeypatch.setattr("sys.argv", ["autopar", "recipes", "--json", "-"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted; no file is half-written\n"


def test_ctrl_c_is_heard_where_an_import_takes_any_error_for_a_missing_module(tmp_path: Path) -> None:
    (tmp_path / "lenient.py").write_text(
        "import time\nprint('begun', flush=True)\ntry:\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
    )
    code = (
        "import tempfile\nfrom autopar.cli.signals import exits\nwith exits():\n    kept = "
        "tempfile.TemporaryDirectory(dir='.')\n    import lenient\nprint('went on')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:."},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "begun\n"
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=30) == ("", "interrupted; no file is half-written\n")
    assert running.returncode == 130 and [
        path.name for path in tmp_path.iterdir() if not path.name.startswith("__")
    ] == ["lenient.py"]


def test_what_the_encoding_of_the_output_lacks_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(
        "autopar.cli.lists.recipes_command", lambda *_: show("gr\u00f6\u00dfe.weight \u2588 \udcff 1 s")
    )
    monkeypatch.setattr("sys.argv", ["autopar", "recipes"])
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit) as ended:
        main()
    sys.stdout.flush()
    assert not ended.value.code and written.getvalue() == b"gr??e.weight ? ? 1 s\n"


def test_json_is_whole_and_has_no_infinities(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    assert not write_json(str(path), {"gap": float("inf"), "rows": ({"a": float("nan")}, 1.5)})
    assert json.loads(path.read_text()) == {"gap": None, "rows": [{"a": None}, 1.5]}
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]
    assert not write_json(None, {})


def test_json_to_stdout_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert write_json("-", [1])
    assert json.loads(capsys.readouterr().out) == [1]


def test_a_plan_goes_to_stdout(tmp_path: Path) -> None:
    asked = ("plan", "models/mlp.py:tiny", "--cluster", "cpu:1x2", "--recipe", "ddp", "-o")
    done = autopar(*asked, "-")
    assert autopar(*asked, str(tmp_path / "plan.json")).returncode == done.returncode == 0
    assert done.stdout == (tmp_path / "plan.json").read_text() and not Path("-").exists()


def test_bytes_that_are_no_text_are_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b'{"model": "\xe9"}')
    done = autopar("simulate", str(tmp_path / "plan.json"))
    assert (
        done.returncode == 1 and "plan.json: byte 11 is no UTF-8 text" in done.stderr and "Traceback" not in done.stderr
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without CUDA")
def test_devices_that_are_not_there_are_said_before_anything_is_made() -> None:
    done = autopar("verify", "nowhere.json", "--device", "cuda")
    assert done.returncode == 1 and "torch finds no CUDA device on this machine; use --device cpu" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_leaves_no_temporary_folder(tmp_path: Path, number: signal.Signals) -> None:
    assert (
        autopar(
            "plan", "models/mlp.py:tiny", "--cluster", "cpu:1x2", "--recipe", "ddp", "-o", str(tmp_path / "plan.json")
        ).returncode
        == 0
    )
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "autopar", "run", str(tmp_path / "plan.json"), "--steps", "1000000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        # what nohup starts ignores SIGHUP
        preexec_fn=partial(signal.signal, number, signal.SIG_DFL),
    ) as running:
        assert running.stdout is not None
        assert "step 0" in running.stdout.readline() and list((tmp_path / "tmp").glob("autopar-*"))
        running.send_signal(number)
        assert running.wait(20) == 128 + number
    assert not list((tmp_path / "tmp").glob("autopar-*"))
