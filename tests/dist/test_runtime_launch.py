"""Ranks are stopped, errors are shown, nothing outlives its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.launch import Ranks, launch


def _rank_and_threads(offset):
    return dist.get_rank() + offset, torch.get_num_threads(), os.getpid()


def test_results_come_in_rank_order_and_ranks_end():
    results = launch(_rank_and_threads, 3, 10)
    assert [r[:2] for r in results] == [(10, 1), (11, 1), (12, 1)]
    assert not any(_alive(pid) for _, _, pid in results)


def test_ranks_are_spawned_where_forks_could_not_differentiate(monkeypatch):
    monkeypatch.setattr(sys.modules[launch.__module__], "_differentiates", lambda: False)
    assert launch(_squared, 2, 3.0) == [6.0, 6.0]
    with Ranks(2) as ranks:
        assert ranks.run(_squared, 4.0) == [8.0, 8.0]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files as Linux lists them")
@pytest.mark.parametrize(
    "start", [lambda: launch(_squared, 64, 3.0), lambda: Ranks(64).run(_squared, 3.0)], ids=["launch", "Ranks"]
)
def test_more_ranks_than_the_system_gives_are_refused_in_words_and_none_is_left(start):
    import resource

    free = sorted(set(range(1024)) - set(map(int, os.listdir("/proc/self/fd"))))
    before, living = (
        resource.getrlimit(resource.RLIMIT_NOFILE),
        {child.pid for child in multiprocessing.active_children()},
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[12], before[1]))
    try:
        with pytest.raises(
            RunError, match=r"cannot start 64 ranks on this machine: Too many open files.*ask for fewer ranks"
        ):
            start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert {child.pid for child in multiprocessing.active_children()} <= living


def _squared(x):
    leaf = torch.tensor(x, requires_grad=True)
    leaf.square().backward()
    return float(leaf.grad)


def test_ranks_on_gpus_need_one():
    if torch.cuda.device_count():
        assert launch(_rank_and_threads, 1, 0, device_type="cuda")[0][0] == 0
        return
    with pytest.raises(RunError, match="1 ranks on CUDA devices, of which this machine has none"):
        launch(_rank_and_threads, 1, 0, device_type="cuda")


def _fails_late_on_0_early_on_2():
    if dist.get_rank() == 2:
        raise ValueError("the cause")
    dist.barrier()


def test_the_first_error_is_shown_with_its_traceback_and_all_stop():
    start = time.monotonic()
    with pytest.raises(RunError, match=r"(?s)rank 2 of 3 failed.*_fails_late_on_0_early_on_2.*ValueError: the cause"):
        launch(_fails_late_on_0_early_on_2, 3)
    assert time.monotonic() - start < 20


def _hangs():
    if dist.get_rank() == 1:
        time.sleep(600)


def test_a_rank_that_hangs_is_stopped():
    with pytest.raises(RunError, match=r"ranks \[1\] of 2 were not done after 2 s"):
        launch(_hangs, 2, timeout_s=2)


def _waits_for_one_that_does_not_come():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))
    else:
        time.sleep(600)


def test_it_is_said_where_ranks_wait():
    with _running(2) as ranks:
        ranks.timeout_s = 1.0
        with pytest.raises(
            RunError,
            match=r"(?s)ranks \[0, 1\] of 2.*rank 0 is at:.*all_reduce.*_waits_for_one.*rank 1 is at:.*_waits_for_one",
        ):
            ranks.run(_waits_for_one_that_does_not_come)


def _running(nprocs):
    """Ranks that have begun: of the time that the next job may take nothing is for that."""
    ranks = Ranks(nprocs)
    ranks.run(_pid, 0)
    return ranks


def _killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_without_a_python_error_is_named():
    with pytest.raises(RunError, match=r"rank 1 of 2 failed[^\n]*\nthe process was killed by SIGKILL"):
        launch(_killed, 2)


def test_no_rank_is_an_error():
    with pytest.raises(RunError, match="cannot launch 0 ranks"):
        launch(_hangs, 0)


_PARENT = """
import os, sys, time
from autopar.runtime.launch import Ranks, launch
def body():
    os.write(1, f"{os.getpid()}\\n".encode())  # at once: two ranks write to one pipe
    time.sleep(600)
launch(body, 2)
"""


def test_ranks_end_when_their_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(_alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, pids))


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _pid(offset):
    total = torch.full((), dist.get_rank())
    dist.all_reduce(total)
    return int(total) + offset, os.getpid()


def _fails_on_1():
    if dist.get_rank() == 1:
        raise ValueError("a job that fails")
    dist.barrier()


def test_living_ranks_do_many_jobs_and_end():
    with Ranks(3) as ranks:
        first, second = ranks.run(_pid, 10), ranks.run(_pid, 20)
        assert [r[0] for r in first] == [13] * 3 and [r[0] for r in second] == [23] * 3
        assert [r[1] for r in first] == [r[1] for r in second]
        assert all(_alive(pid) for _, pid in first)
    assert not any(_alive(pid) for _, pid in first)


@pytest.mark.parametrize(
    ("job", "said"), [(_fails_on_1, "ValueError: a job that fails"), (_killed, "killed by SIGKILL")]
)
def test_a_job_that_fails_on_living_ranks_is_told_and_the_next_has_new_ones(job, said):
    with Ranks(2) as ranks:
        before = ranks.run(_pid, 0)
        with pytest.raises(RunError, match=rf"(?s)rank 1 of 2 failed.*{said}"):
            ranks.run(job)
        assert not any(_alive(pid) for _, pid in before)
        after = ranks.run(_pid, 0)
        assert [r[0] for r in after] == [1, 1]
        assert not {pid for _, pid in before} & {pid for _, pid in after}


def test_living_ranks_that_hang_are_stopped():
    with _running(2) as ranks:
        ranks.timeout_s = 0.5
        with pytest.raises(RunError, match=r"ranks \[1\] of 2 were not done after 0.5 s"):
            ranks.run(_hangs)
