"""Running a function on several local ranks: for verification, `autopar run` and tests.

    launch(fn, 4, x)    # fn(x) on 4 ranks with torch.distributed up; a list of the 4 results

    with Ranks(4) as ranks:         # the same ranks for many jobs: groups, imports and caches are made once
        ranks.run(fn, x)
        ranks.run(other, y)

Ranks are forked where that is safe (half a second for four) and spawned otherwise, as for GPUs. They rendezvous through
a file, so no port is taken. Where there are more ranks than GPUs, ranks share GPUs and use gloo, since NCCL does not
allow two ranks on one GPU. The first rank that fails stops all, and its traceback is raised. No rank outlives the
caller, even if that is killed; the temporary folder of a killed caller is removed at the next start
(autopar.runtime.scratch).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.pickles import dumps
from autopar.runtime.scratch import Scratch

# how long to wait for reports of other ranks after the first failure (one may be the cause), and for the stacks of late
# ranks
GRACE_S = 0.5
FRAMES = 12  # how many of the innermost stack frames of a late rank are shown
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank sends after a job: whether it succeeded, when, the pickled result, or the traceback."""

    ok: bool
    time_s: float
    value: bytes
    text: str = ""


def launch(
    fn: Callable[..., Any], nprocs: int, *args: Any, timeout_s: float = 600.0, device_type: str = "cpu"
) -> list[Any]:
    """`fn(*args)` on `nprocs` local ranks, one thread each; their results, which must be picklable, in rank order.

    `fn` finds torch.distributed initialised (gloo on "cpu", nccl on "cuda" where each rank has one). Raises RunError
    with the traceback of the first rank that failed, with the ranks that were not done within `timeout_s` (all other
    ranks are stopped then), or where the system does not give as many processes.
    """
    fork = _can_fork(device_type)
    # multiprocessing itself would keep a file open for each tensor
    job = partial(fn, *args) if fork else partial(_call, dumps((fn, args)))
    team = _Team.start(nprocs, lambda rank: (job,), timeout_s, device_type, fork=fork)
    try:
        return _collect(team, timeout_s)
    finally:
        team.stop()


class Ranks:
    """`nprocs` local ranks that are kept for many jobs, and started with the first one. After a failed job they are
    stopped and the next job starts new ones, so no state of a failed job remains. Use it as a context manager, or call
    `stop` in the end."""

    def __init__(self, nprocs: int, *, timeout_s: float = 600.0, device_type: str = "cpu") -> None:
        self.nprocs, self.timeout_s, self.device_type = nprocs, timeout_s, device_type
        self._team: _Team | None = None
        self._doors: list[Connection] = []

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """As `launch`; `fn` and `args` must be picklable, because the ranks may be older than they are. Raises RunError
        as `launch`."""
        job = dumps((fn, args))
        team = self._team or self._start()
        done = False
        try:
            for door in self._doors:
                with contextlib.suppress(BrokenPipeError):  # a rank that died: collecting says how
                    door.send_bytes(job)
            results = _collect(team, self.timeout_s)
            done = True
            return results
        finally:
            if not done:
                self.stop()

    def _start(self) -> _Team:
        with _possible(self.nprocs):
            pairs = [multiprocessing.Pipe(duplex=False) for _ in range(self.nprocs)]
        self._team = _Team.start(
            self.nprocs,
            lambda rank: _Inbox(pairs[rank][0]),
            self.timeout_s,
            self.device_type,
            fork=_can_fork(self.device_type),
        )
        for there, _ in pairs:
            there.close()
        self._doors = [here for _, here in pairs]
        return self._team

    def stop(self) -> None:
        """End the ranks, if there are any."""
        if self._team is not None:
            self._team.stop()
        for door in self._doors:
            door.close()
        self._team, self._doors = None, []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


Job = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class _Inbox:
    """The jobs that arrive through a pipe, until its other end is closed."""

    end: Connection

    def __iter__(self) -> Iterator[Job]:
        with contextlib.suppress(EOFError):
            while True:
                yield partial(_call, self.end.recv_bytes())


def _call(job: bytes) -> Any:
    fn, args = pickle.loads(job)
    return fn(*args)


@dataclass(frozen=True, slots=True)
class _Team:
    """The processes of some ranks and the pipes in which they report."""

    ends: list[Connection]
    children: list[Any]
    folder: Scratch

    @staticmethod
    def start(
        nprocs: int, jobs: Callable[[int], Iterable[Job]], timeout_s: float, device_type: str, *, fork: bool
    ) -> _Team:
        """Start them, forked or spawned; rank r does `jobs(r)`, one report each."""
        if nprocs < 1:
            raise RunError(f"cannot launch {nprocs} ranks; want 1 or more")
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        team = _Team([], [], Scratch())
        try:
            with _possible(nprocs):
                for rank in range(nprocs):
                    here, there = context.Pipe(duplex=False)
                    store = os.path.join(team.folder.name, "store")
                    child = context.Process(
                        target=_rank,
                        daemon=True,
                        name=f"rank{rank}",
                        args=(there, os.getpid(), jobs(rank), rank, nprocs, store, device_type, timeout_s),
                    )
                    child.start()
                    there.close()
                    team.ends.append(here)
                    team.children.append(child)
        except BaseException:
            team.stop()
            raise
        return team

    def stacks(self, ranks: Sequence[int]) -> str:
        """The current Python stacks of these `ranks`, innermost call first, as text; empty where the system has no such
        signal."""
        if not hasattr(faulthandler, "register"):
            return ""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.children[rank].pid, signal.SIGUSR1)
        time.sleep(GRACE_S)
        found = ""
        for rank in ranks:
            said = _stack_file(self.folder.name, rank)
            lines = said.read_text(encoding="utf-8").splitlines()[1:] if said.exists() else []
            # not how it came to be started
            own = list(itertools.takewhile(lambda line: not line.endswith(f" in {_rank.__name__}"), lines))
            found += f"\nrank {rank} is at:\n" + "\n".join(own[:FRAMES]) if own else ""
        return found

    def stop(self) -> None:
        """End them, whatever they do."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                if child.is_alive():
                    child.kill()
        for child in self.children:
            child.join()
            child.close()
        for end in self.ends:
            end.close()
        self.folder.cleanup()


@contextlib.contextmanager
def _possible(nprocs: int) -> Iterator[None]:
    """Raise RunError where the system gives no more processes, files or memory while ranks are started."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot start {nprocs} ranks on this machine: {error.strerror or error}. Each rank is a process with open "
            "files of its own: ask for fewer ranks, or raise the limits of open files and processes (ulimit -n, "
            "ulimit -u)"
        ) from error


def _stack_file(folder: str, rank: int) -> Path:
    """The file to which a rank writes its stack on SIGUSR1."""
    return Path(folder) / f"rank{rank}.stack"


def _can_fork(device_type: str) -> bool:
    """Whether ranks can be forked. Not once the CUDA driver or torch.distributed is initialised here; and builds of
    torch with CUDA may have an autograd that does not work in a fork, which a child process tries."""
    if device_type != "cpu" or sys.platform != "linux" or torch.cuda.is_initialized() or dist.is_initialized():
        return False
    child = os.fork()
    if not child:
        works = False
        try:
            works = _differentiates()
        finally:
            os._exit(not works)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _differentiates() -> bool:
    """Whether autograd works in this process."""
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:
        return False
    return True


def _rank(
    end: Connection,
    parent: int,
    jobs: Iterable[Job],
    rank: int,
    nprocs: int,
    store: str,
    device_type: str,
    timeout_s: float,
) -> None:
    """The main function of a rank: run all `jobs` and report each through `end`; then wait to be stopped."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller too, which then stops the ranks
    for ending in (signal.SIGTERM, signal.SIGHUP):
        # a Python handler that a fork has from its parent; signals that are ignored stay ignored
        if callable(signal.getsignal(ending)):
            signal.signal(ending, signal.SIG_DFL)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, _stack_file(os.path.dirname(store), rank).open("w", encoding="utf-8"))
    # objects that a fork shares with its parent: the collector would write to them, which copies their pages
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nprocs), LOCAL_WORLD_SIZE=str(nprocs))
    for number, job in enumerate(jobs):
        with _Reporting(end) as report:
            if number == 0:
                _join(rank, nprocs, store, device_type, timeout_s)
            report.value = dumps(job())
    # Wait until the caller has all results and stops us: a rank that leaves early breaks collectives still under way
    # elsewhere.
    time.sleep(timeout_s)


def _join(rank: int, nprocs: int, store: str, device_type: str, timeout_s: float) -> None:
    """Initialise torch.distributed with the other ranks."""
    backend = "gloo"
    if device_type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise RunError(f"{nprocs} ranks on CUDA devices, of which this machine has none")
        torch.cuda.set_device(rank % count)
        backend = "nccl" if nprocs <= count else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=nprocs, timeout=timedelta(seconds=timeout_s)
    )


class _Reporting:
    """A context that reports to the caller when it ends: `value`, or the traceback of the error."""

    def __init__(self, end: Connection) -> None:
        self.end, self.value = end, b""

    def __enter__(self) -> _Reporting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = "" if error is None else "".join(traceback.format_exception(error)).rstrip()
        sys.stdout.flush()
        sys.stderr.flush()
        self.end.send(_Report(error is None, time.time(), self.value, text))
        if error is not None:
            os._exit(1)  # the traceback was handed over: printing it here as well would mix the ranks' texts


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _collect(team: _Team, timeout_s: float) -> list[Any]:
    """The next result of every rank. Raises RunError with the first error."""
    reports: dict[int, _Report] = {}
    deadline, failed = time.monotonic() + timeout_s, False
    while len(reports) < len(team.ends):
        waiting = {end: rank for rank, end in enumerate(team.ends) if rank not in reports}
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        for end in ready:
            rank = waiting[end]  # type: ignore[index]
            reports[rank] = _receive(team.ends[rank], team.children[rank])
            if not reports[rank].ok and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        if not ready:
            break
    _raise_first(reports, team, timeout_s)
    return [pickle.loads(reports[rank].value) for rank in range(len(team.ends))]


def _receive(end: Connection, child: Any) -> _Report:
    """The report of a rank. One that died without a report gets time 0, so that it counts as the first failure: errors
    of other ranks follow from it."""
    try:
        report: _Report = end.recv()
        return report
    except EOFError:
        child.join(GRACE_S)
        code = child.exitcode
        how = (
            f"killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
        return _Report(ok=False, time_s=0.0, value=b"", text=f"the process was {how} without a Python error")


def _raise_first(reports: dict[int, _Report], team: _Team, timeout_s: float) -> None:
    """Raise RunError with the traceback of the first rank that failed, or with the ranks that did not report in
    time."""
    nprocs = len(team.ends)
    errors = sorted((report.time_s, rank) for rank, report in reports.items() if not report.ok)
    if errors:
        rank = errors[0][1]
        raise RunError(f"rank {rank} of {nprocs} failed, all ranks were stopped:\n{reports[rank].text}")
    late = [rank for rank in range(nprocs) if rank not in reports]
    if late:
        raise RunError(
            f"ranks {late} of {nprocs} were not done after {timeout_s:g} s, all ranks were stopped; "
            f"ranks that wait for each other in different collectives look like this{team.stacks(late)}"
        )
