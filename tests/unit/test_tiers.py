"""The list of tests that take too long for the fast tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import tiers

ROOT = Path(__file__).resolve().parents[2]
IDS = st.builds("tests/test_x.py::test_{}[{}]".format, st.sampled_from("abc"), st.integers(0, 20))


@given(st.dictionaries(IDS, st.floats(0, 20)))
def test_what_stays_is_quick_and_every_test_has_a_case_that_stays_unless_none_is_quick(
    took_s: dict[str, float],
) -> None:
    long = tiers.too_long(took_s)
    for name in {one.split("[")[0] for one in took_s}:
        cases = {one: s for one, s in took_s.items() if one.startswith(f"{name}[")}
        stay = {one: s for one, s in cases.items() if one not in long}
        assert bool(stay) == (min(cases.values()) <= tiers.ALONE_S)
        # the quicker ones
        assert all(s <= min([t for one, t in cases.items() if one in long], default=s) for s in stay.values())
        slower = sorted(s for s in stay.values() if s > tiers.QUICK_S)
        assert sum(slower) <= max(tiers.TOGETHER_S, min(cases.values())) + tiers.QUICK_S * len(cases)


def test_files_of_pytest_are_read_and_the_list_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took = tmp_path / "took.xml"
    took.write_text(
        '<testsuites><testsuite><testcase classname="tests.unit.test_x" name="test_a[1]" time="11.5"/><testcase '
        'classname="tests.unit.test_x" name="test_b"/></testsuite></testsuites>'
    )
    assert tiers.durations(took) == {"tests/unit/test_x.py::test_a[1]": 11.5, "tests/unit/test_x.py::test_b": 0.0}
    monkeypatch.setattr(tiers, "LONG", tmp_path / "long.txt")
    tiers.write(tiers.too_long(tiers.durations(took)))
    assert tiers.listed() == {"tests/unit/test_x.py::test_a[1]"}


def test_what_is_listed_is_there(pytestconfig: pytest.Config) -> None:
    """Of files that were collected whole: where a case has another id than in the list, it runs in the fast tier."""
    collected = pytestconfig.stash[tiers.COLLECTED]
    whole = {name.split("::")[0] for name in collected} - {
        arg.split("::")[0] for arg in pytestconfig.args if "::" in arg
    }
    files = {name.split("::")[0] for name in tiers.listed()}
    assert not [file for file in sorted(files) if not (ROOT / file).is_file()]
    assert not sorted(name for name in tiers.listed() if name.split("::")[0] in whole and name not in collected)
