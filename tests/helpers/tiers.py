"""Which tests take too long for the fast tier, by what they took: `tests/long.txt`, a line for each.

    # adds those that take too long now
    pytest -m 'not slow and not gpu' --junitxml=took.xml && python -m tests.helpers.tiers took.xml
    # of a run with all of them: the list is made anew
    python -m tests.helpers.tiers took.xml --anew

Of the cases of one test the quickest stays in the fast tier, unless it alone is too long, and further ones as long as
all that stay are quick together, or they are by themselves. What is listed runs with the slow ones (`make test-all`).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autopar.plan import write_atomic

LONG = Path(__file__).resolve().parents[1] / "long.txt"
ALONE_S = 5.0
"""Of the quickest case of a test; in seconds of a run of two workers on two cores with nothing beside."""
TOGETHER_S = 1.5
"""Of the cases of one test that stay, where it has several."""
QUICK_S = 0.2
"""Of a case that stays whatever the others take."""
COLLECTED = pytest.StashKey[frozenset[str]]()
"""The ids of all tests that a run collected, before some are chosen by their marks."""


def listed() -> set[str]:
    """The ids in the list."""
    return {line for line in LONG.read_text().splitlines() if line and not line.startswith("#")}


def too_long(took_s: Mapping[str, float]) -> list[str]:
    """The ids of the tests for the slow tier, of those that `took_s` seconds by id, in the order of ids."""
    cases = defaultdict(list)
    for name, seconds in took_s.items():
        cases[name.split("[")[0]].append((seconds, name))
    found = []
    for of_one in cases.values():
        together_s, stay = 0.0, 0
        for seconds, name in sorted(of_one):
            if seconds <= QUICK_S or (seconds <= ALONE_S if not stay else together_s + seconds <= TOGETHER_S):
                together_s, stay = together_s + seconds, stay + 1
            else:
                found.append(name)
    return sorted(found)


def durations(file: Path) -> dict[str, float]:
    """Seconds by id of a JUnit file that pytest wrote."""
    found = {}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        found[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = float(case.get("time", 0))
    return found


def write(names: Iterable[str]) -> None:
    """The list, of `names`."""
    head = "# Tests that take too long for the fast tier; `tests/helpers/tiers.py` writes it and says how.\n"
    write_atomic(LONG, head + "".join(f"{name}\n" for name in sorted(names)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("took", type=Path, help="JUnit file of a run")
    parser.add_argument("--anew", action="store_true", help="forget the list that there is")
    given = parser.parse_args()
    write({*too_long(durations(given.took)), *(() if given.anew else listed())})


if __name__ == "__main__":
    main()
