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
    sums_last        gradients of weights that rest cut are whole, in the dtype of the computation, until those of the
                     last microbatch are there (no_sync)
    flat             of a block with trained weights all weights have gradients, as parts of one flat parameter
    gradient_bytes   bytes of one element of a gradient that waits for the update; 0: those of the parameter at rest
    casts_gradients  gradients of parameters that rest in a wider dtype are cast to it one by one, as soon as they are
                     made
    moment_bytes     bytes of one element of each of the optimizer's moments (0: all are in the memory of the host);
                     None: those of the parameter at rest
    spends           gradients of parameters are used up one by one as they are made: by an optimizer that runs inside
                     the backward, or on their way to the host
    fused            chains of pointwise operators run as one kernel, whose backward works from what it read: nothing
                     between is made or kept
    keeps_sums       but for sums of two tensors, which are kept and not these (the partitions of torch.compile)
    regathers        activations that are gathered for a matmul are gathered again in the backward, not kept
    loss_in_place    the loss over classes works where the logits in its own dtype are, and leaves their gradient there
    loss_fused       the loss over classes is one kernel that reads the logits as they are, keeps these and writes their
                     gradient: nothing has its own dtype
    loss_chunks      it takes the logits in so many parts, one after the other, whose gradients go on one by one
    chunked_logits   the logits too are made part by part, and not kept
    log_softmax      a loss over split classes keeps its log-softmax, in a tensor of its own, and not the logits
                     (torch.distributed.tensor.parallel.loss_parallel)
    fused_update     the optimizer's step takes nothing beside its state
    kept_bytes       bytes of one element of what matmuls of blocks keep of their rows, a copy in 8 bits; 0: the rows
                     themselves
    frozen_bytes     bytes of one element of matrices of blocks that are not trained, which are made whole for each
                     operator that reads them (weights in 4 bits); 0: those that are computed with
    keeps_rows       products with frozen weights keep the rows that they multiply, as those with trained ones do
    hosts_blocks     what blocks keep is in the memory of the host while other blocks run
    hosts_weights    weights rest in the memory of the host, and are on the device while they are gathered
    hosted           of each stage, the share of masters and optimizer state that is in the memory of the host
    hosted_kept      of each stage, the share of what waiting microbatches keep that is there
    workspace_bytes  taken once by libraries through the allocator (cuBLAS)
    """

    frames: bool = True
    keeps_sent: bool = True
    standing: bool = False
    sums_last: bool = False
    flat: bool = False
    gradient_bytes: int = 0
    casts_gradients: bool = True
    moment_bytes: float | None = None
    spends: bool = False
    fused: bool = False
    keeps_sums: bool = False
    regathers: bool = False
    loss_in_place: bool = False
    loss_fused: bool = False
    loss_chunks: int = 1
    chunked_logits: bool = False
    log_softmax: bool = False
    fused_update: bool = False
    kept_bytes: int = 0
    frozen_bytes: float = 0.0
    keeps_rows: bool = False
    hosts_blocks: bool = False
    hosts_weights: bool = False
    hosted: tuple[float, ...] = ()
    hosted_kept: tuple[float, ...] = ()
    workspace_bytes: float = 0.0


EMITTED = Habits()
