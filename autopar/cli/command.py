"""What all commands have in common: help that ends in examples, and files that they write and read are others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperCommand
from typer.models import CommandInfo

from autopar.errors import PlanError

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

WRITTEN, READ = "FILE", ("PLAN", "OLD", "NEW", "MODEL|PLAN")
"""The metavars of options that name a file to write, and of arguments that name a plan to read."""

SOURCES = {"model": "MODEL", "cluster": "--cluster", "rules": "--rules"}
"""What else names a file to read: parameter of a command -> what a message calls it."""


class Command(TyperCommand):
    """A command that writes no two results into one file, and none over a file that it reads."""

    def invoke(self, context: Any) -> Any:
        """Run the command. Raises PlanError where a file is named twice."""
        named = {path: name for name, path in (*self._sources(context), *self._files(context, "argument"))}
        for name, path in self._files(context, "option"):
            other = named.setdefault(path, name)
            if other != name:
                raise PlanError(f"{other} and {name} are both {path.name}; wanted another file for {name}")
        return super().invoke(context)

    def _sources(self, context: Any) -> Iterator[tuple[str, Path]]:
        """The files of the user's own that a command reads, the model's, the cluster's and that of rules, with the name
        of what names each."""
        for key, name in SOURCES.items():
            text = str(context.params.get(key) or "").removeprefix("hf:")
            for where in (text, text.rpartition(":")[0], f"{text}/config.json"):  # a file; a part of it; a folder
                if where and Path(where).is_file():
                    yield name, Path(where).resolve()

    def _files(self, context: Any, kind: str) -> Iterator[tuple[str, Path]]:
        """The files that arguments, or options, name, with the name of each. Devices are none: many may write there."""
        for each in self.params:
            where = context.params.get(each.name)
            if each.param_type_name == kind and isinstance(where, (str, Path)) and each.metavar in (*READ, WRITTEN):
                path = Path(where).resolve()
                if path.is_file() or not path.exists():
                    yield (str(each.metavar) if kind == "argument" else max(each.opts, key=len)), path


def prepare(commands: Iterable[CommandInfo]) -> None:
    """Make all commands a Command, and let the help of each end in its examples."""
    for command in commands:
        assert command.callback is not None  # typer keeps the function of every command
        name = command.callback.__name__
        lines = "\n".join(f"  autopar {name} {words}".rstrip() for words in EXAMPLES[name])
        command.cls, command.epilog = Command, f"\b\nFor example:\n{lines}"  # \b: lines stay as they are
