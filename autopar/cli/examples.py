"""Examples, with which the help of each command ends."""

from __future__ import annotations

from collections.abc import Iterable

from typer.models import CommandInfo

EXAMPLES = {
    "plan": ("hf:models/hf/gpt2.json --cluster cpu:1x4 --batch 8 --seq 128 -o plan.json",),
    "emit": ("plan.json -o gpt2-on-4/",),
    "run": ("plan.json --steps 3",),
    "verify": ("plan.json",),
    "explain": ("plan.json", "plan.json --node attn.c_attn.weight"),
    "diff": ("old.json new.json",),
    "simulate": ("plan.json --trace trace.json",),
    "memory": ("hf:models/hf/gpt2.json --cluster cpu:1x4 --batch 8 --seq 128", "plan.json"),
    "profile": ("plan.json -o cluster.toml",),
    "calibrate": ("-o cluster.toml --ranks 4",),
    "recipes": ("",),
    "clusters": ("",),
}
"""Name of a command -> what follows it in each example."""


def add_examples(commands: Iterable[CommandInfo]) -> None:
    """Let the help of each command end in its examples."""
    for command in commands:
        assert command.callback is not None  # typer keeps the function of every command
        name = command.callback.__name__
        lines = "\n".join(f"  autopar {name} {words}".rstrip() for words in EXAMPLES[name])
        command.epilog = f"\b\nFor example:\n{lines}"  # \b: lines stay as they are
