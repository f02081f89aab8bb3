"""A plan with its emitted source and constants: what is saved to a folder and built again from it."""

from __future__ import annotations

import io
import linecache
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.runtime import ShardedModule

_README = """# {model}: a sharded module

Planned by autopar for {cluster}, mesh {mesh}, {strategy}; predicted {step:.4g} s per step.

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

    def build(self, weights: Mapping[str, torch.Tensor] | None = None) -> ShardedModule:
        """The module on this rank, filled from whole `weights` by original name, or with parameters empty.

        Raises RunError when the ranks do not fit the plan, the weights the model, or where a constant has no value.
        """
        module: ShardedModule = self.namespace()["Model"]()
        module.load_constants(self.constants)
        return module if weights is None else module.load_full(weights, strict=False)

    def save(self, folder: Path) -> Path:
        """Write the folder in one move: a reader sees all of it or nothing."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not (folder / "plan.json").exists() and any(folder.iterdir()):
            raise PlanError(f"{folder} exists and is no saved plan: it would be replaced; name another folder")
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            plan = self.plan
            (temporary / "plan.json").write_text(plan.to_json())
            (temporary / "sharded.py").write_text(self.source)
            buffer = io.BytesIO()
            torch.save(dict(self.constants), buffer)
            (temporary / "constants.pt").write_bytes(buffer.getvalue())
            (temporary / "README.md").write_text(_README.format(
                model=plan.model, cluster=plan.cluster.get("name"), mesh="x".join(map(str, plan.mesh)), strategy=plan.strategy,
                step=plan.predicted.step_s, ranks=plan.ranks, folder=folder.name))
            temporary.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return folder

    @staticmethod
    def load(folder: Path) -> Bundle:
        """Read a folder that `save` wrote. Raises PlanError when a file is missing."""
        missing = [name for name in ("plan.json", "sharded.py", "constants.pt") if not (folder / name).is_file()]
        if missing:
            raise PlanError(f"{folder} is no saved plan: {', '.join(missing)} missing; save one with Compiled.save")
        constants = torch.load(folder / "constants.pt", weights_only=True)
        return Bundle(Plan.load(folder / "plan.json"), (folder / "sharded.py").read_text(), constants)
