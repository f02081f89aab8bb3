"""Work on its way in the background: what waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.deferred_waits import Queue


@dataclass(eq=False)
class _Part:
    """Work of `parts` collectives, of 10 bytes each; `log` says which were waited for."""

    name: str
    log: list[str]
    parts: int = 1
    nbytes: float = field(default=10.0)

    @property
    def more(self) -> bool:
        return self.parts > 1

    def go_on(self) -> bool:
        self.log.append(self.name)
        self.parts -= 1
        return self.parts > 0

    def wait(self) -> None:
        self.log.append(f"dropped {self.name}")


def test_a_block_waits_for_none_of_its_own() -> None:
    log: list[str] = []
    queue = Queue(limit_bytes=15)
    for name in ("a1", "a2", "a3"):
        queue.add(_Part(name, log), "a")
    assert log == []
    queue.add(_Part("b1", log), "b")
    assert log == ["a1", "a2"]  # behind the third are 10 bytes
    queue.add(_Part("b2", log), "b")
    assert log == ["a1", "a2", "a3"]
    queue.drain()
    assert log == ["a1", "a2", "a3", "b1", "b2"]


def test_what_has_more_parts_waits_with_the_later_block() -> None:
    log: list[str] = []
    queue = Queue(limit_bytes=5)
    queue.add(_Part("a", log, parts=2), "a")
    queue.add(_Part("b", log), "b")
    assert log == ["a"]
    queue.add(_Part("c", log), "c")
    assert log == ["a", "b", "a"]


def test_next_parts_of_small_blocks_begin_when_a_block_is_behind_them() -> None:
    """All second collectives of a model whose blocks are 38 MB together ran when the backward was over, one by one.
    What has no other part waits as long as it may."""
    log: list[str] = []
    queue = Queue(limit_bytes=100)
    queue.add(_Part("a1", log, parts=2), "a")
    queue.add(_Part("a2", log), "a")
    queue.add(_Part("b1", log, parts=2), "b")
    assert log == []  # 20 bytes are behind it, as many as a has added
    queue.add(_Part("b2", log), "b")
    assert log == ["a1"]
    queue.add(_Part("c", log), "c")
    assert log == ["a1", "b1"]  # behind it were 30: the other part of a1 is one of them
    queue.drain()
    assert log == ["a1", "b1", "a2", "b2", "a1", "c", "b1"]


def test_next_parts_wait_for_what_is_large_in_front_of_them() -> None:
    """The gradient of a norm behind that of a head: its second collective begins when its first one has come, behind
    the head's."""
    log: list[str] = []
    queue = Queue(limit_bytes=100)
    queue.add(_Part("head", log, parts=2, nbytes=60.0), "head")
    queue.add(_Part("norm", log, parts=2, nbytes=1.0), "norm")
    for number in range(5):
        queue.add(_Part("block", log), f"block {number}")
    assert log == []  # 50 bytes behind
    for number in range(5, 7):
        queue.add(_Part("block", log), f"block {number}")
    assert log[:2] == ["head", "norm"]


def test_what_is_dropped_is_waited_for() -> None:
    log: list[str] = []
    queue = Queue(limit_bytes=100)
    queue.add(_Part("a", log, parts=2), "a")
    queue.drop()
    queue.drain()
    assert log == ["dropped a"]
