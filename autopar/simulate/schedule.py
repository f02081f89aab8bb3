"""The actions of a pipeline in the order of torch's schedule, and the sends between places, as tasks for the event
engine.

An action takes as long as its stage takes alone (simulate.stages). The output of a stage is sent when its action has
ended, and the action of the next stage waits for it. The sends of a place, of activations and gradients, run one after
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.pipeline.orders import Action
from autopar.simulate.engine import Task

Seconds = Callable[[Action], float]
ACTIVATIONS, GRADIENTS = SENT = ("activations", "gradients")
"""What is sent between the places of two stages: forwards, and back."""
CORES = "cores"
"""The link that places share where there are more ranks than cores on the machine."""


def tasks(
    lines: Sequence[Sequence[Action]],
    places: Sequence[int],
    action_s: Seconds,
    send_s: Mapping[tuple[int, str], float],
    alone: float = 1.0,
) -> tuple[list[Task], list[Action | None]]:
    """The tasks of a pipeline, and the action of each (None: a send). Where places share cores, so that one is `alone`
    times as fast while the others wait (Device.alone), tasks take 1 / `alone` of their seconds and share the link
    CORES.

    `lines` has the actions of each place, `places` the place of each stage; `action_s` are the seconds of an action,
    `send_s` by (stage, one of SENT) those of sending what a stage gives to the next one, and its gradients back.
    """
    known = {action: index for index, action in enumerate(action for line in lines for action in line)}
    actions: list[Action | None] = list(known)
    sends: list[Task] = []
    needs: dict[Action, list[int]] = {action: [] for action in known}
    for action, index in known.items():
        for after, sent_s, arrow in _following(action, places, known, send_s):
            if sent_s is None:
                needs[after].append(index)
                continue
            needs[after].append(len(known) + len(sends))
            sends.append(Task(arrow, link(places[action.stage]), sent_s, (index,)))
            actions.append(None)
    links = (CORES,) if alone > 1 else ()
    made = [
        Task(label(action), f"place {places[action.stage]}", action_s(action) / alone, tuple(needs[action]), links)
        for action in known
    ]
    return made + sends, actions


def link(place: int) -> str:
    """The stream on which a place sends."""
    return f"sends of place {place}"


def label(action: Action) -> str:
    """`F stage 3 microbatch 5`."""
    return f"{action.kind} stage {action.stage} microbatch {action.microbatch}"


def _following(
    action: Action, places: Sequence[int], known: dict[Action, int], send_s: Mapping[tuple[int, str], float]
) -> list[tuple[Action, float | None, str]]:
    """The actions that wait for `action`: each with the seconds of the send between them (None: nothing is sent) and
    the send's name."""
    kind, stage, micro = action
    found: list[tuple[Action, float | None, str]] = []
    if kind == "F":
        if stage + 1 < len(places):
            found.append(
                (
                    Action("F", stage + 1, micro),
                    send_s[stage, ACTIVATIONS] if places[stage] != places[stage + 1] else None,
                    f"{ACTIVATIONS} of stage {stage} microbatch {micro}",
                )
            )
        found += [(Action(back, stage, micro), None, "") for back in "BI"]
    if kind in "BI" and stage > 0:
        sent = send_s[stage - 1, GRADIENTS] if places[stage] != places[stage - 1] else None
        found += [
            (Action(back, stage - 1, micro), sent, f"{GRADIENTS} of stage {stage - 1} microbatch {micro}")
            for back in "BI"
        ]
    if kind == "I":
        found.append((Action("W", stage, micro), None, ""))
    return [entry for entry in found if entry[0] in known]
