"""The base classes of an emitted pipeline: `PipelinedModule` for the model, `Stage` for one of its stages.

    class Stage0(Stage):
        RUNS = {"layers": (Layer, [f"layers.{i}" for i in range(2, 4)])}
        FIRST = {"layers": 2}        # optional, where blocks draw random numbers: the number of the first block that is
                                     here
        INPUTS = ("input_ids",)      # inputs of the model that forward takes, after what it receives
        TOTALS, RESULTS = (), ()     # totals that it takes after them; numbers of the results that it returns

        @staticmethod
        def receives(b, s): ...      # ((local shape, dtype, whether there is a gradient), ...) of what comes in

        def forward(self, input_ids, *, b, s): ...
            return (h,), ()          # what goes to the next stage, and results

    class Model(PipelinedModule):
        PIPELINE = Pipeline("Schedule1F1B", False, 4, (0, 1))     # schedule, splits, microbatches, place of each stage
        STAGES = (Stage0, Stage1)
        MICRO = {"input_ids": "S0", "0": "P"}                     # how microbatches share inputs and results
        def sizes(self, input_ids): ...                           # {"b": ..., "s": ...}: global sizes
        def totals(self, input_ids, *, b, s): ...                 # optional: values over the whole batch

Every rank is given its part of the batch, whatever its place: each stage reads its inputs from there, only activations
travel. A step runs a schedule of torch.distributed.pipelining; gradients add up over its microbatches and are summed
over ranks once, while other stages and microbatches go on: those of each stage begin when they are complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from autopar._torch import local_of
from autopar.errors import RunError
from autopar.layout import Layout, cutters, dim_of, is_shard, parse, sections_of, ways_of
from autopar.runtime import batch, checkpoint, rng
from autopar.runtime.count import uncounted
from autopar.runtime.declare import Declarations
from autopar.runtime.first_order import check_trains
from autopar.runtime.gradsync import GradSync
from autopar.runtime.leaves import Leaves, Part
from autopar.runtime.module import ShardedModule
from autopar.runtime.moves import relayout
from autopar.runtime.names import paths_of
from autopar.runtime.outputs import STAGED, Spread
from autopar.runtime.params import Held, grad_at_rest
from autopar.runtime.places import Everywhere, shared_gradients, tell
from autopar.runtime.scaling import GradScaler, scale_of
from autopar.runtime.scopes import Block, Stage
from autopar.runtime.stepping import Engine, run_forward
from autopar.runtime.watched import watched


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The schedule: `torch_name` is its class in torch.distributed.pipelining; `splits`: whether it computes gradients
    of inputs and of weights in separate actions (zero bubble); `places[i]` is the place of stage i."""

    torch_name: str
    splits: bool
    microbatches: int
    places: tuple[int, ...]


class PipelinedModule(ShardedModule):
    """The base of an emitted model with stages or microbatches; see the module docstring."""

    PIPELINE: ClassVar[Pipeline]
    STAGES: ClassVar[Sequence[type[Stage]]] = ()
    MICRO: ClassVar[Mapping[str, str]] = {}

    def _scopes(self) -> Sequence[Stage]:
        self.stages = [
            kind(i, self._spread_of) for i, kind in enumerate(self.STAGES) if self.PIPELINE.places[i] == self.MESH.place
        ]
        for stage in self.stages[:1]:
            self.b = stage.b  # what totals are made of
        return self.stages

    def _blocks(self) -> list[Block]:
        """All blocks on this place, stage by stage."""
        return [block for stage in self.stages for block in stage._blocks()]

    def _watch(self) -> None:
        """Each stage has leaves of its own: a weight that two of them read gets two gradients, which add up."""
        self._syncs: list[GradSync] = []
        for stage, declared in zip(self.stages, self._declared, strict=True):
            stage.held = {
                name: replace(self._held[name], info=about.info, readers=about.readers)
                for name, about in declared.found.items()
            }
            self._syncs.append(GradSync.watching(stage.held, self.MESH, stage._blocks()))
            self._syncs[-1].deferred = True
        parts = [Part(stage.held.values(), stage, stage._blocks()) for stage in self.stages]
        self._leaves = Leaves(parts, self.MESH)
        self._engines: dict[tuple[tuple[str, int], ...], Engine] = {}
        self._shared = shared_gradients(self.STAGES, self.PIPELINE.places, self.MESH)
        self._outputs: dict[int, Spread] = {}
        self._loss = Everywhere(self.PIPELINE.places[-1], self.MESH)
        self._changed: list[tuple[Held, Tensor]] = []

    def _unhooked(self, *_: Any, **__: Any) -> Any:
        raise RunError(
            "hooks of a pipeline would never be called: a rank runs the stages of its own place, microbatch by "
            "microbatch, and none runs the whole model. Do what the hook does around train_step(...) or the call, "
            "which give the loss and the outputs on every rank; let the model give what else you need among its "
            'outputs before it is compiled; or plan without stages (recipe="zero3"), where hooks of the whole module '
            "are called"
        )

    register_forward_hook = register_forward_pre_hook = _unhooked
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _unhooked

    def sizes(self, *inputs: Any) -> dict[str, int]:
        """The global sizes of a batch of which `inputs` are this rank's part."""
        return {}

    def totals(self, *inputs: Any, **sizes: int) -> dict[str, Tensor]:
        """Values over the whole batch, by name."""
        return {}

    # -- running

    def train_step(
        self, *args: Any, scaler: GradScaler | None = None, loss_weight: float = 1.0, **kwargs: Any
    ) -> Tensor:
        """Forward and backward of this rank's part of a batch, in microbatches through all stages; gradients add up in
        `param.grad`, times `loss_weight` and the scale of `scaler`, as ShardedModule has it. Gives the global loss, the
        same on all ranks. Raises RunError where the plan has no loss, or needs a scaler, where the batch does not
        divide into the microbatches, and where all parameters of all stages are frozen."""
        with self._together():
            number, scale = (
                self._loss_number(self.OUTPUTS),
                scale_of(scaler, self.MESH.device, needed=self._narrow, weight=loss_weight),
            )
            sizes, micro = self._begin(args, kwargs, loss_weight)
            key = tuple(sizes.items())
            if key not in self._engines:
                self._engines = {key: Engine(self, self.stages, sizes, number)}  # one at a time: its buffers are large
            with watched(self.MESH):
                with ExitStack() as stack:
                    stack.enter_context(rng.using(self.rng))
                    for group in self._shared:
                        stack.enter_context(group.summing(self._held))
                    losses = self._engines[key].step(micro, self._syncs, scale)
                    for sync in self._syncs:
                        sync.flush()
                self._change()
                loss = torch.stack(losses).sum() if losses else None
                return self._loss(loss)

    def spreads(self) -> dict[int, Spread]:
        """As ShardedModule.spreads, on every rank, whichever made the outputs."""
        return self._outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward only; the outputs in the structure of the original model, on every rank, cut as the plan says. There
        is no gradient behind them, and a backward raises RunError: `train_step` trains."""
        with self._together():
            with torch.no_grad():
                values = self._forward(args, kwargs)
            return self._packed(values, STAGED)

    def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All microbatches forward; the outputs of the model over the whole batch."""
        sizes, micro = self._begin(args, kwargs)
        with watched(self.MESH):
            with rng.using(self.rng):
                made = run_forward(self, self.stages, sizes, micro)
            self._change()
            return self._told_everywhere(made)

    def _told_everywhere(self, made: Mapping[int, Sequence[tuple[Tensor, Spread | None]]]) -> list[Any]:
        """The outputs of the model over the whole batch, on every place; `made` are the results of this one."""
        values: list[Any] = []
        self._outputs = {}
        for number, (role, _) in enumerate(self.OUTPUTS):
            if role == "mutation":
                continue
            owner = next(i for i, kind in enumerate(self.STAGES) if number in kind.RESULTS)
            value, spread = self._joined(number, made.get(number))
            value, spread = tell(value, spread, self.PIPELINE.places[owner], self.MESH)
            values.append(value)
            if spread is not None:
                self._outputs[number] = spread
        return values

    def mutate(self, stage: Stage, results: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Keep the new values of the buffers of `stage` for the end of the step: until then all microbatches read the
        old ones, and make the same new ones of them. Gives the other results."""
        mutated = [
            (self.OUTPUTS[number][1], value)
            for number, value in results.items()
            if self.OUTPUTS[number][0] == "mutation"
        ]
        for name, value in (*mutated, *stage.mutations):
            self._changed.append((stage.held[self.ALIASES.get(name, name)], value))
        stage.mutations.clear()
        return {number: value for number, value in results.items() if self.OUTPUTS[number][0] != "mutation"}

    def _change(self) -> None:
        """Give buffers their new values."""
        for held, value in self._changed:
            self._mutate(held, value)
        self._changed.clear()

    def _begin(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], loss_weight: float = 1.0
    ) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Bind and check a batch, and refresh the leaves. Returns the global sizes, and for each microbatch its inputs
        and totals by name."""
        self._check_dtypes()
        inputs = self._bound(args, kwargs, loss_weight)
        self._told.look()  # before anything is sent: ranks with parts of other sizes would wait for each other
        if self.MESH.places > 1:
            inputs = batch.as_sent(self.SAMPLE, self.INPUTS, inputs)
        # before leaves are gathered, of which places have more or less: what is refused here is so on all ranks alike
        parts = {name: self._cut(name, value) for name, value in zip(self.INPUTS, inputs, strict=True)}
        if torch.is_grad_enabled():
            check_trains(self._told.trains)
        for stage, sync in zip(self.stages, self._syncs, strict=True):
            sync.renew(stage.held.values())
        self._leaves.refresh()
        self._changed.clear()
        self._advance()
        sizes = self.sizes(*inputs)
        whole = self.totals(*inputs, **sizes)
        return sizes, [
            {**{name: part[k] for name, part in parts.items()}, **whole} for k in range(self.PIPELINE.microbatches)
        ]

    def _check_dtypes(self) -> None:
        """Raise RunError where users have cast parameters or buffers: the dtypes in which stages send and receive are
        constants of the program."""
        cast = (
            {name: held for name, held in self._held.items() if held.local.dtype != held.info.torch_dtype}
            if self.MESH.places > 1
            else {}
        )
        for name, held in cast.items():
            raise RunError(
                f"{name} is in {held.local.dtype}, wanted {held.info.torch_dtype}: what stages of a pipeline send each "
                "other is of the dtypes that were planned. Load weights of any dtype with load_full(state_dict), "
                "which keeps the planned ones; to compute in another, plan the model again: compile(model.to(dtype), "
                '...), or precision="bf16"'
            )

    def _in_step(self) -> bool:
        return self.MESH.places > 1 or super()._in_step()

    def _cut(self, name: str, value: Any) -> Sequence[Any]:
        """An input's parts, one per microbatch: the same samples of every input, however each is cut over ranks."""
        count, entry = self.PIPELINE.microbatches, self.MICRO[name]
        if not is_shard(entry) or count == 1:
            return [value] * count
        dim = dim_of(entry)
        runs = self._pieces() // self._ways(parse(self.INPUTS[name]), dim)
        size = value.shape[dim]
        if size % (count * runs) or not size:
            raise RunError(
                f"input {name!r}: dim {dim} of size {size} on this rank does not divide into {count} "
                f"microbatches{f' of {runs} parts' if runs > 1 else ''}; use a multiple of {count * runs}, or plan for "
                "the batch that you have"
            )
        return batch.microbatched(value, dim, runs, count)

    def _ways(self, layout: Layout, dim: int) -> int:
        """Over how many ranks `layout` cuts a dim."""
        return ways_of(layout, dim, self.MESH.sizes)

    def _pieces(self) -> int:
        """The number of pieces of the batch: the least common multiple of the numbers of ranks that cut the
        microbatched dim of each input, so that every rank's part of every input is a whole number of pieces. Microbatch
        k has the k-th part of each piece, so a rank's local batch holds its part of every microbatch."""
        return math.lcm(
            *(
                self._ways(parse(layout), dim_of(self.MICRO[name]))
                for name, layout in self.INPUTS.items()
                if is_shard(self.MICRO[name])
            )
        )

    def _joined(
        self, number: int, parts: Sequence[tuple[Tensor, Spread | None]] | None
    ) -> tuple[Tensor | None, Spread | None]:
        """One result over all microbatches, where it was made here."""
        if parts is None:
            return None, None
        entry, values, spread = self.MICRO[str(number)], [value for value, _ in parts], parts[0][1]
        if entry == "P":
            return torch.stack(values).sum(0, dtype=values[0].dtype), spread
        if not is_shard(entry) or len(values) == 1:
            return values[0], spread
        dim, ways = dim_of(entry), 1
        if spread is not None:
            values, spread = self._whole_pieces(values, spread, entry)
            ways = self._ways(spread.layout, dim)
            spread = Spread(
                spread.layout, tuple(n * len(values) if d == dim else n for d, n in enumerate(spread.shape))
            )
        return batch.joined(values, dim, self._pieces() // ways, sections_of(entry)), spread

    def _whole_pieces(self, values: Sequence[Tensor], spread: Spread, entry: str) -> tuple[list[Tensor], Spread]:
        """A result of each microbatch, gathered along the dim that microbatches share (`entry`) where it is cut finer
        than the pieces of the batch, or in other sections: such parts of microbatches cannot be joined to a part of
        the batch. Not counted, since it serves the user and is not part of the priced step (as `full`)."""
        axes = cutters(spread.layout, dim_of(entry))
        alike = all(sections_of(spread.layout[axis]) == sections_of(entry) for axis in axes)
        if alike and self._pieces() % self._ways(spread.layout, dim_of(entry)) == 0:
            return list(values), spread
        layout = tuple("R" if axis in axes else entry for axis, entry in enumerate(spread.layout))
        with uncounted():
            return [
                relayout(value, spread.layout, layout, spread.shape, self.MESH, "output") for value in values
            ], Spread(layout, spread.shape)

    def _spread_of(self, value: Tensor, layout: str, shape: Sequence[int]) -> tuple[Tensor, Spread]:
        done = super().spread(value, layout, shape)
        return done, self._spread.pop()

    # -- state

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """As ShardedModule.full_state_dict, with what other places hold."""
        self._check_written()
        stated = self._stated()
        found = {
            name: value.cpu()
            for name, value in self._wholes(
                [n for n, about in stated.found.items() if about.info.persistent], lambda held: held.tensor
            )
            if value is not None
        }
        found |= {alias: found[name] for alias, name in self.ALIASES.items() if name in found}
        return {name: found[name] for name in stated.names(self.ALIASES, self.ORDER) if name in found}

    @torch.no_grad()
    def full_grads(self) -> dict[str, Tensor | None]:
        """As ShardedModule.full_grads, with those of other places."""
        stated = self._stated()
        trained = [
            name
            for name in stated.names(self.ALIASES, self.ORDER)
            if name in stated.found and not stated.found[name].buffer
        ]
        return dict(self._wholes(trained, lambda held: grad_at_rest(held.tensor)))

    def _stated(self) -> Declarations:
        """What all stages declare, wherever they run."""
        return Declarations.together([Declarations.stated(kind) for kind in self.STAGES])

    def _wholes(self, names: Iterable[str], of: Callable[[Held], Tensor | None]) -> Iterator[tuple[str, Tensor | None]]:
        """For each name the whole tensor that `of` gives on the first place that holds it, on every place; one at a
        time. A collective operation."""
        first = self._first_places()
        for name in names:
            held = self._held[name] if first[name] == self.MESH.place else None
            part = None if held is None else of(held)
            value = None if held is None or part is None else checkpoint.whole(local_of(part), held, self.MESH)
            yield name, tell(value, None, first[name], self.MESH)[0]

    def _first_places(self) -> dict[str, int]:
        """The first place that holds each parameter and buffer."""
        return {
            name: place
            for kind, place in reversed(list(zip(self.STAGES, self.PIPELINE.places, strict=True)))
            for name in kind.names()
        }

    def _copies(self) -> list[tuple[list[Held], ProcessGroup]]:
        return [([self._held[name] for name in one.names], one.group) for one in self._shared if one.mine]

    def _counted(self) -> list[nn.Parameter]:
        first = self._first_places()
        return [p for name, p in self.named_parameters() if first[name] == self.MESH.place]

    def _elsewhere(self) -> Iterator[str]:
        names = dict.fromkeys(name for kind in self.STAGES for name in kind.names())
        yield from names
        yield from (alias for alias, name in self.ALIASES.items() if name in names)
        yield from (
            path
            for kind in self.STAGES
            for _, namings in kind.RUNS.values()
            for naming in namings
            for path in paths_of(naming)
        )
