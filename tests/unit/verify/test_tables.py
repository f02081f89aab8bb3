"""What an emitted model says of itself: a wrong entry of any table that no value depends on is found."""

from __future__ import annotations

import re

import pytest

from autopar.bundle import Bundle
from autopar.verify.tables import LONGEST, differing, said
from tests.helpers.verify import by_recipe, by_stages, subject

PLANTED = {
    "state in another order": (
        "hf-mixtral",
        "ORDER",
        r"(?s)ORDER = (\(.*?\))\n(?=    \w)",
        r"ORDER = tuple(reversed(\1))\n",
    ),
    "a constant in the state dict": ("hf-mixtral", "ORDER", r"(Param\(.*), persistent=False\)", r"\1)"),
    "a buffer that no state dict holds": (
        "hf-resnet",
        "ORDER",
        r'(running_mean": Param\(.*)\)',
        r"\1, persistent=False)",
    ),
    "frozen": ("hf-gpt2", "STATE", r"(Param\(.*)\),", r"\1, trainable=False),"),
    "names of outputs": ("hf-gpt2", "STRUCTURE", r"'loss': 0, 'logits': 1", "'loss': 1, 'logits': 0"),
    "an output of another kind": ("hf-gpt2", "OUTPUTS", r"\('output', ", "('buffer', "),
    "a gradient that is none": ("hf-gpt2", "UNGRADED", r"UNGRADED = .*", "UNGRADED = ()"),
    "sizes without a limit": ("hf-gpt2", "SIZES", r"SIZES = .*", "SIZES = {}"),
    "samples of no batch": ("hf-gpt2", "DIMS", r"DIMS = \{'input_ids': \('b'", "DIMS = {'input_ids': (None"),
    "a sample of another size": ("hf-gpt2", "SAMPLE", r"SAMPLE = \{'input_ids': \(\(8", "SAMPLE = {'input_ids': ((4"),
    "inputs in another order": (
        "hf-gpt2",
        "INPUTS",
        r"INPUTS = (\{.*'S0'.*\})",
        r"INPUTS = dict(reversed(\1.items()))",
    ),
    "another momentum": ("hf-resnet", "NORMS", r"(NORMS = .*?: )0.1", r"\g<1>0.2"),
    "no training": ("hf-gpt2", "TRAINS", r"(    UNGRADED = )", r"    TRAINS = False\n\1"),
}
"""What is planted -> model, table that is named, the change."""


def _differing(name: str, old: str, new: str, *, staged: bool = False) -> list[str]:
    """The tables that differ once the first match of `old` is replaced."""
    who = subject(name)
    made = by_stages(who, (1,), "single", 2, 2, "gpipe") if staged else by_recipe(who, (2,), "ddp")
    case = who.case(made)
    source, times = re.subn(old, new, case.source(), count=1)
    assert times == 1, f"nothing in the source matches {old}:\n{source}"
    return differing(case, Bundle(made, source).namespace()["Model"])


@pytest.mark.parametrize("what", PLANTED)
def test_a_wrong_table_is_named(what: str) -> None:
    name, table, old, new = PLANTED[what]
    assert any(text.startswith(f"{table} says ") for text in _differing(name, old, new)), _differing(name, old, new)


@pytest.mark.parametrize("what", [what for what, (name, *_) in PLANTED.items() if name == "hf-gpt2"])
def test_a_wrong_table_of_a_pipeline_is_named(what: str) -> None:
    name, table, old, new = PLANTED[what]
    assert any(text.startswith(f"{table} says ") for text in _differing(name, old.replace("S0", "R"), new, staged=True))


@pytest.mark.parametrize("name", ["hf-gpt2", "hf-resnet", "hf-mixtral", "moe"])
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_right_tables_do_not_differ(name: str, mode: str) -> None:
    who = subject(name, mode)
    made = by_recipe(who, (2,), "tp")
    case = who.case(made)
    model = Bundle(made, case.source()).namespace()["Model"]
    assert differing(case, model) == [] and said(model)["ORDER"] == list(who.captured.order)


def test_of_long_tables_the_message_has_what_differs() -> None:
    (text,) = _differing(
        "hf-gpt2", r"(?s)'transformer.ln_f.weight', ('transformer.ln_f.bias'),", r"\1, 'transformer.ln_f.weight',"
    )
    assert "'transformer.ln_f.bias', 'trans" in text and len(text) < 3 * LONGEST, text
