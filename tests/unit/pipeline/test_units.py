"""The pieces of a model: where what is no piece belongs."""

from __future__ import annotations

from autopar.pipeline.units import homes, units
from tests.helpers.verify import planner_of, subject


def test_results_of_the_model_belong_to_the_piece_that_makes_them() -> None:
    """A stage brings its results to where they are wanted (codegen.stages): that of logits was priced in the stage that
    ends the loss."""
    program = planner_of(subject("hf-gpt2", "train"), (2,)).program
    pieces = units(program)
    home = homes(program, pieces)
    made = {op.name: op.operands[0][0] for op in program.results if op.operands}
    own = {name: maker for name, maker in made.items() if maker in {unit.name for unit in pieces}}
    assert own and {name: home[name] for name in own} == own
    assert any(maker != pieces[-1].name for maker in own.values())
