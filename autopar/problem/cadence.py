"""Choices that scatter gradients after every microbatch (ZeRO-2), where they may also do so once per step.

Which of the two is faster, the search decides late: both take as long in a first look at a shape, where collectives
hide under compute, so that with both it would end at worse solutions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.problem.at_rest import EACH
from autopar.problem.build import Model
from autopar.problem.cluster_members import Member


def scattering_each(model: Model) -> dict[int, np.ndarray]:
    """bool [choices] for each cluster with choices that scatter some gradient after every microbatch, while another
    choice differs only in that: which ones these are."""
    return {index: mask for index, each in enumerate(model.members) if (mask := _twins(each)).any()}


def _twins(members: Sequence[Member]) -> np.ndarray:
    """bool [choices]: whether a parameter's gradient is scattered after every microbatch, and some other choice has the
    same layouts, and scatters it once."""
    parameters = [member for member in members if member.op.role == "param" and any(member.runs)]
    if not parameters:
        return np.zeros(1, bool)
    choices = range(len(members[0].at))
    each = [any(_scatters(member, choice) for member in parameters) for choice in choices]
    once = {_layouts(members, choice) for choice in choices if not each[choice]}
    return np.array([each[choice] and _layouts(members, choice) in once for choice in choices])


def _scatters(member: Member, choice: int) -> bool:
    return any(option.run == EACH for option in member.ways[member.at[choice]])


def _layouts(members: Sequence[Member], choice: int) -> tuple[object, ...]:
    """What a choice is but for when gradients are scattered."""
    return tuple(
        (option.ins, option.outs, "" if option.run == EACH else option.run)
        for member in members
        for option in member.ways[member.at[choice]]
    )
