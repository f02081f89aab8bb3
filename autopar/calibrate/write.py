"""A cluster as the text of a TOML file that `Cluster.parse` reads."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster, Device, Level, Protocol
from autopar.plan import write_atomic


def write(cluster: Cluster, path: str | Path, *about: str) -> None:
    """Write `cluster` to `path`, whole or not at all, under comment lines `about`. Raises PlanError where it cannot be
    written."""
    write_atomic(Path(path), text(cluster, *about))


def text(cluster: Cluster, *about: str) -> str:
    """The file: every field that is not as a new object has it, each with its source."""
    lines = [f"# {line}" for line in about]
    lines += [f"name = {_value(cluster.name)}", "", "[device]"]
    device = _fields(cluster.device)
    lines += [f"{key} = {_value(value)}" for key, value in device.items() if not isinstance(value, Mapping)]
    for key, value in device.items():
        if isinstance(value, Mapping):
            lines += ["", f"[device.{key}]", *(f"{_key(name)} = {_value(each)}" for name, each in value.items())]
    for level in cluster.levels:
        lines += [
            "",
            "[[levels]]",
            *(f"{key} = {_value(value)}" for key, value in _fields(level).items() if key != "protocols"),
        ]
        for protocol in level.protocols:
            lines += [
                "",
                "[[levels.protocols]]",
                *(f"{key} = {_value(value)}" for key, value in _fields(protocol).items()),
            ]
    return "\n".join(lines) + "\n"


def _fields(of: Device | Level | Protocol) -> dict[str, Any]:
    """The fields that differ from their defaults, in order."""
    found = {}
    for field in dataclasses.fields(of):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if (value := getattr(of, field.name)) != default:
            found[field.name] = value
    return found


def _key(name: str) -> str:
    """The name of an entry: as it is where TOML lets it, else in quotes."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    """A text, number or list as TOML. JSON's strings and numbers are TOML's, but for characters that JSON escapes in
    two halves, or not at all."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
