"""The table of decisions: what is printed when."""

from __future__ import annotations

import pytest

from benchmarks.decisions import tell


def test_rows_are_told_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    """One that ends in an error leaves those before it."""

    def broken() -> dict[str, object]:
        raise KeyError("gpt3")

    with pytest.raises(KeyError):
        tell([lambda: {"model": "gpt2"}, broken])
    assert capsys.readouterr().err == "1/2 {'model': 'gpt2'}\n"


def test_the_table_has_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    tell([lambda: {"model": "gpt2"}, lambda: {"model": "bert"}])
    assert capsys.readouterr().out.split() == ["|", "model", "|", "|---------|", "|", "gpt2", "|", "|", "bert", "|"]
