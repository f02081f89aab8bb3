"""Work on its way in the background: what waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.late import Queue


@dataclass(eq=False)
class _Part:
    """Work of `parts` collectives, of 10 bytes each; `log` says which were waited for."""

    name: str
    log: list[str]
    parts: int = 1
    nbytes: float = field(default=10.0)

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


def test_what_is_dropped_is_waited_for() -> None:
    log: list[str] = []
    queue = Queue(limit_bytes=100)
    queue.add(_Part("a", log, parts=2), "a")
    queue.drop()
    queue.drain()
    assert log == ["dropped a"]
