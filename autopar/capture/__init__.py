"""From a model to the captured graph: torch.export of a copy on meta, then the passes. See docs/internals.md. Called by
the API and the command line (`capture.precision.capture_in`).

The way from model to graph:
    precision         the entry point: a model captured in a given precision
    asked             the checked arguments
    capture           all steps in order
    shadow            a copy of the model on meta, and a model joined with its loss function
    block_runs        runs of alike blocks; chain proves that they may be shortened, with outer_code and watched_number
    dims              which dims of inputs are symbolic; named_dims reads the user's dynamic_shapes
    export            torch.export, in attempts with fewer and fewer symbolic dims
    spans             the sizes for which the exported program is valid
    to_graph          the exported program as the graph that passes work on
    captured          the result
    constants         values of tensors that no state dict holds; recompute makes those of models on meta
    evaluation        what `model.eval()` changes

Changes to forward, and replacements of functions, while it is traced:
    forwards          buffers, keywords and sizes of the model's forward; assigned has buffers that it assigns
    devices           tensors that forward makes, on meta; autocast has the regions of autocast in it
    lengths           len(), list(), int() and float() of sizes; sets of strings in order
    batched           torch.vmap
    own_backwards     torch.autograd.Function
    flexible          flex_attention
    bags              embedding_bag of a matrix
    observers         fused observers of quantisation
    torch_forwards    torch's modules that read values
    traced_apart      code that is traced by itself
    value_checks      checks on values; finite_checks those for finite values
    mask_branches     conditions on whether a mask selects anything; mask_facts, empty_branches
    known_masks       selections by masks whose values are known
    equal_masks       selections by masks that are computed twice

Runs without values, compared as expressions:
    valueless         such runs
    tape              numbers for the values of a run; flags, by_tensor, leaves
    step_variation    whether all steps compute the same; step_counts

Refusals and messages:
    wrapped, hooks, inside, targets, outputs, python_random    models that cannot be captured
    failures, lines   torch's errors in the user's words, with the user's line

For later: state (names of the state dict), norms, nested (structure of inputs), lift_dtype (a graph in float64)
"""

from autopar.capture.capture import capture
from autopar.capture.captured import Captured
from autopar.capture.lift_dtype import lift
from autopar.capture.state import own_state

__all__ = ["Captured", "capture", "lift", "own_state"]
