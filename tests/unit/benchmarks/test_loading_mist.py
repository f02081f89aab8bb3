"""Plans and times of Mist's published folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cluster import MeshAxis
from autopar.cluster.mesh import Span
from autopar.cost.comm import collective_s
from benchmarks.costmodel import mist
from benchmarks.costmodel.rows import Peak
from tests.helpers.published_rows import mist_folder, plan


def test_a_plan_of_mist(tmp_path: Path) -> None:
    (row,) = mist.load(mist_folder(tmp_path, plan())).rows
    assert (row.setup.dp, row.setup.pp, row.setup.recompute, row.setup.recompute_share, row.step_s) == (
        2,
        2,
        "full",
        0.25,
        1.5,
    )
    assert row.peaks == (Peak(100 * 2**20, "allocated", 0), Peak(80 * 2**20, "allocated", 1))
    assert row.setup.blocks == (2, 2) and row.setup.again == (1, 0) and row.setup.software.habits.hosted == (0.25, 0.0)


def test_links_of_a_plan_of_mist_are_those_measured_there(tmp_path: Path) -> None:
    described = plan()
    described["hardware"] = {
        "num_nodes": 1,
        "num_gpus_per_node": 4,
        "gpu_gpu_comm_params": [4.5, 0.0, 3.0, 1e-4, 4.0, 4e-4, 5.0, 3e-4],
    }
    (row,) = mist.load(mist_folder(tmp_path, described)).rows
    level = row.cluster.levels[-1]
    pair, quad = (MeshAxis("x", n, (Span(level, n),), row.cluster.device) for n in (2, 4))
    assert collective_s("all_gather", 6e9, pair) == pytest.approx(1e-4 + 3e9 / 3e9) and collective_s(
        "send", 3e9, quad
    ) == pytest.approx(1e-4 + 1.0)
    assert collective_s("all_reduce", 4e9, quad) == pytest.approx(4e-4 + 2 * 3e9 / 4e9)


@pytest.mark.parametrize(
    "described, why",
    [
        (plan(gradient_accumulation_steps=7), "are not 16"),
        ({"model": {}}, "KeyError 'training'"),
        (plan(stage_strategies=[[1, 2, 1, 0, 0, 1, 0.0], [2, 1, 1, 0, 0, 1, 0.0]]), "laid out differently"),
        (plan(stage_strategies=[]), "IndexError"),
        (plan(layer_partitions=[0, 0]), "ZeroDivisionError"),
        (plan() | {"training": {**plan()["training"], "params_dtype": "float17"}}, "params_dtype is float17"),
    ],
)
def test_bad_plans_of_mist(tmp_path: Path, described: dict[str, object], why: str) -> None:
    found = mist.load(mist_folder(tmp_path, described))
    assert not found.rows and why in found.refused[0]


@pytest.mark.parametrize(
    "times, why",
    [
        ({"exec_total_cost": "nan"}, "exec_total_cost is nan"),
        ({"exec_total_cost": "0"}, "exec_total_cost is 0"),
        ([], "AttributeError"),
        ("1.5", "AttributeError"),
        ({"exec_total_cost": "1.5", "exec_stage_peak_reserved_memories": "[1 MB, 2 MB, 3 MB]"}, "more than 2 stages"),
        ({"exec_total_cost": "1.5", "exec_stage_peak_reserved_memories": "[0 MB]"}, "peak of stage 0"),
    ],
)
def test_bad_times_of_mist(tmp_path: Path, times: object, why: str) -> None:
    path = mist_folder(tmp_path, plan())
    (path.parent / mist.SUMMARY).write_text(json.dumps({"one": times}))
    found = mist.load(path)
    assert not found.rows and why in found.refused[0]
