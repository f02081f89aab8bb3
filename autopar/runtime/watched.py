"""Places of a pipeline that wait for what another one sends: told of failures, as ranks in a collective are.

torch's schedules wait without a limit, and gloo closes the connections of a group when a wait with a limit ends early.
So a thread looks for notes of failures (autopar.runtime.failures) while the stages run, and ends a wait of its own in
their group where there is one: what the stages wait in fails then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime import failures
from autopar.runtime.mesh import Mesh

_UNUSED = 1
"""A tag with which nothing is sent."""


@contextmanager
def watched(mesh: Mesh) -> Iterator[None]:
    """A context in which this rank exchanges values with other places of `mesh`. Raises RunError where it waited for
    one and a rank has failed (on the CPU; NCCL has no way to end a wait). After an error no step begins: transfers of
    the one that failed are still under way."""
    group = mesh.pipeline_group
    if group is None:
        yield
        return
    said, over = list[str](), threading.Event()
    thread = threading.Thread(target=_look, args=(group, over, said), daemon=True)
    if mesh.device_type == "cpu":
        thread.start()
    try:
        yield
    except BaseException as error:
        failures.gave_up()
        if said and isinstance(error, RuntimeError) and not isinstance(error, RunError):
            raise RunError(f"waiting for other places of the pipeline: {said[0]}. {failures.MEND}") from error
        raise
    finally:
        over.set()
        if thread.is_alive():
            thread.join()


def _look(group: dist.ProcessGroup, over: threading.Event, said: list[str]) -> None:
    """Look for notes until it is `over`; where there is one it is `said`, and the connections of `group` are closed."""
    while not over.wait(failures.LOOK_S):
        if found := failures.of_others():
            said.append(found)
            with suppress(RuntimeError):
                other = int(dist.get_rank(group) == 0)
                if (never := dist.irecv(torch.empty(1), group=group, group_src=other, tag=_UNUSED)) is not None:
                    never.wait(timedelta(milliseconds=1))
            return
