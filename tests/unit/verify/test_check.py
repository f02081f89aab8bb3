"""What is said of a program that is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import RunError
from autopar.verify import check
from autopar.verify.report import Row


def test_wrong_rows_are_told_where_ranks_fail_in_the_search_for_what_differs_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of GPT-2 small it recorded more values than there was room for, and nobody learned what was wrong."""
    case: Any = SimpleNamespace(recorded=dict, source=lambda *, probes: "", rank_case=None)

    def ended(*_: Any) -> None:
        raise RunError("rank 1 of 4 failed, all ranks were stopped:\nthe process was killed by SIGKILL\n")

    monkeypatch.setattr(check, "_on_ranks", ended)
    said = check._first(case, 1e-9, None, [Row("weight", "gradient", 1.0, 1e-9)], {})
    assert said == "no operator: ranks failed in the search for it (the process was killed by SIGKILL)"
