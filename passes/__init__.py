"""Passes over captured graphs: fx graph -> fx graph, one per file. Called by autopar.capture.

A pass is `def name(gm: fx.GraphModule, **options) -> fx.GraphModule`; `passes.run.run` applies a tuple of them in
order. `NORMALIZE` brings a freshly exported graph to the contract of docs/internals.md; `ANNOTATE` folds it and adds
FLOPs and bytes. A docstring of a pass says what it *needs* of the graph before, what it *does*, and what it *gives*.

Beside the passes, `edit` changes graphs, `facts` reads sizes and dtypes, `ops` are functions that passes put into
graphs, `saved` (with `saved_rows`, `kernel_extras`, `recurrent`, `operand_order`) has what autograd keeps, `evaluate`
computes values that depend on sizes only, `interpret` runs a graph on one device, `switches` makes a training graph
evaluate, `part_runs` divides runs of blocks for a plan.
"""

from __future__ import annotations

from passes.alignments import alignments
from passes.annotate_flops import annotate_flops
from passes.annotate_memory import annotate_memory
from passes.bags import bags
from passes.batch_norm import batch_norm
from passes.biases import biases
from passes.broadcasts import broadcasts
from passes.causal_masks import causal_masks
from passes.composed import composed
from passes.copied import copied
from passes.drop_devices import drop_devices
from passes.drop_noops import drop_noops
from passes.einsums import einsums
from passes.equal_views import equal_views
from passes.expert_loops import expert_loops
from passes.expert_pieces import pieces
from passes.experts import experts
from passes.fills import fills
from passes.fold_repeats import fold_repeats
from passes.grouped import grouped
from passes.grouped_heads import grouped_heads
from passes.inline_no_grad import inline_no_grad
from passes.inplace import inplace
from passes.lint import lint
from passes.losses import losses
from passes.masked import masked
from passes.matmul import matmul
from passes.means import means
from passes.noises import noises
from passes.norms import norms
from passes.numbers import numbers
from passes.one_column import one_column
from passes.one_sample import one_sample
from passes.own_dtypes import own_dtypes
from passes.products import products
from passes.provenance import provenance
from passes.ranges import ranges
from passes.rejoined import rejoined
from passes.rows_apart import rows_apart
from passes.run import Pass, run
from passes.sample_draws import sample_draws
from passes.sink_flatten import sink_flatten
from passes.spellings import spellings
from passes.split_ops import split_ops
from passes.strided import strided
from passes.written_back import written_back

NORMALIZE: tuple[Pass, ...] = (
    provenance,
    copied,
    inline_no_grad,
    drop_devices,
    composed,
    batch_norm,
    inplace,
    strided,
    spellings,
    alignments,
    drop_noops,
    own_dtypes,
    broadcasts,
    one_column,
    masked,
    norms,
    noises,
    sample_draws,
    rejoined,
    ranges,
    causal_masks,
    one_sample,
    grouped_heads,
    grouped,
    products,
    einsums,
    matmul,
    sink_flatten,
    rows_apart,
    bags,
    fills,
    pieces,
    experts,
    equal_views,
    expert_loops,
    written_back,
    split_ops,
    losses,
    means,
    numbers,
    drop_noops,
    biases,
    lint,
)
"""From an exported graph to the contract of docs/internals.md."""

ANNOTATE: tuple[Pass, ...] = (fold_repeats, annotate_flops, annotate_memory)
"""From that contract to a folded graph with costs of every call."""

__all__ = ["ANNOTATE", "NORMALIZE", "Pass", "run"]
