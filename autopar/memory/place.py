"""The stages of one place under their schedule: the moment at which its rank holds most bytes, and what is alive then.
Called by memory.predict, and by the simulator for bytes over time (`levels`)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.memory.at_rest import (
    ALWAYS,
    WHOLE,
    by_kind,
    host_bytes,
    instances,
    largest_state,
    resting,
    roots_bytes,
    workspace,
)
from autopar.memory.shares import Shares
from autopar.memory.stage import Profile
from autopar.memory.sums import Sums
from autopar.memory.types import Entry, Place
from autopar.optimizers import OPTIMIZERS
from autopar.pipeline.orders import Action, changed, last_backwards
from autopar.pipeline.stage_views import View
from autopar.pipeline.transit import Kind, Transit

WEIGHTS, SUMS, UPDATE, OUTPUTS = "backward for weights", "sums of gradients", "update", "outputs"
"""Phases of a step beside "forward" and "backward": the action for weights of a split backward, the sums of gradients
over ranks at the end of the step, and the optimizer's step. OUTPUTS ends a step for inference: those of all
microbatches are joined, and every place has them."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A candidate for the peak.

    nbytes      bytes of the rank at that moment
    phase       "forward", "backward", WEIGHTS, SUMS, UPDATE or OUTPUTS
    stage       the stage that runs (-1: none)
    time        the time in the profile `walked` (-1: none)
    waiting     for each stage, how many microbatches wait for their backward
    halfway     for each stage, how many of these wait only for the part of their backward for weights
    transit     what is being sent or received
    gradients   whether the gradients of all parameters exist
    walked      the profile of the pass that runs; None outside of forward and backward
    summing     bytes of sums of gradients beside it
    """

    nbytes: float
    phase: str
    stage: int
    time: int
    waiting: tuple[int, ...]
    halfway: tuple[int, ...]
    transit: Transit
    gradients: bool
    walked: Profile | None = None
    summing: float = 0.0


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes of a place when an action begins, at most while it runs, and when it has ended; `at` is when in the action
    the most is (0 to 1)."""

    begin: float
    most: float
    end: float
    at: float = 0.5


@dataclass(eq=False)
class Holding:
    """The fullest rank of one place during a step.

    shares      bytes of values on that rank
    number      the number of the place
    views       the stages of the place
    profiles    by stage number, the profile of one microbatch
    staged      whether the plan has several stages
    actions     what the place runs, in order
    transits    for each action what is being sent or received meanwhile; empty where nothing ever is
    synced      the parameters whose gradients are summed over ranks
    """

    shares: Shares
    number: int
    views: Sequence[View]
    profiles: dict[int, Profile]
    staged: bool
    actions: Sequence[Action]
    transits: Sequence[Transit] = ()
    synced: Collection[str] = ()

    def place(self) -> Place:
        """The peak, and what makes it up."""
        training = self.shares.plan.mode == "train"
        rest = [*resting(self.shares, self.views), *workspace(self.shares)]
        gradients, still = self._gradients_apart(rest)
        base, held = sum(e.nbytes for e in still), sum(e.nbytes for e in gradients)
        late = self._moments_after_backward(still, gradients) if training else self._moments_after_forward(base)
        moments = [*self._moments(base, held), *late]
        peak = max(moments, key=lambda moment: moment.nbytes)
        order, flying = sorted(self.profiles), self._in_flight()
        return Place(
            self.number,
            tuple(order),
            self._when(peak),
            self._entries(peak, still, gradients),
            by_kind(rest),
            tuple(self.profiles[i].kept_bytes for i in order),
            tuple(flying.get(i, 0) for i in order),
            {
                phase: max(m.nbytes for m in moments if m.phase == phase)
                for phase in dict.fromkeys(m.phase for m in moments)
            },
            host_bytes(self.shares, self.views),
        )

    def _gradients_apart(self, rest: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Split the entries at rest into gradients of parameters, which do not exist in the first forward, and all
        others. Where habits keep gradients in standing buffers, all are among the others."""
        if self.shares.habits.standing:
            return [], list(rest)
        kinds = ("gradients", WHOLE)
        return [e for e in rest if e.kind in kinds], [e for e in rest if e.kind not in kinds]

    def levels(self) -> list[Level]:
        """Bytes over time: of each action in order; in training then of the sums of gradients and of the optimizer's
        step, in inference of the outputs of several microbatches or stages."""
        training, several = self.shares.plan.mode == "train", self.shares.plan.microbatches > 1
        rest = [*resting(self.shares, self.views), *workspace(self.shares)]
        gradients, still = self._gradients_apart(rest)
        held, base = sum(e.nbytes for e in gradients), sum(e.nbytes for e in still)
        before, found, back = 0.0, list[Level](), False
        flying = [
            (action, self._others_bytes(kept, halfway, transit))
            for action, kept, halfway, transit in self._actions_with_waiting()
        ]
        for index, (action, beside) in enumerate(flying):
            back = back or action.kind != "F"
            profile = self.profiles[action.stage]
            nbytes, time = (
                (profile.kept_bytes + profile.halfway_bytes + profile.weights_bytes, 0)
                if action.kind == "W"
                else profile.walked(action.kind).peak(forward=action.kind == "F")
            )
            there = held if back else 0.0
            most = base + beside + nbytes + there * several + self._summing_bytes(index)
            after = self._waiting_after_bytes(flying, index)
            begin, end = base + before + there * several, base + after + there
            found.append(
                Level(
                    begin,
                    max(begin, end, most),
                    end,
                    profile.walked(action.kind).share(time, forward=action.kind == "F"),
                )
            )
            before = after
        if training:
            late = sum(e.nbytes for e in _rested(still, gradients))
            found += [
                Level(base + held, base + held + self.sums.after_bytes, late),
                Level(late, late + self.update_bytes(), late),
            ]
        else:
            found += [Level(base, late.nbytes, late.nbytes) for late in self._moments_after_forward(base)]
        return found

    def _others_bytes(self, kept: Mapping[int, int], halfway: Mapping[int, int], transit: Transit) -> float:
        """Bytes of waiting microbatches and of what is in transit."""
        waiting = sum(
            kept[i] * p.kept_bytes * self._on_device_share(i) + halfway[i] * p.halfway_bytes
            for i, p in self.profiles.items()
        )
        return waiting + sum(n * self._transit_bytes(kind, stage) for (kind, stage), n in transit.items())

    def _transit_bytes(self, kind: Kind, stage: int) -> float:
        """Bytes that one microbatch has in transit."""
        return self.profiles[stage].transit_bytes.get(kind, 0.0)

    def _on_device_share(self, stage: int) -> float:
        """The share, from 0 to 1, of what waiting microbatches of a stage keep that is on the device."""
        return 1.0 - self.shares.habits.hosted_kept[stage] if self.shares.habits.hosted_kept else 1.0

    def _waiting_after_bytes(self, flying: Sequence[tuple[Action, float]], index: int) -> float:
        """Bytes that waiting microbatches keep once action number `index` has ended. `flying` gives for each action the
        bytes of the other microbatches while it runs: those of the next action, and what the microbatch of that action
        keeps, if its forward is done."""
        if index + 1 == len(flying):
            return 0.0
        action, beside = flying[index + 1]
        profile = self.profiles[action.stage]
        return (
            beside
            + (0.0 if action.kind == "F" else profile.kept_bytes)
            + (profile.halfway_bytes if action.kind == "W" else 0.0)
        )

    def _in_flight(self) -> dict[int, int]:
        """For each stage, the number of microbatches whose activations it keeps at the moment at which all stages
        together keep the most bytes."""
        here = (
            {stage: n + (action.stage == stage) for stage, n in waiting.items()}
            for action, waiting, *_ in self._actions_with_waiting()
        )
        return max(
            here, key=lambda counts: sum(n * self.profiles[stage].kept_bytes for stage, n in counts.items()), default={}
        )

    def _actions_with_waiting(self) -> Iterator[tuple[Action, dict[int, int], dict[int, int], Transit]]:
        """For each action: the action; by stage how many other microbatches are kept while it runs; how many of these
        wait only for the part of their backward for weights; and what is in transit."""
        kept, halfway = dict.fromkeys(self.profiles, 0), dict.fromkeys(self.profiles, 0)
        for action, (stage, more), transit in zip(
            self.actions, changed(self.actions), self.transits or itertools.repeat({}), strict=False
        ):
            own, own_halfway = action.kind != "F", action.kind == "W"
            kept[stage] -= own
            halfway[stage] -= own_halfway
            yield action, dict(kept), dict(halfway), transit
            kept[stage] += more.kept + own
            halfway[stage] += more.halfway + own_halfway

    def _moments(self, base: float, held: float) -> Iterator[Moment]:
        """One moment for each distinct combination of an action and of what waits meanwhile. `base` are the bytes at
        rest, `held` those of gradients of parameters. Where several microbatches add up their gradients, these are
        counted in full from the first backward on."""
        stages = sorted(self.profiles)
        several, back, seen = self.shares.plan.microbatches > 1, False, dict[tuple[object, ...], None]()
        for index, (action, waiting, halfway, transit) in enumerate(self._actions_with_waiting()):
            forward, summing = action.kind == "F", self._summing_bytes(index)
            back = back or not forward
            key = (action.stage, action.kind, back, summing, *waiting.values(), *halfway.values(), *transit.items())
            if key in seen:
                continue
            seen[key] = None
            if action.kind == "W":  # what its own microbatch keeps is there when it begins
                waiting[action.stage] += 1
                halfway[action.stage] += 1
                phase, walked, time = WEIGHTS, None, -1
                own_bytes = self.profiles[action.stage].weights_bytes
            else:
                phase, walked = "forward" if forward else "backward", self.profiles[action.stage].walked(action.kind)
                own_bytes, time = walked.peak(forward=forward)
            adding_up = several and back
            yield Moment(
                base
                + self._others_bytes(waiting, halfway, transit)
                + own_bytes
                + (held if adding_up else 0.0)
                + summing,
                phase,
                action.stage,
                time,
                tuple(waiting[i] for i in stages),
                tuple(halfway[i] for i in stages),
                transit,
                adding_up,
                walked,
                summing,
            )

    def _moments_after_backward(self, still: Sequence[Entry], gradients: Sequence[Entry]) -> Iterator[Moment]:
        """After the backward: sums of gradients over ranks, then the optimizer."""
        nothing = (0,) * len(self.profiles)
        summed = sum(e.nbytes for e in (*still, *gradients))
        rested = sum(e.nbytes for e in _rested(still, gradients))
        for nbytes, phase in ((summed + self.sums.after_bytes, SUMS), (rested + self.update_bytes(), UPDATE)):
            yield Moment(nbytes, phase, -1, -1, nothing, nothing, {}, gradients=True)

    def _moments_after_forward(self, base: float) -> Iterator[Moment]:
        """Of several microbatches or stages without a backward: the outputs over the whole batch, beside the parts of
        which they are joined. `base` are the bytes at rest."""
        count, views = self.shares.plan.microbatches, sorted(self.views, key=lambda view: view.index)
        if self.shares.plan.pipelined:
            parts, nothing = tuple(count * (count > 1 and bool(v.results)) for v in views), (0,) * len(views)
            kept = sum(n * self.profiles[v.index].kept_bytes for n, v in zip(parts, views, strict=True))
            yield Moment(base + kept + self.shares.outputs_bytes, OUTPUTS, -1, -1, parts, nothing, {}, gradients=False)

    def _summing_bytes(self, index: int) -> float:
        """Bytes of sums of gradients beside action number `index`: on one place and of the first stage of several the
        last backward (runtime.gradsync.GradSync.summing), of other stages what the place does after theirs
        (runtime.stages)."""
        if self._sums_begin is None:
            return 0.0
        begins = index == self._last.get(0) and self.actions[index].kind == "B"
        return max(self._begun_bytes * (index > self._sums_begin), self.sums.beside_bytes if begins else 0.0)

    @cached_property
    def _sums_begin(self) -> int | None:
        """The number of the action behind which sums of gradients run beside others (past the last one: behind none);
        None where no sum is beside an action."""
        plan = self.shares.plan
        if plan.mode != "train" or plan.places == plan.microbatches == 1:
            return None
        return min(self._last.values()) if plan.places > 1 else len(self.actions)

    @cached_property
    def _last(self) -> dict[int, int]:
        """By stage, the number of the action that completes its gradients."""
        return last_backwards(self.actions)

    @cached_property
    def _begun_bytes(self) -> float:
        return self.sums.begun_bytes

    @cached_property
    def sums(self) -> Sums:
        """The sums of gradients."""
        return Sums(self.shares, instances(self.shares, self.views), self.synced)

    def update_bytes(self) -> float:
        """Bytes that the optimizer's step uses in addition to what rests. torch's Adam and AdamW update DTensor
        parameters one by one (optim/optimizer.py: _default_to_fused_or_foreach). With state on the host they are called
        for one parameter at a time, which brings the state of one and keeps nothing of the one before."""
        offload, values = self.shares.plan.offload, OPTIMIZERS[self.shares.plan.optimizer].state
        if offload == "parameters":
            return 0.0  # on the host
        roots = values > 1 and not self.shares.habits.fused_update  # else in the registers of one kernel
        if offload == "optimizer":
            return (values + 2 * roots) * largest_state(self.shares, self.views)
        return roots_bytes(self.shares, self.views) if roots else 0.0

    def _waiting_entries(self, profile: Profile, n: int, halfway: int, share: float) -> list[Entry]:
        """Bytes that `n` microbatches keep, `halfway` of which have done the part for inputs; `share` of it is on the
        device."""
        counts = {storage: n - halfway * (storage in profile.early) for storage in profile.kept}
        return [
            replace(e, nbytes=e.nbytes * m * share, count=e.count * m)
            for storage, m in counts.items()
            if m and (e := profile.book.entry(storage))
        ]

    def _when(self, peak: Moment) -> str:
        """What happens at the peak, for users."""
        label = peak.phase if peak.walked is None else peak.walked.book.labels[peak.time]
        return f"{label} in stage {peak.stage}" if peak.stage >= 0 and (self.staged or not peak.walked) else label

    def _entries(self, peak: Moment, still: Sequence[Entry], gradients: Sequence[Entry]) -> tuple[Entry, ...]:
        """What is alive at the peak, largest first; `still` and `gradients` are the entries at rest
        (`_gradients_apart`)."""
        found = _rested(still, gradients) if peak.phase == UPDATE else [*still, *(gradients if peak.gradients else ())]
        for stage, n, halfway in zip(sorted(self.profiles), peak.waiting, peak.halfway, strict=True):
            found += self._waiting_entries(self.profiles[stage], n, halfway, self._on_device_share(stage))
        for stage, n in zip(sorted(self.profiles), peak.halfway, strict=True):
            found.append(
                Entry(
                    "gradients of activations",
                    f"stage {stage}, for its weights",
                    "",
                    n * self.profiles[stage].waiting_bytes,
                    n,
                )
            )
        for (kind, stage), n in peak.transit.items():
            nbytes = n * self._transit_bytes(kind, stage)
            found.append(Entry("pipeline buffers", f"stage {stage}, {kind} in transit", "", nbytes, n))
        found.append(Entry("gradient sums", SUMS, "", peak.summing, 1, ALWAYS, ALWAYS))
        if peak.walked is not None:
            found += peak.walked.entries(peak.time)
        elif peak.phase == WEIGHTS:
            nbytes = self.profiles[peak.stage].weights_bytes
            found.append(Entry("temporaries", "gradients of weights", "", nbytes))
        else:
            what, bytes_of = {
                SUMS: ("gradient sums", lambda: self.sums.after_bytes),
                UPDATE: ("temporaries", self.update_bytes),
                OUTPUTS: ("activations", lambda: self.shares.outputs_bytes),
            }[peak.phase]
            found.append(Entry(what, peak.phase, "", bytes_of(), 1, ALWAYS, ALWAYS))
        return tuple(sorted(_merged(found), key=lambda e: -e.nbytes))


def _rested(still: Sequence[Entry], gradients: Sequence[Entry]) -> list[Entry]:
    """The entries of both that remain at the end of a step: not whole gradients, which have been scattered, nor inputs
    that were cast for its microbatches."""
    return [e for e in (*still, *gradients) if e.kind not in ("pipeline buffers", WHOLE)]


def _merged(entries: Sequence[Entry]) -> list[Entry]:
    """One entry per tensor and purpose: those of several blocks and microbatches together."""
    found: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        before = found.get((entry.kind, entry.node))
        found[entry.kind, entry.node] = (
            entry
            if before is None
            else replace(before, nbytes=before.nbytes + entry.nbytes, count=before.count + entry.count)
        )
    return [entry for entry in found.values() if entry.nbytes]
