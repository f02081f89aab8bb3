"""Bad input at the command line: one message that names what, where and what to do; exit code 1; no file is written, no
rank is left."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from autopar.cli.app import main
from tests.helpers.bad_models import CLUSTER, MODELS
from tests.helpers.captures import captured_once
from tests.helpers.tiny import TINY


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of models."""
    (tmp_path / "net.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command line in this process; its exit code."""
    monkeypatch.setattr("sys.argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def planned(here: Path, monkeypatch: pytest.MonkeyPatch, *more: str, model: str = "net.py:good") -> Path:
    with captured_once((__name__, model, *more)):  # each test writes the same file of models
        assert run(monkeypatch, "plan", model, "--cluster", "cpu:1x2", "--recipe", "ddp", "-o", "plan.json", *more) == 0
    return here / "plan.json"


def refused(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must fail and leave the folder as it was."""
    capsys.readouterr()
    before = {p: p.read_bytes() for p in here.rglob("*") if p.is_file() and "__pycache__" not in str(p)}
    living = {child.pid for child in multiprocessing.active_children()}  # ranks that other tests of this process keep
    assert run(monkeypatch, *arguments) == 1
    said = capsys.readouterr()
    warnings, _, message = f"\n{said.err}".rpartition("\nerror: ")
    assert message and "Traceback" not in warnings and not said.out
    assert {p: p.read_bytes() for p in here.rglob("*") if p.is_file() and "__pycache__" not in str(p)} == before
    assert {child.pid for child in multiprocessing.active_children()} <= living
    return message


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(MODELS.splitlines(), 1) if text in line)


def test_a_model_that_cannot_be_exported_names_the_line(here, monkeypatch, capsys) -> None:
    said = refused(here, monkeypatch, capsys, "plan", "net.py:branch", "--cluster", "cpu:1x2", "-o", "plan.json")
    assert (
        f"net.py:{line_of('if h.sum() > 0')}: if h.sum() > 0" in said
        and "rewrite" in said
        and "Net cannot be exported" in said
    )


OWN = {
    "raises": "def made():\n    return {}['missing']\n",
    "opens": "def made():\n    open('weights.bin')\n",
    "imports": "import no_such_module_here\n",
    "syntax": "def made(:\n",
}


@pytest.mark.parametrize(
    ("command", "kind", "where", "last"),
    [
        ("plan", "raises", "line 2, in made\n", "KeyError: 'missing'"),
        ("memory", "raises", "line 2, in made\n", "KeyError: 'missing'"),
        ("plan", "opens", "line 2, in made\n", "FileNotFoundError: [Errno 2] No such file or directory: 'weights.bin'"),
        ("plan", "imports", "line 1, in <module>\n", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("plan", "syntax", "line 1\n", "SyntaxError: invalid syntax"),
    ],
)
@pytest.mark.parametrize("spec", ["own_{}.py:made", "own_{}:made"])
def test_an_error_of_the_users_own_code_is_shown_with_the_frames_of_that_code_alone(
    here, monkeypatch, capsys, command, kind, where, last, spec
) -> None:
    (here / f"own_{kind}.py").write_text(OWN[kind])
    said = refused(here, monkeypatch, capsys, command, spec.format(kind), "--cluster", "cpu:1x2")
    assert said.startswith("your own code raised this (--debug shows") and said.rstrip().endswith(last)
    assert said.count('  File "') == 1 and f'own_{kind}.py", {where}' in said
    monkeypatch.setattr("sys.argv", ["autopar", "--debug", command, spec.format(kind), "--cluster", "cpu:1x2"])
    with pytest.raises(Exception, match=last.partition(": ")[2].partition("]")[2] or last.partition(": ")[2]):
        main()


@pytest.mark.parametrize(
    ("gives", "wanted"),
    [
        (
            "nn.Linear(8, 8), (torch.zeros(8, 8),)",
            "on the command line: a factory whose model gives the loss, or --mode inference",
        ),
        ("nn.Linear(8, 8)", "name a factory that gives (model, args) on the command line"),
        ("torch.linspace(0, 1, 4).tolist()", "tensors have no values; make it with device='cpu'"),
        ("nn.Linear(torch.ones(4).nonzero().shape[0], 8)", "tensors have no values; make it with device='cpu'"),
        ("nn.Linear(8, 8), (torch.zeros(0, 8),)", "on the command line: in what the factory returns"),
        (
            "nn.Bilinear(8, 8, 8), (torch.zeros(8, 8),)",
            "missing a required argument: 'input2'; got 1 positional input, wanted forward(input1: torch.Tensor, "
            "input2: torch.Tensor) -> torch.Tensor: give that in example_inputs (on the command line: in the args, or",
        ),
        (
            "nn.Linear(8, 8), (__import__('numpy').zeros((8, 8)),)",
            "a ndarray, and a graph takes tensors and numbers; give tensors",
        ),
    ],
)
def test_what_is_asked_for_is_said_in_words_of_the_command_line_too(here, monkeypatch, capsys, gives, wanted) -> None:
    (here / "lacking.py").write_text(f"import torch\nfrom torch import nn\n\n\ndef made():\n    return {gives}\n")
    assert wanted in refused(here, monkeypatch, capsys, "plan", "lacking.py:made", "--cluster", "cpu:1x2")


def test_an_error_of_autopar_itself_is_shown_whole(here, monkeypatch) -> None:
    monkeypatch.setattr("autopar.cli.planning.frontend.load", lambda *_, **__: {}["a defect"])
    monkeypatch.setattr("sys.argv", ["autopar", "plan", "net.py:good", "--cluster", "cpu:1x2"])
    with pytest.raises(KeyError, match="a defect"):
        main()


def test_an_operator_without_a_rule_is_said_with_its_line_and_planned_whole(here, monkeypatch, capsys) -> None:
    planned(here, monkeypatch, model="net.py:unknown_op")
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "no sharding rule for autopar_test_cli.shuffle.default" in said
        and f"net.py:{line_of('h = shuffle(h)')}" in said
        and "rules=" in said
        and "--rules FILE.py" in said
    )


def test_a_batch_that_does_not_divide_is_refused_before_ranks_start(here, monkeypatch, capsys) -> None:
    path = planned(here, monkeypatch)
    monkeypatch.setattr("autopar.cli.verifying.verify", lambda *a, **k: pytest.fail("ranks started"))
    said = refused(here, monkeypatch, capsys, "verify", str(path), "--batch", "7")
    assert "input 'ids': dim 0 of size 7 does not divide by the 2 ranks that cut it" in said and "use 6 or 8" in said


@pytest.mark.parametrize("command", ["plan", "memory"])
def test_a_size_that_a_factory_cannot_be_told_is_refused(here, monkeypatch, capsys, command: str) -> None:
    """It was left out: asked for 64 samples, a plan was for the 8 that the factory makes."""
    said = refused(here, monkeypatch, capsys, command, "net.py:fixed", "--cluster", "cpu:1x2", "--batch", "64")
    assert "--batch cannot be given" in said and "no parameter batch" in said


@pytest.mark.parametrize("command", ["plan", "memory", "verify"])
def test_a_size_that_no_plan_file_may_say_is_refused(here, monkeypatch, capsys, command: str) -> None:
    assert "wanted at most 4611" in refused(here, monkeypatch, capsys, command, "net.py:good", "--seq", str(1 << 70))


def test_a_size_that_a_factory_cannot_be_told_is_not_verified(here, monkeypatch, capsys) -> None:
    path = planned(here, monkeypatch, model="net.py:fixed")
    monkeypatch.setattr("autopar.cli.verifying.verify", lambda *a, **k: pytest.fail("ranks started"))
    assert "--seq cannot be given" in refused(here, monkeypatch, capsys, "verify", str(path), "--seq", "16")


@pytest.mark.parametrize("command", ["verify", "run", "profile"])
def test_a_model_that_does_not_fit_this_machine_is_refused_before_it_is_made(
    here, monkeypatch, capsys, command: str
) -> None:
    path = planned(here, monkeypatch)
    monkeypatch.setattr("autopar.cli.rebuild.machine_bytes", lambda: 1024)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    said = refused(here, monkeypatch, capsys, command, str(path))
    assert "the weights of net.good take" in said and "in 2 processes, and this machine has 1 KiB of memory" in said
    assert run(monkeypatch, "explain", str(path)) == 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("speed = 3", "speed"),
        ("[[level]]\nsize = 0", "level"),
        ("nonsense [", "ours.toml"),
    ],
)
def test_a_cluster_file_with_unknown_keys_or_nonsense(here, monkeypatch, capsys, text: str, wanted: str) -> None:
    (here / "ours.toml").write_text(f"{text}\n{CLUSTER}")
    said = refused(here, monkeypatch, capsys, "plan", "net.py:good", "--cluster", "ours.toml", "-o", "plan.json")
    assert "ours.toml" in said and wanted in said


def test_a_model_that_fits_under_no_plan(here, monkeypatch, capsys) -> None:
    from autopar.cluster import Cluster

    plan = json.loads(planned(here, monkeypatch).read_text())
    small = plan["cluster"]
    small["device"]["memory_bytes"] = 4 << 20
    (here / "plan.json").unlink()
    monkeypatch.setattr(Cluster, "parse", staticmethod(lambda text: Cluster.from_dict(small)))
    said = refused(here, monkeypatch, capsys, "plan", "net.py:big", "--cluster", "small", "-o", "plan.json")
    assert (
        "no plan fits" in said
        and "GiB" in said
        and "five largest tensors: 0.weight 16 MiB" in said
        and "use more or larger devices" in said
    )


def test_a_plan_for_another_model_or_schema(here, monkeypatch, capsys) -> None:
    path = planned(here, monkeypatch)
    (here / "net.py").write_text(MODELS.replace("nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False)"))
    for command in (
        ("emit", str(path), "-o", "out"),
        ("run", str(path)),
        ("verify", str(path)),
        ("explain", str(path)),
    ):
        said = refused(here, monkeypatch, capsys, *command)
        assert "is for another graph than net.py:good gives now" in said and "plan the model again" in said
        # outputs, sizes and blocks were always said to be gone or new
        assert "(12 nodes, 11 now; gone: p_linear_bias, linear_default; new: linear; hash" in said
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"schema": 99}))
    assert "plan has schema 99, this version of autopar reads" in refused(
        here, monkeypatch, capsys, "emit", str(path), "-o", "out"
    )


@pytest.mark.parametrize("command", [("explain",), ("run",), ("emit", "-o", "out")])
def test_a_plan_that_is_used_in_another_folder_says_where_its_model_is_looked_for(
    here, monkeypatch, capsys, command: tuple[str, ...]
) -> None:
    path = planned(here, monkeypatch).resolve()
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    said = refused(here, monkeypatch, capsys, command[0], str(path), *command[1:])
    assert (
        said.startswith(f"plan {path}: its model and rules are read again")
        and "start the command in the folder in which the plan was made" in said
        and "no file net.py" in said
    )


def test_a_wrong_number_of_ranks(here, monkeypatch, capsys) -> None:
    path = planned(here, monkeypatch)
    for name, value in {
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    said = refused(here, monkeypatch, capsys, "run", str(path))
    assert "wrong number of ranks: got 1, wanted 2" in said and "--nproc-per-node=2" in said


def test_a_rank_that_fails_stops_all_and_its_error_is_shown(here, monkeypatch, capsys) -> None:
    path = planned(here, monkeypatch, model="net.py:out_of_range")
    said = refused(here, monkeypatch, capsys, "run", str(path), "--json", "run.json")
    assert (
        "of 2 failed, all ranks were stopped" in said
        and "IndexError: index out of range" in said
        and "F.embedding(" in said
    )


def test_a_recipe_that_splits_samples_wants_a_batch_that_divides(here, monkeypatch, capsys) -> None:
    said = refused(
        here, monkeypatch, capsys, "plan", "net.py:good", "--cluster", "cpu:1x4", "--batch", "6", "--recipe", "ddp"
    )
    assert (
        "recipe ddp splits the samples over 4 ranks" in said
        and "a batch of 6 does not divide by 4" in said
        and "4 or 8" in said
    )
    for command, *more in (("memory", "--recipe", "ddp"), ("plan",)):  # plan had a price of it, computed whole on each
        capsys.readouterr()
        assert run(monkeypatch, command, "net.py:good", "--cluster", "cpu:1x4", "--batch", "6", *more) == 0
        assert "a batch of 6 does not divide by 4: recipe ddp" in " ".join(capsys.readouterr().out.split())


def test_a_batch_that_does_not_fall_into_microbatches_is_refused_before_ranks_start(here, monkeypatch, capsys) -> None:
    asked = ("plan", TINY["mlp"], "--cluster", "cpu:1x2", "--recipe", "1f1b", "-o", "plan.json")
    assert run(monkeypatch, *asked) == 0
    monkeypatch.setattr("autopar.cli.verifying.verify", lambda *a, **k: pytest.fail("ranks started"))
    count = json.loads((here / "plan.json").read_text())["microbatches"]
    said = refused(here, monkeypatch, capsys, "verify", "plan.json", "--batch", str(count + 1))
    assert (
        f"size {count + 1} does not divide into {count} microbatches on 1 rank" in said
        and f"use {count} or {2 * count}" in said
    )


@pytest.mark.parametrize(
    "command",
    [("emit", "plan.json", "-o", "out"), ("run", "plan.json"), ("simulate", "plan.json"), ("memory", "plan.json")],
)
def test_a_device_that_has_no_room_is_refused_by_every_command(
    here, monkeypatch, capsys, command: tuple[str, ...]
) -> None:
    path = planned(here, monkeypatch)
    data = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            {
                **data,
                "cluster": {
                    **data["cluster"],
                    "device": {**data["cluster"]["device"], "memory_bytes": 1 << 20, "usable_memory": 0.001},
                },
            }
        )
    )
    assert "usable" in refused(here, monkeypatch, capsys, *command)


@pytest.mark.parametrize("mesh", ["\u00b2", "2x\u0663", "x", "0x2", "1" * 5000])
def test_a_mesh_that_is_none(here, monkeypatch, capsys, mesh: str) -> None:
    assert "wanted sizes joined by x" in refused(
        here, monkeypatch, capsys, "plan", "net.py:good", "--cluster", "cpu:1x2", "--mesh", mesh
    )


@pytest.mark.parametrize("option", ["-o", "--json"])
@pytest.mark.parametrize(("where", "said"), [("folder", "it is a folder"), ("net.py/plan.json", "net.py is no folder")])
def test_a_place_that_cannot_be_written_is_said_before_the_search(
    here, monkeypatch, capsys, option: str, where: str, said: str
) -> None:
    (here / "folder").mkdir()
    monkeypatch.setattr("autopar.cli.planning.compile", lambda *a, **k: pytest.fail("a search began"), raising=False)
    assert said in refused(here, monkeypatch, capsys, "plan", "net.py:good", "--cluster", "cpu:1x2", option, where)


@pytest.mark.parametrize(
    ("command", "where", "said"),
    [
        (
            ("simulate", "no.json", "--trace"),
            "folder",
            "cannot write the trace to folder: it is a folder; --trace wants",
        ),
        (
            ("profile", "no.json", "--trace"),
            "folder",
            "cannot write the trace to folder: it is a folder; --trace wants",
        ),
        (("simulate", "no.json", "--trace"), "-", "cannot write the trace to -: it would go to stdout"),
        (("profile", "no.json", "--trace"), "-", "cannot write the trace to -"),
        (("profile", "no.json", "--trace"), "gone/trace.json", "there is no folder"),
        (("profile", "no.json", "-o"), "net.py/c.toml", "net.py is no folder"),
        (("profile", "no.json", "-o"), "c.json", "ends in .toml"),
        (("calibrate", "-o"), "folder.toml", "cannot write the cluster to folder.toml: it is a folder"),
        (("calibrate", "-o"), "net.py/c.toml", "net.py is no folder"),
    ],
)
def test_where_results_go_is_checked_alike_by_every_command(
    here, monkeypatch, capsys, command: tuple[str, ...], where: str, said: str
) -> None:
    for name in ("folder", "folder.toml"):
        (here / name).mkdir()
    assert said in refused(here, monkeypatch, capsys, *command, where)


def test_a_trace_in_a_folder_that_is_not_there(here, monkeypatch, capsys) -> None:
    assert "there is no folder" in refused(
        here, monkeypatch, capsys, "simulate", str(planned(here, monkeypatch)), "--trace", "gone/trace.json"
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            'base = "cpu:1x2"\n[[levels]]\nname = "node"\nsize = 2\n[[levels]]\nname = "node"\nsize = 3',
            "each level once",
        ),
        ('base = "cpu:1x2"\n[device.peak_flops]\nfloat32 = 1e10\nint3 = 1e10', "int3"),
    ],
)
def test_a_cluster_file_that_says_a_level_twice_or_an_unknown_dtype(
    here, monkeypatch, capsys, text: str, wanted: str
) -> None:
    (here / "ours.toml").write_text(f'name = "ours"\n{text}\n')
    assert wanted in refused(here, monkeypatch, capsys, "plan", "net.py:good", "--cluster", "ours.toml")
