"""The runner, the lint, provenance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from passes import ANNOTATE, NORMALIZE, edit, facts, run
from passes.lint import check_structure, lint
from tests.helpers.export import B, export_graph


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return self.inner(x) * 2


def graph():
    return export_graph(Two(), (), {"x": torch.randn(3, 4)}, {"x": {0: B}})


def test_dump_and_times_and_progress(tmp_path):
    told: list[str] = []
    gm = run(graph(), (*NORMALIZE, *ANNOTATE), dump=tmp_path, progress=told.append)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == len(told) == len(NORMALIZE) + len(ANNOTATE)
    assert names[0] == "00_provenance.txt" and names[-1].endswith("_annotate_memory.txt")
    text = (tmp_path / names[-1]).read_text()
    assert "[b, 4] float32" in text and "flops=32*b" in text and "# inner.0 (test_run.py:" in text
    assert list(gm.meta["pass_s"]) == list(dict.fromkeys(told)) and all(s >= 0 for s in gm.meta["pass_s"].values())


def test_provenance():
    gm = run(graph(), NORMALIZE)
    linear = next(edit.calls(gm, torch.ops.aten.linear.default))
    assert linear.meta["module"] == "inner.0" and linear.meta["source"].startswith("test_run.py:")
    assert facts.where(linear) == f"inner.0 ({linear.meta['source']})"
    weight = linear.args[1]
    assert weight.op == "placeholder" and facts.where(weight) == "inner.0"


def test_errors_are_noted_with_pass_and_node():
    with pytest.raises(ZeroDivisionError) as caught:
        run(graph(), (lambda gm: 1 / 0,))
    assert caught.value.__notes__ == ["in pass <lambda>"]


def test_lint_refuses_a_raw_graph():
    def function(m, x):
        return m.inner(x).add_(1)

    class InPlace(Two):
        forward = function

    gm = run(export_graph(InPlace(), (torch.randn(3, 4),)), (NORMALIZE[0],))
    with pytest.raises(ValueError, match=r"in-place call .* run inplace"):
        lint(gm)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda gm, holder: holder.meta.pop("role"), "has role None"),
        (lambda gm, holder: holder.meta.pop("fqn"), r"has no meta\['fqn'\]"),
        (lambda gm, holder: holder.meta.pop("val"), "has no value"),
        (lambda gm, holder: holder.meta.update(role="input", input="w"), "stands behind a user input"),
        (lambda gm, holder: gm.meta["outputs"].append({}), "wanted one entry each"),
    ],
)
def test_structure_is_checked(spoil, message):
    gm = run(graph(), NORMALIZE)
    check_structure(gm)
    spoil(gm, next(iter(gm.graph.nodes)))
    with pytest.raises(ValueError, match=message):
        check_structure(gm)


def test_sizes_have_friendly_symbols():
    gm = run(graph(), NORMALIZE)
    node = next(edit.calls(gm))
    assert facts.shape(node) == (facts.symbol("b"), 4)
    assert facts.numel(node) == 4 * facts.symbol("b") and facts.nbytes(node) == 16 * facts.symbol("b")
