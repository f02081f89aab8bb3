"""Tables of measurements, line by line."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path

from autopar.errors import AutoparError
from benchmarks.costmodel.rows import Loaded, Row

ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, AutoparError)
"""What a line or a plan that is not as its format says comes to."""


class Refused(ValueError):
    """A line that cannot be priced, and why."""


UNKNOWN = ("n/a", "na", "-", "?", "unknown", "null", "tbd")
"""What stands where nothing is known."""


class Line(dict[str, str]):
    """A line by column, without spaces around; a column that the table does not have, that the line ends before, or
    that says that nothing is known, is empty."""

    def __init__(self, cells: dict[str, str]) -> None:
        super().__init__(
            {key: "" if text.strip().lower() in UNKNOWN else text.strip() for key, text in cells.items() if key}
        )

    def __missing__(self, key: str) -> str:
        return ""


def rows_of(path: Path, made: Callable[[Line, str], Row], named: Callable[[Line], str] = lambda line: "") -> Loaded:
    """What `made` makes of each line and its name, which is the place in the file unless `named` says one. Bytes that
    are no text count as one letter each."""
    found = Loaded()
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.DictReader(file, restval="")
        try:
            for number, cells in enumerate(reader, start=2):
                line = Line(cells)
                name = named(line) or f"{path.name}:{number}"
                try:
                    found.rows.append(made(line, name))
                except ERRORS as error:
                    found.refused.append(
                        f"{name}: {error if isinstance(error, Refused) else f'{type(error).__name__} {error}'}"
                    )
        except csv.Error as error:
            found.refused.append(f"{path.name}:{reader.line_num}: the table ends here: {error}")
    return found


def number_of(text: str) -> float:
    """The number that `text` is, thousands apart or not; NaN where it is none."""
    try:
        return float(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    except ValueError:
        return math.nan


def positive(text: str, what: str) -> float:
    """The number that `text` is. Raises Refused unless it is positive and finite."""
    number = number_of(text)
    if not 0 < number < math.inf:
        raise Refused(f"{what} is {text}; wanted a positive number")
    return number


def count(line: Line, key: str, default: int | None = None) -> int:
    """The positive whole number in a column, or `default` where it is empty. Raises Refused where it is none, or empty
    without a default."""
    text = line[key]
    if not text:
        if default is None:
            raise Refused(f"{key} was not published")
        return default
    number = number_of(text)
    if not (number >= 1 and number.is_integer()):
        raise Refused(f"{key} is {text}; wanted a positive whole number")
    return int(number)


def ways(line: Line, key: str, default: int = 1) -> int:
    """The ranks or stages in a column: `default` where it is empty, 1 where it says that there are none apart."""
    return 1 if line[key].lower() in ("0", "none", "no") else count(line, key, default)
