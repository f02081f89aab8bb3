"""Errors planted in the emitted source: verification must fail and name the first node that goes wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.verify import Report
from autopar.verify.probe import first_difference
from tests.helpers.ranks import living
from tests.helpers.verify import Sizes, Subject, by_chance, by_recipe, by_stages, planned, subject


def _verified(name: str, sizes: Sizes, recipe: str, mutate: Callable[[str], str], *, later: bool = False) -> Report:
    return subject(name).verified(by_recipe(subject(name), sizes, recipe), mutate=mutate, later=later)


def _swap(old: str, new: str) -> Callable[[str], str]:
    """Replace the first match of the pattern `old`; there must be one."""

    def mutate(source: str) -> str:
        changed, times = re.subn(old, new, source, count=1)
        assert times == 1, f"nothing in the source matches {old}:\n{source}"
        return changed

    return mutate


# what is planted -> model, mesh, recipe, the change, the node that is to be named
PLANTED = {
    # the partial gradients of a column-parallel product are taken for whole ones
    "wrong gradient layout": (
        "gpt",
        (2, 2),
        "tp_zero3",
        _swap(r'(reshard\(layer_norm\w*, "[^"]*", grad="(?:\w+,)*)P((?:,\w+)* -> )', r"\1R\2"),
        r"blocks_0/layer_norm\w* \(gradient, block 1\)",
    ),
    # a row-parallel product is not summed up
    "missing reduction": (
        "gpt",
        (2, 2),
        "tp_zero3",
        _swap(r'(linear_default_\d_2 = reshard\(linear_default_\d, "(?:\w+,)*)P((?:,\w+)* -> )', r"\1R\2"),
        r"blocks_0/add_1 \(value, block 0\)",
    ),
    # every rank divides by its own number of labels
    "mean of means": (
        "hf-gpt2",
        (4,),
        "ddp",
        _swap(r"count_valid__2 = reshard\(count_valid_, .*", "count_valid__2 = count_valid_ * 4"),
        r"div_tensor \(value\)",
    ),
    # the gradients of one weight stay those of the rank's own samples
    "missing sync axis": (
        "mlp",
        (4,),
        "ddp",
        _swap(r'("head.weight": Param\(\(10, 64\), "float64", "R"), sync=\(0,\)', r"\1"),
        "no operator: a parameter's gradient",
    ),
    # what blocks give is taken from the graph of gradients, all of them or of one branch: gradients are missing, not
    # different
    "no gradient to any block": (
        "gpt",
        (2, 2),
        "tp_zero3",
        _swap(r"(h_2 = reshard\(h)", r"\1.detach()"),
        r"blocks_0/add_2 \(gradient, block 1\)",
    ),
    "no gradient to a branch": (
        "gpt",
        (2, 2),
        "tp_zero3",
        _swap(r"(add_2_2 = add_1 \+ linear_default_3_2)", r"\1.detach()"),
        r"blocks_0/linear_default_3 \(gradient, block 1\)",
    ),
    # the others do not wait for it in the search
    "no gradient on one rank": (
        "mlp",
        (2,),
        "tp",
        _swap(r"(h = gelu)\n", r"\1 if MESH.coord[0] else gelu.detach()\n"),
        r"gelu \(gradient\)",
    ),
    # every rank adds the bias of a row-parallel product
    "bias of every rank": (
        "gpt",
        (2,),
        "tp",
        _swap(r"(attention_proj_bias = )reshard.*", r'\1self.w["attention.proj.bias"]'),
        r"blocks_0/linear_default_1 \(value, block 0\)",
    ),
    # sums of products in float32
    "narrow sums": (
        "gpt",
        (2,),
        "tp",
        _swap(
            r"F.linear\(gelu, (self\S+), mlp_down_bias\)",
            r"F.linear(gelu.float(), \1.float(), mlp_down_bias.float()).double()",
        ),
        r"blocks_0/linear_default_3 \(value, block 0\)",
    ),
    "dropped bias gradient": (
        "gpt",
        (2,),
        "tp",
        _swap(r"(mlp_down_bias = reshard\(self\S+\])", r"\1.detach()"),
        "no operator: a parameter's gradient is missing",
    ),
    "blocks in another order": (
        "gpt",
        (2,),
        "tp",
        _swap(r"enumerate\((self.runs\['blocks_0'\])\)", r"enumerate(reversed(\1))"),
        r"blocks_0/linear_default \(value, block 0\)",
    ),
    # the gathered weight's gradient is cut where it should be summed and cut
    "sliced weight gradient": (
        "mlp",
        (4,),
        "zero3",
        _swap(r'(gather\(self.w\["linear.weight"\].*)grad="P -> ', r'\1grad="R -> '),
        "no operator: a parameter's gradient",
    ),
}


KEEP = (
    "KEPT = {}\n\n\ndef kept(name, value):\n    return value + (KEPT.setdefault(name, value.detach().clone()) - "
    "value.detach())\n\n\ndef once(name):\n    KEPT[name] = KEPT.get(name, 0) + 1\n    return KEPT[name] == "
    "1\n\n\nMESH = "
)
"""Functions for planted sources: the first value that a name was given, with the gradient of the present one; whether
it is the first call."""


def _keeping(old: str, new: str) -> Callable[[str], str]:
    return lambda source: _swap("MESH = ", KEEP)(_swap(old, new)(source))


# of a program that is right in its first step -> model, recipe, the change, what is wrong, a row that says so
LATER = {
    "stale weight": (
        "mlp",
        "ddp",
        _keeping(r'F.linear\(h, self.w\["head.weight"\]', 'F.linear(h, kept("w", self.w["head.weight"])'),
        "the forward of a second step",
        "loss, of a second batch",
    ),
    "stale labels": (
        "mlp",
        "tp",
        _keeping(r"cross_entropy_sum\((\w+), targets", r'cross_entropy_sum(\1, KEPT.setdefault("t", targets)'),
        "the forward of a second step",
        "loss, of a second batch",
    ),
    "gradient of the first step alone": (
        "mlp",
        "ddp",
        _keeping(
            r'F.linear\(h, self.w\["head.weight"\], self.w\["head.bias"\]\)',
            'F.linear(h, self.w["head.weight"], self.w["head.bias"] if once("b") else self.w["head.bias"].detach())',
        ),
        "the backward of a second step",
        "head.bias, of two batches added up",
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_what_is_wrong_behind_the_first_step_is_found(name: str) -> None:
    model, recipe, mutate, what, row = LATER[name]
    report = _verified(model, (2,), recipe, mutate, later=True)
    wrong = {row.title for row in report.rows if not row.ok}
    assert row in wrong and report.first.startswith(f"none in the first step: wrong is {what}"), (report.first, wrong)


def test_a_pipeline_that_keeps_a_weight_of_its_first_step_is_found() -> None:
    who = subject("mlp")
    stale = _keeping(r'(F.linear\(\w+, )self.w\["head.weight"\]', r'\1kept("w", self.w["head.weight"])')
    report = who.verified(by_stages(who, (1,), "single", 2, 2, "gpipe"), mutate=stale)
    assert "loss, of a second batch" in {row.title for row in report.rows if not row.ok}
    assert report.first.startswith("none in the first step: wrong is the forward of a second step"), report.first


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found_and_located(name: str) -> None:
    model, sizes, recipe, mutate, node = PLANTED[name]
    report = _verified(model, sizes, recipe, mutate)
    assert not report.ok
    assert re.match(node, report.first), f"named {report.first!r}, wanted {node!r}"


# of pipelines: what is planted -> how it is cut into stages, the change, the node that is to be named
ONE_F_ONE_B, V_SHAPED = ((2,), "tp", 2, 2, "1f1b"), ((1,), "single", 2, 4, "zbv_zero_bubble", 2)
STAGED = {
    "missing reduction": (
        ONE_F_ONE_B,
        _swap(r'(linear_default_3_2 = reshard\(linear_default_3, ")P', r"\1R"),
        r"blocks_0/add_2 \(value, block 0\)",
    ),
    "another norm in the last stage": (
        ONE_F_ONE_B,
        _swap(r"(layer_norm_4 = .*), 1e-05\)", r"\1, 1e-02)"),
        r"layer_norm_4 \(value\)",
    ),
    "another total over the batch": (
        ONE_F_ONE_B,
        _swap(r"(count_valid_ = count_valid)\((.*)\)  ", r"\1(\2) * 2  "),
        r"count_valid \(value\)",
    ),
    "blocks of the last stage without their biases": (
        ONE_F_ONE_B,
        _swap(
            r"(?s)(class Stage1.*?)(for block in [^\n]*\n)",
            r"\1\2            block.w['mlp.up.bias'] = torch.zeros_like(block.w['mlp.up.bias'])\n",
        ),
        r"blocks_0/linear_default_2 \(value, block 1\)",
    ),
    "wrong gradient layout": (
        ONE_F_ONE_B,
        _swap(r'(reshard\(layer_norm_1, "R -> R", grad=")P', r"\1R"),
        r"blocks_0/layer_norm_1 \(gradient, block 1\)",
    ),
    "no gradient to a branch": (
        V_SHAPED,
        _swap(r"(add_2_?2? = add_1 \+ linear_default_3)", r"\1.detach()"),
        r"blocks_0/linear_default_3 \(gradient, block 1\)",
    ),
    "no gradient in the first stage": (
        ONE_F_ONE_B,
        _swap(r"(embedding = F.embedding\(ids, tokens_weight\))", r"\1.detach()"),
        r"embedding \(gradient\)",
    ),
    "wrong sums of microbatches": (
        V_SHAPED,
        _swap(r"(cross_entropy_sum_? = .*)  #", r"\1 / 4  #"),
        r"cross_entropy_sum\w* \(value\)",
    ),
}


@pytest.mark.parametrize("name", STAGED)
def test_a_planted_error_in_a_stage_is_located(name: str) -> None:
    how, mutate, node = STAGED[name]
    who = subject("gpt")
    report = who.verified(by_stages(who, *how), mutate=mutate, later=False)
    assert not report.ok and re.match(node, report.first), f"named {report.first!r}, wanted {node!r}"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gpt", ONE_F_ONE_B),
        ("hf-gpt2", V_SHAPED),
        *(
            pytest.param(name, how, marks=pytest.mark.slow)
            for name, how in (
                ("hf-t5", ((1,), "single", 2, 4, "dualpipev", 2)),
                ("hf-vit", ((2,), "ddp", 2, 4, "zbv_zero_bubble", 2)),
                ("hf-mixtral", ((1,), "single", 1, 4, "gpipe")),
                ("hf-llama-2kv", ((2,), "zero3", 2, 2, "interleaved_1f1b", 2)),
                ("hf-bert", ((2, 2), "hsdp", 2, 2, "1f1b")),
            )
        ),
    ],
)
def test_probes_of_a_right_pipeline_name_nothing(name: str, how: tuple[Any, ...]) -> None:
    who = subject(name)
    made = by_stages(who, *how)
    case = who.case(made)
    assert not any(
        living(made.ranks).run(first_difference, case.source(probes=True), case.rank_case, case.recorded(), 1e-9)
    )


def test_the_unchanged_source_is_right() -> None:
    for model, sizes, recipe in dict.fromkeys((m, s, r) for m, s, r, *_ in PLANTED.values()):
        report = _verified(model, sizes, recipe, str)
        assert report.ok and report.first == "", report.worst


@pytest.mark.parametrize(("name", "sizes", "how"), [("gpt", (2, 2), "tp_zero3"), ("hf-mixtral", (2, 2), "random 1")])
def test_probes_of_a_right_program_name_nothing(name: str, sizes: Sizes, how: str) -> None:
    """Weights that are turned and then gathered, or summed at the end of the backward, among them."""
    who = subject(name)
    made = planned(who, sizes, how)
    case = who.case(made)
    assert not any(
        living(made.ranks).run(first_difference, case.source(probes=True), case.rank_case, case.recorded(), 1e-9)
    )


def test_probes_see_gradients_of_weights_that_are_gathered_once_per_step() -> None:
    """Such a one is partial where it is made: the stack of experts of this random plan."""
    who = subject("hf-mixtral")
    missing = _swap(r'(reshard\(experts_, "S1,)P( -> )', r"\1R\2")
    report = who.verified(by_chance(who, (2, 2), 1), mutate=missing)
    assert "add_8 (value, block 0)" in report.first, report.first


def test_a_collective_too_many_is_found() -> None:
    """Numbers stay right; only the counts tell."""
    twice = _swap(
        r"(div_tensor_2 = reshard\(div_tensor, (.*)\)) +#.*",
        r'\1\n        spare = reshard(div_tensor.detach(), "P -> R", grad=None, shape=(), mesh=MESH)',
    )
    report = _verified("mlp", (4,), "ddp", twice)
    wrong = [row for row in report.rows if not row.ok]
    assert {row.kind for row in wrong} == {"collectives"} and "all_reduce on axis 0: 10 priced, 11 run" in wrong[0].name
    assert report.first == f"no value: {wrong[0].name}"


def test_a_collective_of_too_many_bytes_in_a_pipeline_is_found() -> None:
    """Values and counts stay right; only the bytes tell, on the place that runs it."""
    who = subject("hf-gpt2")
    wide = _swap(
        r"(transformer_wte_weight = )reshard\((self\S+), (.*shape=)\(257, 64\)(.*)\)",
        r"\1reshard(torch.cat([\2, \2.detach()]), \3(514, 64)\4).narrow(0, 0, 257)",
    )
    report = who.verified(by_stages(who, (2,), "tp", 2, 4, "1f1b"), mutate=wide)
    wrong = [row for row in report.rows if not row.ok]
    size = 257 * 64 * 8
    assert (
        len(wrong) == 1
        and wrong[0].error == 4 * size
        and wrong[0].name.startswith("place 0, bytes: all_reduce on axis 0")
    ), wrong


class Tasks(nn.Module):
    """Losses of two tasks, weighted by parameters, which are outputs too, and counted, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weights = nn.Linear(8, 8), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.linear(x)
        return {
            "loss": self.weights[0] * h.square().mean()
            + self.weights[1] * h.abs().mean()
            + torch.linalg.vector_norm(self.weights * 2, 0),
            "weights": self.weights,
            "h": h,
        }


class Rows(Subject):
    """A subject whose batch is one tensor."""

    def batch(self, batch: int = 8, seq: int = 0) -> dict[str, Tensor]:
        return {self.captured.input_names[0]: torch.randn(batch, 8, generator=torch.Generator().manual_seed(1))}


@cache
def tasks() -> Rows:
    model = Tasks()
    return Rows("tasks", "train", capture(model, (torch.zeros(8, 8),)), model.state_dict())


def test_outputs_that_are_parameters_are_those_of_the_forward() -> None:
    report = tasks().verified(by_recipe(tasks(), (2,), "ddp"), 8)
    assert report.ok, (report.first, [row for row in report.rows if not row.ok])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"(return .*self\.spread\(linear\w*)(,)", r"\1 * 0.5\2"),
        (r'(return .*self\.spread\(linear\w*, "\w+", \(\w+, )8\b', r"\g<1>9"),
    ],
)
def test_an_output_that_is_wrong_behind_all_operators_is_named(old: str, new: str) -> None:
    """Its values, or what is said of the shape of the whole."""
    who = tasks()
    report = who.verified(by_recipe(who, (2,), "ddp"), 8, mutate=_swap(old, new))
    assert [row.name for row in report.rows if not row.ok] == [
        "h"
    ] and report.first == "no operator: output h is put together wrongly behind the last operator"


def test_a_loss_that_is_wrong_in_the_forward_of_a_pipeline_alone_is_found() -> None:
    """Of the microbatches' parts of the loss the first alone is given; a step adds them up in its own way, and its loss
    and gradients are right."""
    who = subject("mlp")
    first = _swap(r"""(MICRO = \{.*'0': )'P'""", r"\1'R'")
    report = who.verified(by_stages(who, (1,), "single", 2, 2, "gpipe"), mutate=first)
    assert [(row.kind, row.name) for row in report.rows if not row.ok] == [("loss", "loss")]
