"""What each command takes. The work is in one module per command, imported when the command runs."""

from __future__ import annotations

import io
import os
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import autopar
from autopar.cli.command import prepare
from autopar.cli.console import fail, of_size, say, writable
from autopar.errors import AutoparError
from autopar.optimizers import OPTIMIZERS
from autopar.timer import TIME_LIMIT_S

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Mode(StrEnum):
    """What a plan is for."""

    train = "train"
    inference = "inference"


ModelSpec = Annotated[
    str, typer.Argument(metavar="MODEL", help="hf:FILE_OR_FOLDER, path/to/file.py:factory or package.module:factory")
]
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", help="a file that `autopar plan -o` wrote, or a folder of `autopar emit`")
]
SIZE: Any = {"min": 1, "metavar": "N", "callback": of_size}
Batch = Annotated[
    int | None, typer.Option(**SIZE, help="global samples per step; else the default of the factory's batch=, or 8")
]
Seq = Annotated[
    int | None, typer.Option(**SIZE, help="tokens per sample; else the default of the factory's seq=, or 128")
]
ClusterName = Annotated[str, typer.Option(help="PRESET:NODESxDEVICES, a .toml file, or here; see `autopar clusters`")]
MeshSizes = Annotated[
    str | None,
    typer.Option(metavar="AxB", help="fix the sizes of the mesh axes, as 2x2; of a pipeline, those of each place"),
]
Precision = Annotated[
    str,
    typer.Option(
        help="float32, bf16 or fp16 (mixed, float32 masters), a dtype that everything has (bfloat16), or auto: what "
        "the model's config says, or the dtype of what a factory makes"
    ),
]
RulesFile = Annotated[
    str, typer.Option("--rules", metavar="FILE.py[:NAME]", help="rules of your own operators: a dict RULES, or NAME")
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=lambda where: writable("--json", where),
        help="write the result as JSON; - is stdout",
    ),
]


def _version(asked: bool) -> None:
    if asked:
        import torch

        typer.echo(f"autopar {autopar.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_version, help="show the versions of autopar and torch"),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="show the traceback of an error (before or after the command)")
    ] = False,
) -> None:
    """Plan how a PyTorch model runs on a cluster; emit, run, verify and explain the plan.

    Begin with `autopar plan MODEL --cluster cpu:1x4 -o plan.json`, then `autopar verify plan.json`.
    """


@app.command(short_help="find a plan for a model and a cluster, and print it")
def plan(
    model: ModelSpec,
    cluster: ClusterName = "here",
    batch: Batch = None,
    seq: Seq = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="write the plan here; - is stdout")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="force a named strategy; see `autopar recipes`")
    ] = None,
    mesh: MeshSizes = None,
    search: Annotated[str, typer.Option(help="ilp, mcmc, greedy or exhaustive")] = "ilp",
    precision: Precision = "auto",
    mode: Annotated[Mode, typer.Option(help="train plans gradients and the optimizer too")] = Mode.train,
    optimizer: Annotated[str, typer.Option(help=f"whose state must fit: {', '.join(OPTIMIZERS)}")] = "adamw",
    time_limit: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="for all that the search does, proof included")
    ] = TIME_LIMIT_S,
    seed: Annotated[
        int, typer.Option(min=0, max=(1 << 62) - 1, metavar="N", help="of the search, and later of weights and inputs")
    ] = 0,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="plan for less and less memory too: step time against memory per device")
    ] = False,
    remat: Annotated[
        str, typer.Option(help="blocks run again in the backward: none, selective, full, or auto as memory wants it")
    ] = "auto",
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="bound every shape that a plan can have as closely as can be, with the memory there is; takes many "
            "times as long as the search",
        ),
    ] = False,
    rules: RulesFile = "",
    json: Json = None,
) -> None:
    """Plan MODEL for a cluster and print the plan."""
    from autopar.cli.planning import Asked, plan_command

    plan_command(
        Asked(
            model,
            cluster,
            batch,
            seq,
            recipe,
            mesh,
            search,
            precision,
            mode.value,
            optimizer,
            time_limit,
            seed,
            pareto,
            remat,
            prove,
            rules,
        ),
        output,
        json,
    )


@app.command(short_help="write the sharded module of a plan into a folder")
def emit(
    plan: PlanFile, output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="the folder to write")]
) -> None:
    """Write the sharded module of a plan: sharded.py, plan.json, constants.pt, README.md."""
    from autopar.cli.emitting import emit_command

    emit_command(plan, output)


@app.command(short_help="train on random data, on local CPU ranks or under torchrun")
def run(
    plan: PlanFile,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="training steps")] = 3,
    lr: Annotated[float, typer.Option(min=0.0, metavar="RATE", help="learning rate")] = 1e-3,
    json: Json = None,
) -> None:
    """Train on random data: on local CPU ranks, or on the ranks of torchrun."""
    from autopar.cli.running import run_command

    run_command(plan, steps, lr, json)


@app.command(short_help="compare the sharded module with one device, in float64")
def verify(
    plan: PlanFile,
    dtype: Annotated[str, typer.Option(help="of the comparison: float64 or float32")] = "float64",
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="T", help="largest relative difference; 1e-9 in float64, 1e-4 in float32"),
    ] = None,
    batch: Annotated[int | None, typer.Option(**SIZE, help="another batch than planned")] = None,
    seq: Annotated[int | None, typer.Option(**SIZE, help="another sequence than planned")] = None,
    device: Annotated[
        str, typer.Option(help="of the ranks: cpu, or cuda, whose devices they share where there are fewer")
    ] = "cpu",
    json: Json = None,
) -> None:
    """Compare the emitted module on local ranks with the model on one device; exit code 0 only if all is equal."""
    from autopar.cli.verifying import verify_command

    raise typer.Exit(verify_command(plan, dtype, tolerance, batch, seq, json, device))


@app.command(short_help="the price of each alternative of a node; what costs most")
def explain(
    plan: PlanFile,
    node: Annotated[str | None, typer.Option(metavar="NAME", help="a node or parameter of the plan")] = None,
    json: Json = None,
) -> None:
    """Show why: the price of each alternative of one node, or what costs most."""
    from autopar.cli.explaining import explain_command

    explain_command(plan, node, json)


@app.command(short_help="what differs between two plans")
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="a plan, as PLAN of the other commands")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="another one")],
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="rows of nodes shown")] = 20,
    json: Json = None,
) -> None:
    """Show what differs between two plans; exit code 0 only if they are the same."""
    from autopar.cli.differing import diff_command

    raise typer.Exit(diff_command(old, new, rows, json))


@app.command(short_help="one step event by event: time, memory, a trace")
def simulate(
    plan: PlanFile,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="write a trace for Perfetto")] = None,
    json: Json = None,
) -> None:
    """Simulate one step: time, shares, memory, and a trace of every stream."""
    from autopar.cli.simulating import simulate_command

    simulate_command(plan, trace, json)


@app.command(short_help="will it fit? bytes per device under each strategy")
def memory(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL|PLAN", help="a MODEL as `autopar plan` takes it, or a PLAN (plan.json)")
    ],
    cluster: ClusterName = "here",
    batch: Batch = None,
    seq: Seq = None,
    recipe: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="only this strategy; may be given more than once")
    ] = None,
    mesh: MeshSizes = None,
    precision: Precision = "auto",
    mode: Annotated[Mode, typer.Option(help="train counts gradients, optimizer and activations too")] = Mode.train,
    optimizer: Annotated[str, typer.Option(help=f"whose state must fit: {', '.join(OPTIMIZERS)}")] = "adamw",
    shown: Annotated[int, typer.Option(min=1, metavar="N", help="tensors shown of a plan's peak")] = 16,
    rules: RulesFile = "",
    json: Json = None,
) -> None:
    """Will it fit? Memory per device of one device and of each strategy, and the largest sizes that fit; of a plan,
    what its peak is made of."""
    from autopar.cli.fitting import memory_command
    from autopar.cli.planning import Asked

    memory_command(
        Asked(model, cluster, batch, seq, None, mesh, "ilp", precision, mode.value, optimizer, rules=rules),
        recipe or [],
        shown,
        json,
        _given(context),
    )


def _given(context: typer.Context) -> list[str]:
    """The options that were given on the command line."""
    sources = {each.opts[0]: context.get_parameter_source(each.name or "") for each in context.command.params}
    return [
        option
        for option, source in sources.items()
        if source is not None and source.name == "COMMANDLINE" and option.startswith("-")
    ]


@app.command(short_help="run some steps; measured against predicted, by operator")
def profile(
    plan: PlanFile,
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="steps that are timed, and steps that are profiled")
    ] = 3,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the profiler's events of the first rank for Perfetto")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="write a cluster file refitted to what was measured"),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="rows shown")] = 20,
    json: Json = None,
) -> None:
    """Run some steps on local ranks and show predicted against measured, by operator and collective, worst first."""
    from autopar.cli.profiling import profile_command

    profile_command(plan, steps, trace, output, rows, json)


@app.command(short_help="measure this machine and write it as a cluster file")
def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="the cluster file to write, a .toml")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="local ranks; all GPUs, or 4 on a CPU. Under torchrun its ranks are measured"
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=1.0,
            max=3600.0,
            metavar="S",
            help="about how long to measure, in all: more is closer where the machine has other work; an hour at most",
        ),
    ] = 60.0,
    json: Json = None,
) -> None:
    """Measure this machine: matmuls, memory, starting operators, collectives; and write it as a cluster file."""
    from autopar.cli.calibrating import calibrate_command

    calibrate_command(output, device, ranks, seconds, json)


@app.command(short_help="list the strategies that --recipe takes")
def recipes(json: Json = None) -> None:
    """List the named strategies."""
    from autopar.cli.lists import recipes_command

    recipes_command(json)


@app.command(short_help="list the presets that --cluster takes")
def clusters(json: Json = None) -> None:
    """List the presets of clusters."""
    from autopar.cli.presets import clusters_command

    clusters_command(json)


prepare(app.registered_commands)


def main() -> None:
    """Run the command of `sys.argv`. Errors of autopar end as one message on stderr and exit code 1, those of the
    user's code with its frames, usage errors with 2."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    # what its encoding lacks (names of a model, shares as blocks) is a ? there, and no error when all the work is done
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="autopar")
    except BrokenPipeError:  # the reader of our output has left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except AutoparError as error:
        if debug:
            raise
        fail(error)
        sys.exit(1)
    except Exception as error:
        message = _message(error)
        if debug or message is None:
            raise
        say(message)
        sys.exit(1)


def _message(error: Exception) -> str | None:
    """The message for an error that is not autopar's: where the user's own code (a factory, rules) raised it, or that
    of the operating system. None for a bug of autopar, whose traceback is to be shown."""
    from autopar.frontend.factory import own_frames, why_no_values

    frames = own_frames(error)
    if frames is not None:
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = frames
        text = "".join(shown.format()) + why_no_values(error)
        return f"error: your own code raised this (--debug shows how it was called)\n{text.rstrip()}"
    return f"error: {error}" if isinstance(error, OSError) else None
