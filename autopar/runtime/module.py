"""The base classes of emitted code: `ShardedModule` for the model, `Block` for a repeated block.

Parameters are registered under their original names, in plain nested modules; the emitted forward works on *leaves*,
local tensors that alias the DTensor parameters, so autograd never sees a DTensor. gradsync.py carries the gradients
back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar._torch import give_local
from autopar.errors import RunError
from autopar.layout import is_partial, parse, show
from autopar.runtime import (
    all_at_once,
    batch,
    changes,
    checkpoint,
    clipping,
    host_state,
    loaders,
    norms,
    partial_numbers,
    regather,
    rng,
)
from autopar.runtime.assigned_data import AssignedData
from autopar.runtime.batch_sizes import BatchSizes, step_state
from autopar.runtime.declare import Declarations
from autopar.runtime.first_order import check_trains
from autopar.runtime.gradsync import GradSync
from autopar.runtime.leaves import Leaves, Part
from autopar.runtime.lifetimes import kept_by
from autopar.runtime.module_copies import not_pickled, twin
from autopar.runtime.module_state import ModuleState
from autopar.runtime.moves import relayout
from autopar.runtime.nested import Nested
from autopar.runtime.outputs import OTHER, Spread, by_name, is_number, leaves, pack, ungraded
from autopar.runtime.params import Held, Param
from autopar.runtime.rank0_weights import check_replicas
from autopar.runtime.reshard import reshard
from autopar.runtime.scaling import GradScaler, is_narrow, scale_of
from autopar.runtime.scopes import Scope
from autopar.runtime.state_copies import StateCopies
from autopar.runtime.tree import Tree
from autopar.runtime.uncompiled import check_uncompiled, not_compiled


class ShardedModule(ModuleState):
    """The base of an emitted model; see autopar.runtime for what an emitted class defines.

    `Model()` allocates this rank's parts without initialising them; fill them with `load_full` or `load_state_dict`.
    Raises RunError where the number of ranks is not the plan's.
    """

    INPUTS: ClassVar[Mapping[str, str]] = {}
    FIXED: ClassVar[Mapping[str, tuple[int, Any]]] = {}
    NESTED: ClassVar[Nested] = {}
    SAMPLE: ClassVar[batch.Sample] = {}
    MIXED: ClassVar[bool] = False  # mixed precision: floating inputs are cast to what is computed with
    DIMS: ClassVar[batch.Dims] = {}
    SIZES: ClassVar[Mapping[str, tuple[int, int | None, int]]] = {}
    OUTPUTS: ClassVar[Sequence[tuple[str, str]]] = ()
    UNGRADED: ClassVar[Sequence[int]] = ()  # numbers of outputs that have a gradient on one device, and none here
    STRUCTURE: ClassVar[Any] = None
    ORDER: ClassVar[Sequence[str]] = ()
    TRAINS: ClassVar[bool] = True
    NORMS: ClassVar[Mapping[str, float]] = {}  # the momentum of each batch norm
    UNEVALUATED: ClassVar[str] = ""  # why the program cannot run in evaluation; empty where it can
    CHANGING: ClassVar[Sequence[str]] = ()  # buffers that change in evaluation, too

    @torch.inference_mode(False)
    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self._met = self.MESH.meet()  # even on a place without parameters, since making process groups is collective
        self.rng = rng.Rng(seed)
        self._spread: list[Spread] = []
        self._told = BatchSizes(self.INPUTS, self.MESH)
        self._constant: dict[str, None] = {}  # names that `load_constants` has filled
        self._declared = [Declarations.of(scope) for scope in self._scopes()]
        declarations = Declarations.together(self._declared)
        elsewhere = dict.fromkeys(self._elsewhere())
        aliases = {alias: name for alias, name in self.ALIASES.items() if name in declarations.found}
        self._names = declarations.names(aliases, self.ORDER, elsewhere)
        self._held = declarations.register(self, aliases, self._names, self.MESH)
        self._tree = Tree(self, self._held, aliases, self.MESH)
        self._assigned_data = AssignedData(self._held)
        self._narrow = is_narrow(self.declared().values())
        self._watch()
        partial_numbers.watch(self.MESH.device_mesh)
        partial_numbers.watch(self.MESH.model_order)
        host_state.install(self)
        all_at_once.install(self)
        clipping.watch(self.MESH)
        self._changes = changes.watch(self)
        self._state_copies = StateCopies()
        checkpoint.install(self, self._held, aliases, self.MESH, self._state_copies, elsewhere)
        self.register_state_dict_pre_hook(lambda module, prefix, keep_vars: module._check_written())
        self.register_load_state_dict_pre_hook(
            lambda module, state, *rest: module._changes.loaded("load_state_dict()", {})
        )

    def _scopes(self) -> Sequence[Scope]:
        """The scopes that run on this rank: the model itself, or its stages here."""
        return [self]

    def _watch(self) -> None:
        """Watch the gradients of all parameters."""
        self._sync = GradSync.watching(self._held, self.MESH, self._blocks())
        self._leaves = Leaves([Part(self._held.values(), None, self._blocks())], self.MESH)

    def declared(self) -> dict[str, Param]:
        """What the plan says of each parameter and buffer, by original name."""
        return {name: held.info for name, held in self._held.items()}

    # -- running

    def train(self, mode: bool = True) -> Self:
        """As nn.Module.train: `eval()` is `train(False)`, and the next calls evaluate. Nothing is dropped then, batch
        norms have their running statistics, and buffers stay that only training changes. Raises RunError where the
        model does in evaluation what no operator of a training step does."""
        if not mode and self.UNEVALUATED:
            raise RunError(
                "eval(): this module is a training step, and in evaluation the model does something else: "
                f'{self.UNEVALUATED}. Plan its evaluation with compile(model, ..., mode="inference") and fill that '
                "module with load_full(model.full_state_dict())"
            )
        for module in self.modules():
            module.training = mode
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run this rank's part of a batch; gives the outputs in the structure of the original model, cut as the plan
        says.

        Raises RunError on inputs that the plan does not have, and where the ranks' shapes do not fit together.
        """
        with self._together():
            return self._packed(self._run(args, kwargs))

    def train_step(
        self, *args: Any, scaler: GradScaler | None = None, loss_weight: float = 1.0, **kwargs: Any
    ) -> Tensor:
        """Forward and backward of this rank's part of a batch; gradients add up in `param.grad`, times `loss_weight`
        (1/k in each of k steps that add up) and the scale of `scaler`, which mixed precision in float16 needs. Gives
        the global loss, the same on all ranks, detached and without either. Raises RunError where the plan has no loss,
        or needs a scaler, without gradients (no_grad), and where all parameters are frozen."""
        with self._together():
            scale = scale_of(scaler, self.MESH.device, needed=self._narrow, weight=loss_weight)
            # other results (logits) need not outlive the forward
            loss = self._run(args, kwargs, loss_weight)[self._loss_number(self._results())]
            check_trains(loss.requires_grad)
            self._turn()
            loss.backward(None if scale is None else scale.to(loss.dtype))
            return loss.detach()

    def _loss_number(self, outputs: Sequence[tuple[str, str]]) -> int:
        """Which of `outputs` is the loss. Raises RunError where none is."""
        roles = [role for role, _ in outputs]
        if "loss" not in roles:
            raise RunError(
                "the model returns no loss, so there is no training step: plan it with labels among its inputs, or "
                "with loss_fn= (on the command line: with a factory whose model gives the loss)"
            )
        return roles.index("loss")

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any], loss_weight: float) -> list[Any]:
        """The inputs of a call in the order of the plan, checked against the program's sizes. In the first call the
        ranks compare their contents, in later ones their sizes and the state of the step, with the weight of its
        loss."""
        batch.without_autocast(self.MESH)
        self.MESH.check_met(self._met)
        self._tree.check()
        self._check_written()
        inputs = batch.bind(self.INPUTS, args, kwargs, self.FIXED, self.NESTED)
        batch.check_kinds(self.SAMPLE, self.INPUTS, inputs)
        if torch.is_grad_enabled():
            batch.without_gradient(self.INPUTS, inputs)
        if self.MIXED:
            inputs = batch.as_computed(self.SAMPLE, self.INPUTS, inputs)
        batch.check_sizes(self.INPUTS, self.DIMS, self.SIZES, inputs, self.MESH)
        if not self._told.begun:
            self._told.first(inputs)
            check_replicas(self._held.values(), self.rng.seed, self.MESH, self._copies())
        state = step_state(self.rng if self._has_loss() else None, training=self.training, loss_weight=loss_weight)
        others = self._in_step() and self._told.tell(inputs, self._held, state, self._changes)
        if others and self.data_parallel_size < self.MESH.ranks:
            self._told.look()  # checked now: ranks that share samples exchange tensors of these sizes in the forward
        return inputs

    def _together(self) -> AbstractContextManager[None]:
        """The context of a call: where it needs all ranks, they count it, and learn of an error in it. Raises RunError
        in code that torch.compile compiles."""
        check_uncompiled()
        return self._told.step() if self.MESH.ranks > 1 and self._in_step() else nullcontext()

    def _in_step(self) -> bool:
        """Whether this forward needs all ranks: a loss and gradients are reduced over all of them. A forward without
        either may be run by some ranks only."""
        return self._has_loss() or (self.TRAINS and torch.is_grad_enabled())

    def _has_loss(self) -> bool:
        return any(role == "loss" for role, _ in self.OUTPUTS)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any], loss_weight: float = 1.0) -> list[Tensor]:
        """One forward: check the inputs, refresh the leaves, run, and take over new values of buffers. Returns the
        outputs of the model."""
        inputs = self._bound(args, kwargs, loss_weight)
        self._sync.renew(self._held.values())
        self._leaves.refresh()
        self._spread.clear()
        self.mutations.clear()
        self._advance()
        with ExitStack() as stack:
            stack.enter_context(rng.using(self.rng))
            self._turn = stack.enter_context(regather.regathering(self._sync))
            values = list(super().__call__(*inputs))
        kept_by(values, self._sync)
        self._told.look()
        if self.OUTPUTS and len(values) != len(self.OUTPUTS):
            raise RunError(
                f"forward returned {len(values)} values, wanted {len(self.OUTPUTS)}: "
                f"{[name for _, name in self.OUTPUTS]}"
            )
        for (role, name), value in zip(self.OUTPUTS, values, strict=False):
            if role == "mutation":
                self.mutations.append((name, value))
        for name, value in self.mutations:
            self._mutate(self._held[self.ALIASES.get(name, name)], value)
        return (
            [v for v, (role, _) in zip(values, self.OUTPUTS, strict=False) if role != "mutation"]
            if self.OUTPUTS
            else values
        )

    def _advance(self) -> None:
        """Begin a step of the random numbers, or an evaluation: one without gradients counts as none."""
        training = self.training or not self.TRAINS
        self.rng.advance(training=training, counts=training or torch.is_grad_enabled())

    def _mutate(self, held: Held, value: Tensor) -> None:
        """A buffer's new value, unless only training changes it. Not in place, as the backward may need the old one;
        the tensor itself stays, which other names of the buffer and users hold."""
        if not self.rng.training and held.name not in self.CHANGING:
            return
        with torch.inference_mode(False):  # a tensor of inference could not be part of a step later
            give_local(held.tensor, value.detach().clone())

    def _results(self) -> list[tuple[str, str]]:
        return [(role, name) for role, name in self.OUTPUTS if role != "mutation"]

    def _structure(self, count: int) -> Any:
        if self.STRUCTURE is not None:
            return self.STRUCTURE
        return by_name(tuple(name for _, name in self._results()) or ("",) * count)

    def _packed(self, values: Sequence[Any], why: str = OTHER) -> Any:
        """The outputs of a call in the user's structure; `why` some have no way for a gradient."""
        names = {number: self._results()[number][1] for number in self.UNGRADED}
        given = [ungraded(value, names[i], why) if i in names else value for i, value in enumerate(values)]
        return pack(self._structure(len(given)), given.__getitem__)

    # -- outputs and batches

    def spread(self, value: Tensor, layout: str, shape: Sequence[int]) -> Tensor:
        """An output for the user: partial sums are completed, cuts stay and are noted for `full`."""
        src = parse(layout)
        dst = tuple("R" if is_partial(e) else e for e in src)
        self._spread.append(Spread(dst, tuple(shape)))
        return reshard(
            value, f"{layout} -> {show(dst)}", grad=f"{show(dst)} -> {show(dst)}", shape=shape, mesh=self.MESH
        )

    def spreads(self) -> dict[int, Spread]:
        """How each cut output of the last call lies, by its number among the outputs; the others (the loss) are whole
        everywhere."""
        roles = [role for role, _ in self._results()] or ["output"] * len(self._spread)
        numbers = [index for index, role in enumerate(roles) if role == "output"]
        return dict(zip(numbers, self._spread, strict=False))  # a call that failed noted fewer

    @torch.no_grad()
    def full(self, outputs: Any) -> Any:
        """Outputs of the last call with every tensor whole, on every rank; a collective operation. Raises RunError
        where there was no call, and where `outputs` are some of them only."""
        if not self._told.begun:
            raise RunError("full takes what a call of the model returned, and the model was not called yet")
        at = self.spreads()
        structure = self._structure(len(self._results()) or len(at))
        wanted, given = list(leaves(structure)), list(leaves(outputs))
        if len(wanted) != len(given):
            names = ", ".join(name for _, name in self._results() if name)
            raise RunError(
                f"full takes all that the last call returned, {len(wanted)} outputs{f' ({names})' * bool(names)}, and "
                f"was given {len(given)}: how one lies on the ranks is known by its number; pick from what full returns"
            )
        values = {i: self._whole(leaf, at.get(i)) for i, leaf in zip(wanted, given, strict=True) if is_number(i)}
        return pack(structure, values.__getitem__)

    def _whole(self, value: Tensor, at: Spread | None) -> Tensor:
        return (
            value
            if at is None
            else relayout(value.detach(), at.layout, ("R",) * len(at.layout), at.shape, self.MESH, "output")
        )

    def shard_batch(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """This rank's part of a global batch, in the order of the inputs. Raises RunError where a dim does not
        divide."""
        return tuple(
            batch.cut_batch(self.INPUTS, batch.bind(self.INPUTS, args, kwargs, self.FIXED, self.NESTED), self.MESH)
        )

    @property
    def data_parallel_size(self) -> int:
        """Among how many loaders the samples of a global batch are dealt: `num_replicas` of a DistributedSampler."""
        return loaders.share(loaders.loading_axes(self.INPUTS, self.DIMS), self.MESH)[0]

    @property
    def data_parallel_rank(self) -> int:
        """Which of those loaders is this rank's, `rank` of a DistributedSampler; ranks that work on the same samples
        together have the same."""
        return loaders.share(loaders.loading_axes(self.INPUTS, self.DIMS), self.MESH)[1]

    def shard_loaded(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """This rank's part of what its loader gave, the samples of `data_parallel_rank`, in the order of the inputs;
        what has no samples is given whole. Raises RunError where a dim does not divide."""
        inputs = loaders.loaded(self.INPUTS, self.DIMS)
        return tuple(batch.cut_batch(inputs, batch.bind(self.INPUTS, args, kwargs, self.FIXED, self.NESTED), self.MESH))

    def update_bn(self, batches: Iterable[Any]) -> Self:
        """Make the running statistics of batch norms those of `batches`, of equal weight, with the weights as they are,
        as torch.optim.swa_utils.update_bn does: averaged weights need it. A batch is what a call takes, as
        `shard_batch` gives it; all ranks go through theirs together. Raises RunError where there are none, and where a
        norm is called twice."""
        norms.renew(self, batches)
        return self

    # -- state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A module of its own with the same weights, buffers and random numbers to come, on the same mesh, as averages
        of weights (`AveragedModel`) and teachers are made. Gradients are not copied."""
        return twin(self, memo)

    __reduce_ex__ = not_pickled

    def _copies(self) -> Sequence[tuple[Sequence[Held], ProcessGroup]]:
        """What places of a pipeline have copies of, with the ranks that have them."""
        return ()

    compile = not_compiled

    def compile_blocks(self, backend: Any = "inductor", **options: Any) -> Self:
        """Compile the forward of every block with torch.compile; numerically the same, but for gradients of weights
        that a block gathers: in mixed precision their sums over ranks are rounded to the dtype of compute before they
        are added."""
        for block in self._blocks():
            block.compile(backend=backend, **options)
        return self
