"""`load_rules`: the RULES argument of the command line, `path/to/file.py` or `path/to/file.py:NAME`, to rules of the
user's own operators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import RuleError
from autopar.frontend.factory import import_file
from autopar.rules import as_rules
from autopar.rules.rule import Rule

NAME = "RULES"
"""What the dict of rules is called in a file of which no name is given."""


def load_rules(spec: str) -> dict[Any, Rule]:
    """The rules that `spec` names, by operator; none where it is empty. Call it when the model is made: its file may
    register the operators. Raises RuleError where there are none; what the user's own code raises goes through as it
    is."""
    if not spec:
        return {}
    place, name = spec.rsplit(":", 1) if not spec.endswith(".py") and ":" in spec else (spec, NAME)
    path = Path(place)
    if path.suffix != ".py" or not path.is_file():
        raise RuleError(
            f"rules {spec!r}: no Python file {place} (looked from {Path.cwd()}); wanted path/to/file.py, which has a "
            f"dict {NAME}, or path/to/file.py:NAME"
        )
    module = import_file(path, spec)
    found = getattr(module, name, None)
    if not isinstance(found, Mapping):
        wrong = f"has no {name}" if found is None else f"has {name}, but it is {type(found).__name__}"
        raise RuleError(
            f"rules {spec!r}: {place} {wrong}; wanted a dict of operators and rule strings, as {NAME} = "
            f"{{torch.ops.mine.scale: 'b d -> b d'}}"
        )
    return as_rules(found)
