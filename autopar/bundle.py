"""A plan with its emitted source and constants: what is saved to a folder and built again from it. Behind
`Compiled.save`, `autopar.load` and `autopar emit`."""

from __future__ import annotations

import errno
import itertools
import linecache
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.plan import FILE, Plan
from autopar.runtime import ShardedModule, constants
from autopar.text import first_line, seconds, times

PLAN, SOURCE, README = FILE, "sharded.py", "README.md"
FILES = (constants.NAME, SOURCE, README, PLAN)
"""The files of a saved plan, in the order in which they are replaced."""

_README = """# {model}: a sharded module

Planned by autopar for {cluster}, mesh {mesh}, {strategy}; predicted {step} per step.{again}

    torchrun --nproc-per-node={ranks} sharded.py      # {runs} on random data

    import autopar
    model = autopar.load("{folder}")                  # on {ranks} ranks
    model.load_full(state_dict)                       # whole tensors under the model's own names

`plan.json` is the plan, `sharded.py` the module, `constants.pt` the tensors that are no parameters.
"""


_NUMBERS = itertools.count(1)
"""Numbers for the modules that emitted sources are run as: each has a name of its own (runtime.importable)."""


@dataclass(frozen=True)
class Bundle:
    """`constants` are the tensors that the source names but no checkpoint holds (rope tables, buffers' first
    values)."""

    plan: Plan
    source: str
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def namespace(self) -> dict[str, Any]:
        """Run the source as a module and give its names; tracebacks show its lines."""
        name = f"<sharded {self.plan.graph_hash[:12]}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": f"autopar_sharded_{next(_NUMBERS)}", "__file__": name}
        exec(compile(self.source, name, "exec"), space)
        return space

    def build(self, weights: Mapping[str, torch.Tensor] | None = None, *, seed: int = 0) -> ShardedModule:
        """The module on this rank, filled from whole `weights` by original name, or with parameters nan. What it draws
        at random follows from `seed`, one for all ranks.

        Raises RunError when the ranks do not fit the plan, the weights the model, or where a constant has no value.
        """
        module: ShardedModule = self.namespace()["Model"](seed=seed)
        module.load_constants(self.constants)
        return module if weights is None else module.load_full(weights, strict=False)

    def save(self, folder: Path) -> Path:
        """Write the files into `folder`. A new folder appears with all of them; in one that is there each is replaced
        in one move, so that a reader finds the older plan, this one, or files that `load` refuses because they do not
        belong together; nothing else in it is touched. Ranks may all save to one folder at once, or only one of them.

        Raises PlanError where that would replace what is no saved plan, or the folder cannot be written to.
        """
        check_free(folder)
        new = not folder.exists()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent if new else folder, prefix=f".{folder.name}.") as name:
                made, older = Path(name) / "new", Path(name) / "older"
                self._write(made, folder.name)
                if not (new and _moved(made, folder)):
                    _replace(made, folder, older)
        except OSError as error:
            raise PlanError(f"{folder} cannot be written: {error.strerror or error}; name another folder") from error
        return folder

    def _write(self, folder: Path, name: str) -> None:
        plan = self.plan
        folder.mkdir(mode=0o755)
        (folder / PLAN).write_text(plan.to_json(), encoding="utf-8")
        (folder / SOURCE).write_text(self.source, encoding="utf-8")
        (folder / constants.NAME).write_bytes(constants.packed(self.constants, plan.digest))
        (folder / README).write_text(
            _README.format(
                model=plan.model,
                cluster=Cluster.from_dict(dict(plan.cluster)).label,
                mesh=times(plan.grid),
                strategy=plan.strategy,
                step=seconds(plan.predicted.step_s),
                ranks=plan.ranks,
                folder=name,
                runs="one training step" if plan.mode == "train" else "one forward",
                again=f"\nBlocks that are run again in the backward: {plan.run_again}." if plan.run_again else "",
            ),
            encoding="utf-8",
        )

    @staticmethod
    def load(folder: Path) -> Bundle:
        """Read a folder that `save` wrote. Raises PlanError when a file is missing, cannot be read, or is of another
        plan."""
        if folder.is_file():
            raise PlanError(
                f"{folder} is a file, and what is loaded is a folder with a plan and its program: {folder.parent} if "
                "Compiled.save or `autopar emit` wrote that, else what `autopar emit PLAN -o FOLDER` makes of a plan"
            )
        missing = [name for name in (PLAN, SOURCE, constants.NAME) if not (folder / name).is_file()]
        if missing:
            raise PlanError(
                f"{folder} is no saved plan: {', '.join(missing)} missing; save one with Compiled.save, or with "
                "`autopar emit`"
            )
        plan, source = Plan.load(folder / PLAN), _source(folder / SOURCE)
        tensors, made_for = _constants(folder / constants.NAME)
        for name, got in ((SOURCE, constants.plan_of(source)), (constants.NAME, made_for)):
            if said := constants.disagree(folder / name, got, PLAN, plan.digest):
                raise PlanError(said)
        return Bundle(plan, source, tensors)


def check_free(folder: Path) -> None:
    """Raise PlanError where a plan cannot be saved to `folder` without replacing what is none."""
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"{folder} is a file: name another folder for the plan")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / PLAN).exists():
        raise PlanError(f"{folder} exists and is no saved plan: it would be replaced; name another folder")
    source = folder / SOURCE
    own = source.is_file() and constants.plan_of(source.read_text(encoding="utf-8", errors="replace")) is not None
    others = [name for name in FILES if name != PLAN and (folder / name).exists() and not own]
    folders = [name for name in FILES if (folder / name).is_dir()]
    if others or folders:
        raise PlanError(
            f"{folder} has {', '.join(folders or others)} that {'is' if len(folders or others) == 1 else 'are'} of no "
            "saved plan and would be replaced; name another folder"
        )


def _moved(made: Path, folder: Path) -> bool:
    """Move the folder `made` to where none was; False where another process has been faster."""
    try:
        os.replace(made, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        check_free(folder)
        return False
    return True


def _replace(made: Path, folder: Path, older: Path) -> None:
    """Move the files of `made` over those of `folder`, in the order of FILES; where one cannot be moved, those before
    it are brought back from their copies in `older`."""
    older.mkdir()
    there = [name for name in FILES if (folder / name).exists()]
    for name in there:
        shutil.copy2(folder / name, older / name)
    try:
        for name in FILES:
            os.replace(made / name, folder / name)
    except BaseException:
        for name in FILES:
            if (made / name).exists():
                continue
            if name in there:
                os.replace(older / name, folder / name)
            else:
                (folder / name).unlink()
        raise


def _source(path: Path) -> str:
    """The text of an emitted file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path.name} of {path.parent} cannot be read ({first_line(error)}): save it again") from error


def _constants(path: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """Tensors by name, and the plan that they are of; nothing in the file is executed."""
    try:
        found = constants.unpacked(torch.load(path, weights_only=True))
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise PlanError(f"constants.pt of {path.parent} cannot be read ({first_line(error)}): save it again") from error
    if found is None:
        raise PlanError(f"constants.pt of {path.parent} cannot be read (it holds no tensors by name): save it again")
    return found
