"""Cluster descriptions from text, TOML files and plain dicts, and back."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from autopar.cluster.check import check_keys, check_number, fail, whole
from autopar.cluster.mixed import join
from autopar.cluster.presets import preset_path, presets
from autopar.cluster.this_machine import here
from autopar.cluster.types import Cluster, Device, Level, Protocol
from autopar.errors import ClusterError
from autopar.text import near
from autopar.text import sizes as sizes_of

LINK = "link"  # the level that joins the parts of a cluster


def parse(text: str | Path) -> Cluster:
    """See `Cluster.parse`."""
    if not isinstance(text, (str, Path)):
        raise ClusterError(
            f"cluster {text!r} ({type(text).__name__}): wanted text, as 'h100:1x8' or 'cpu:1x4', or the path of a "
            ".toml file"
        )
    if isinstance(text, Path) or (text.endswith(".toml") and ("+" not in text or Path(text).is_file())):
        return read_file(Path(text))
    if "+" in text:
        return together([_one(piece.strip(), text) for piece in text.split("+")])
    return _one(text, text)


def together(parts: list[Cluster]) -> Cluster:
    """Parts as one cluster: neighbours that differ only in how many nodes they have are one part."""
    found: list[Cluster] = []
    for part in parts:
        last = found[-1] if found else None
        if (
            last is not None
            and len(part.levels) > 1
            and part == dataclasses.replace(last, levels=(part.levels[0], *last.levels[1:]))
        ):
            nodes = dataclasses.replace(part.levels[0], size=last.levels[0].size + part.levels[0].size)
            found[-1] = dataclasses.replace(last, levels=(nodes, *last.levels[1:]))
        else:
            found.append(part)
    return found[0] if len(found) == 1 else join(found)


def _one(text: str, whole: str) -> Cluster:
    """One cluster, or one part of `whole`."""
    if text.endswith(".toml"):
        return read_file(Path(text))
    if text == "here":
        return parse(here())
    name, colon, sizes = text.rpartition(":") if ".toml:" in text else text.partition(":")
    path = Path(name) if name.endswith(".toml") else preset_path(name)
    if path is None:
        raise ClusterError(
            f"cluster {whole!r}: there is no preset {name!r}; known: {', '.join(presets())}, or the path of a "
            f".toml file, or 'here'{near(name, (*presets(), 'here'))}"
        )
    cluster = read_file(path)
    return resize(cluster, sizes, whole) if colon else cluster


def resize(cluster: Cluster, sizes: str, text: str) -> Cluster:
    """`cluster` with the level sizes `"8x8"`; fewer sizes than levels mean one of each outer level."""
    if cluster.parts:
        raise ClusterError(
            f"cluster {text!r}: {cluster.label} has parts of {' and '.join(part.label for part in cluster.parts)}, "
            f"each with sizes of its own, so {sizes!r} cannot be said of all of it; write the sizes into the file"
        )
    found = sizes_of(sizes)
    if found is None or len(found) > len(cluster.levels):
        names = " x ".join(level.name for level in cluster.levels)
        raise ClusterError(
            f"cluster {text!r}: {sizes!r} does not name sizes of {names}; wanted for example "
            f"{cluster.name}:{'x'.join('2' for _ in cluster.levels)}"
        )
    numbers = [1] * (len(cluster.levels) - len(found)) + [*found]
    levels = (dataclasses.replace(level, size=n) for level, n in zip(cluster.levels, numbers, strict=True))
    return dataclasses.replace(cluster, levels=tuple(levels))


def read_file(path: Path) -> Cluster:
    """The cluster in a TOML file. With `base = "h100:4x8"` the file, or one of its parts, gives only what differs from
    that preset.

    Raises ClusterError that names the file when it cannot be read, is not TOML or describes no cluster.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(f"cluster file {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"cluster file {path}: is not TOML: {error}") from error
    try:
        return from_dict(data)
    except ClusterError as error:
        raise ClusterError(f"cluster file {path}: {error}") from error


def _rebase(data: dict[str, Any]) -> dict[str, Any]:
    """`data` laid over its base preset: device keys and the entries of its tables one by one, levels by their name."""
    check_keys(data, "the file", ("base", "name"), ("device", "levels"))
    if not isinstance(data["base"], str) or ".toml" in data["base"] or "+" in data["base"]:
        fail("the file", "base", data["base"], "a preset, for example 'h100:4x8'")
    merged = parse(data["base"]).to_dict() | {"name": data["name"]}
    device = data.get("device", {})
    check_keys(device, "device", (), _names(Device))
    for key, value in device.items():
        below = merged["device"][key]
        merged["device"][key] = (
            _laid_over(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
        )
    levels, seen = {level["name"]: level for level in merged["levels"]}, dict[str, None]()
    for change in _listed(data.get("levels", [])):
        check_keys(change, "levels", ("name",), (*_names(Level), "latency_s"))
        if not isinstance(change["name"], str) or change["name"] not in levels:
            hint = near(str(change["name"]), levels)
            fail("levels", "name", change["name"], f"a level of {data['base']}: {', '.join(levels)}{hint}")
        if change["name"] in seen:
            fail("levels", "name", change["name"], "each level once")
        seen[change["name"]] = None
        if "latency_s" in change:
            levels[change["name"]].pop("protocols")
        levels[change["name"]].update(change)
    return merged


def from_dict(data: dict[str, Any]) -> Cluster:
    """See `Cluster.from_dict`."""
    if isinstance(data, dict) and "parts" in data:
        return _of_parts(data)
    if isinstance(data, dict) and "base" in data:
        data = _rebase(data)
    check_keys(data, "cluster", ("name", "device", "levels"), ("base", "parts"))  # of these two none is left here
    return Cluster(data["name"], tuple(_level(level) for level in _listed(data["levels"])), _device(data["device"]))


def _listed(levels: Any) -> list[Any]:
    if not isinstance(levels, list):
        fail("cluster", "levels", levels, "a list of levels; in a file each begins with [[levels]]")
    return levels


def _of_parts(data: dict[str, Any]) -> Cluster:
    """A cluster that lists its parts, each as a file of its own would have it (without a name it has that of its
    base)."""
    check_keys(data, "cluster", ("parts",), ("name", "link"))
    if not isinstance(data["parts"], list) or len(data["parts"]) < 2:
        fail("cluster", "parts", data["parts"], "a list of two or more tables")
    if not isinstance(data.get("name", ""), str):
        fail("cluster", "name", data["name"], "text")
    link = (
        _level({"name": LINK, "size": 1, **data["link"]})
        if isinstance(data.get("link", {}), dict) and "link" in data
        else None
    )
    if "link" in data and link is None:
        fail("cluster", "link", data["link"], "a table with bandwidth_bytes_s and latency_s")
    return join([_part(number, part) for number, part in enumerate(data["parts"])], link, data.get("name", ""))


def _part(number: int, data: Any) -> Cluster:
    try:
        if isinstance(data, dict) and "base" in data and "name" not in data:
            data = {**data, "name": str(data["base"]).partition(":")[0]}
        return from_dict(data)
    except ClusterError as error:
        raise ClusterError(f"part {number}: {error}") from error


def to_dict(cluster: Cluster) -> dict[str, Any]:
    """See `Cluster.to_dict`; of parts each by itself, not what they amount to together."""
    if not cluster.parts:
        return _plain(
            {key: value for key, value in dataclasses.asdict(cluster).items() if key in ("name", "levels", "device")}
        )
    link = {} if cluster.link is None else {"link": _plain(dataclasses.asdict(cluster.link))}
    return {"name": cluster.name, "parts": [to_dict(part) for part in cluster.parts], **link}


def _laid_over(table: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`table` with the entries of `change`, without those that it says are `false`."""
    return {key: value for key, value in (table | change).items() if value is not False}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _device(data: Any) -> Device:
    _check(Device, data, "device")
    shape = data.get("best_shape")
    if shape is not None and not (isinstance(shape, list) and all(type(n) is int for n in shape)):
        fail("device", "best_shape", shape, "a list of three whole numbers")
    for key in ("peak_flops", "achievable_of", "sources"):
        if not isinstance(data.get(key, {}), dict):
            fail("device", key, data[key], "a table")
    fields = _names(Device)
    for name, text in data.get("sources", {}).items():
        if not isinstance(text, str):
            fail("device", f"sources.{name}", text, "text")
        # other keys are notes of the file's author
        if name.partition(".")[0] not in fields and (hint := near(name, fields)):
            fail("device", "sources", name, f"the name of a field as a key{hint}")
    pairs = {
        key: data[key] for key in ("attention", "unaligned") if key in data and (key, data[key]) != ("attention", None)
    }
    for key, pair in pairs.items():
        if not (isinstance(pair, list) and all(type(share) in (int, float) for share in pair)):
            fail(
                "device",
                key,
                pair,
                "a list of two shares of the peak" if key == "attention" else "a list of two shares of the rate",
            )
    return Device(
        **(
            whole(data)
            | {
                "best_shape": tuple(shape) if shape is not None else None,
                **{key: tuple(pair) for key, pair in pairs.items()},
            }
        )
    )


def _level(data: Any) -> Level:
    where = f"level {data.get('name')!r}" if isinstance(data, dict) else "level"
    required = tuple(name for name in _names(Level, required=True) if name != "protocols")
    check_keys(data, where, required, (*_names(Level), "latency_s"))
    if ("latency_s" in data) == ("protocols" in data):
        raise ClusterError(f"{where}: give either latency_s or protocols")
    rest = {key: value for key, value in whole(data).items() if key not in ("latency_s", "protocols")}
    if "latency_s" in data:
        return Level(**rest, protocols=_default_protocols(where, data["latency_s"]))
    if not isinstance(data["protocols"], list):
        fail(where, "protocols", data["protocols"], "a list of tables")
    return Level(**rest, protocols=tuple(_protocol(row, where) for row in data["protocols"]))


def _protocol(data: Any, where: str) -> Protocol:
    _check(Protocol, data, f"{where}, protocol")
    kinds = data.get("kinds", [])
    if not isinstance(kinds, list):
        fail(f"{where}, protocol {data['name']!r}", "kinds", kinds, "a list of collectives")
    return Protocol(**(whole(data) | {"kinds": tuple(kinds)}))


def _default_protocols(where: str, latency_s: Any) -> tuple[Protocol, ...]:
    """What a level gets that states only a latency: 80 % of the link, as 8 x H100 and 8 x A100 reach (0.81, 0.78)."""
    check_number(where, "latency_s", latency_s, "latency_s")
    return tuple(
        Protocol(name, name, latency_s, latency_s, 0.8, "default: 80 % of the link")
        for name in ("ring", "tree", "direct")
    )


def _check(cls: type, data: Any, where: str) -> None:
    check_keys(data, where, _names(cls, required=True), _names(cls, required=False))


def _names(cls: type, required: bool | None = None) -> tuple[str, ...]:
    """Field names of a dataclass: all, or those with (False) or without (True) a default."""
    missing = dataclasses.MISSING
    return tuple(
        f.name
        for f in dataclasses.fields(cls)
        if required is None or required == (f.default is missing and f.default_factory is missing)
    )
