"""How software holds memory while it runs a plan, apart from what the plan says: what emitted modules do, and what
other training software does otherwise. Read by the memory walk; set by predict for published runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Habits:
    """The defaults are those of emitted modules under `autopar.runtime`, which is what a plan of ours takes.

    frames           what a function makes is there until it returns; else until its last reader has run
    keeps_sent       what a stage hands to the next one of its place is there until its backward, what goes to another
                     place until the next goes, and what is received may be there before it is used (torch's stages)
    standing         gradients of parameters are in buffers that are made once, add up there and are summed there
    gradient_bytes   bytes of one element of a gradient that waits for the update; 0: those of the parameter at rest
    casts_gradients  gradients of parameters that rest in a wider dtype are cast to it one by one, as soon as they are
                     made
    moment_bytes     bytes of one element of each of the optimizer's moments; 0: those of the parameter at rest
    fused            chains of pointwise operators run as one kernel, whose backward works from what it read: nothing
                     between is made or kept
    regathers        activations that are gathered for a matmul are gathered again in the backward, not kept
    loss_in_place    the loss over classes works where the logits in its own dtype are, and leaves their gradient there
    log_softmax      a loss over split classes keeps its log-softmax, in a tensor of its own, and not the logits
                     (torch.distributed.tensor.parallel.loss_parallel)
    fused_update     the optimizer's step takes nothing beside its state
    kept_bytes       bytes of one element of what matmuls of blocks keep of their rows, a copy in 8 bits; 0: the rows
                     themselves
    hosted           of each stage, the share of masters and optimizer state that is in the memory of the host
    hosted_kept      of each stage, the share of what waiting microbatches keep that is there
    workspace_bytes  taken once by libraries through the allocator (cuBLAS)
    """

    frames: bool = True
    keeps_sent: bool = True
    standing: bool = False
    gradient_bytes: int = 0
    casts_gradients: bool = True
    moment_bytes: int = 0
    fused: bool = False
    regathers: bool = False
    loss_in_place: bool = False
    log_softmax: bool = False
    fused_update: bool = False
    kept_bytes: int = 0
    hosted: tuple[float, ...] = ()
    hosted_kept: tuple[float, ...] = ()
    workspace_bytes: float = 0.0


EMITTED = Habits()
