"""A plan with its emitted source and constants: what is saved to a folder and built again from it."""

from __future__ import annotations

import io
import linecache
import os
import pickle
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.runtime import ShardedModule
from autopar.text import first_line, seconds

_README = """# {model}: a sharded module

Planned by autopar for {cluster}, mesh {mesh}, {strategy}; predicted {step} per step.{again}

    torchrun --nproc-per-node={ranks} sharded.py      # one training step on random data

    import autopar
    model = autopar.load("{folder}")                  # on {ranks} ranks
    model.load_state_dict(...)

`plan.json` is the plan, `sharded.py` the module, `constants.pt` the tensors that are no parameters.
"""


@dataclass(frozen=True)
class Bundle:
    """`constants` are the tensors that the source names but no checkpoint holds (rope tables, buffers' first values)."""

    plan: Plan
    source: str
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def namespace(self) -> dict[str, Any]:
        """Run the source as a module and give its names; tracebacks show its lines."""
        name = f"<sharded {self.plan.graph_hash[:12]}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": "autopar_sharded", "__file__": name}
        exec(compile(self.source, name, "exec"), space)
        return space

    def build(self, weights: Mapping[str, torch.Tensor] | None = None, *, seed: int = 0) -> ShardedModule:
        """The module on this rank, filled from whole `weights` by original name, or with parameters empty. What it draws at random follows from `seed`, one for all ranks.

        Raises RunError when the ranks do not fit the plan, the weights the model, or where a constant has no value.
        """
        module: ShardedModule = self.namespace()["Model"](seed=seed)
        module.load_constants(self.constants)
        return module if weights is None else module.load_full(weights, strict=False)

    def save(self, folder: Path) -> Path:
        """Write the folder in one move: a reader sees all of it or nothing, and what stood there before stays until then.

        Raises PlanError where something else stands there.
        """
        if folder.exists() and not folder.is_dir():
            raise PlanError(f"{folder} is a file: name another folder for the plan")
        if folder.exists() and not (folder / "plan.json").exists() and any(folder.iterdir()):
            raise PlanError(f"{folder} exists and is no saved plan: it would be replaced; name another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            made, older = Path(beside) / "new", Path(beside) / "older"
            self._write(made, folder.name)
            if folder.exists():
                os.replace(folder, older)
            try:
                os.replace(made, folder)
            except BaseException:
                if older.exists():
                    os.rename(older, folder)
                raise
        return folder

    def _write(self, folder: Path, name: str) -> None:
        plan = self.plan
        folder.mkdir(mode=0o755)
        (folder / "plan.json").write_text(plan.to_json())
        (folder / "sharded.py").write_text(self.source)
        buffer = io.BytesIO()
        torch.save(dict(self.constants), buffer)
        (folder / "constants.pt").write_bytes(buffer.getvalue())
        (folder / "README.md").write_text(_README.format(
            model=plan.model, cluster=plan.cluster.get("name"), mesh="x".join(map(str, plan.mesh)), strategy=plan.strategy,
            step=seconds(plan.predicted.step_s), ranks=plan.ranks, folder=name,
            again=f"\nBlocks that are run again in the backward: {plan.run_again}." if plan.run_again else ""))

    @staticmethod
    def load(folder: Path) -> Bundle:
        """Read a folder that `save` wrote. Raises PlanError when a file is missing, cannot be read, or is of another plan."""
        missing = [name for name in ("plan.json", "sharded.py", "constants.pt") if not (folder / name).is_file()]
        if missing:
            raise PlanError(f"{folder} is no saved plan: {', '.join(missing)} missing; save one with Compiled.save")
        plan, source = Plan.load(folder / "plan.json"), (folder / "sharded.py").read_text()
        written = re.search(r"\| plan ([0-9a-f]{12}) \|", source)
        if written is not None and written.group(1) != plan.digest:
            raise PlanError(f"{folder / 'sharded.py'} was emitted for plan {written.group(1)}, but plan.json beside it is plan "
                            f"{plan.digest}: emit the plan again, or bring back the file that belongs to it")
        return Bundle(plan, source, _constants(folder / "constants.pt"))


def _constants(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name; nothing in the file is executed."""
    try:
        found = torch.load(path, weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise PlanError(f"constants.pt of {path.parent} cannot be read ({first_line(error)}): save it again") from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise PlanError(f"constants.pt of {path.parent} cannot be read (it holds no tensors by name): save it again")
    return found
