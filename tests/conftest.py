"""What all tests have in common."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: some operators' results and sizes differ by threads

from tests.helpers import tiers
from tests.helpers.examples import USUAL

settings.register_profile("without deadlines", deadline=None)  # seconds of one example say how busy the machine is
# of `make test`, which judges a change: the same examples every time, and a third of them
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=USUAL // 3)
settings.load_profile("without deadlines")  # of all else, which looks for what is wrong: new examples every time
# most of what capturing and planning makes lives on: to look through it seldom is enough
gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def what_stays_is_not_garbage() -> Iterator[None]:
    """Models captured for one file are kept for the next ones. Python's collector would walk all of them again and
    again, in the end for most of the time of a test."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the list are slow."""
    long = tiers.listed()
    config.stash[tiers.COLLECTED] = frozenset(item.nodeid for item in items)
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.slow)


TOGETHER = {
    "ranks": ("dist",),
    "plans": ("codegen", "decisions", "joint", "memory", "pipeline", "problem", "report", "simulate"),
}
"""Folders whose tests share captured models, and those of the first one living ranks: one worker has all of each."""


class ByFile(LoadFileScheduling):
    """File by file, but for TOGETHER."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(super()._split_scope(nodeid))
        return next((name for name, folders in TOGETHER.items() if file.parent.name in folders), str(file))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """What `--dist loadfile` means here."""
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None
