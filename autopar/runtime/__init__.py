"""What emitted files import: meshes, resharding, sharded modules, split algorithms. What it may import itself is in
docs/internals.md.

An emitted file looks like this (tests/helpers/emitted.py is a whole one, written by hand):

    from autopar.runtime import Block, Mesh, Param, ShardedModule, gather, main, reshard
    from autopar.runtime.algorithms import vocab_cross_entropy_sum, vocab_embedding

    MESH = Mesh((2, 2), ("dp", "tp"), "cpu")

    class Layer(Block):
        PARAMS = {"up.weight": Param((256, 64), "float32", "R,S0", sync=(0,)),         # global shape, dtype, at rest
                  "down.weight": Param((64, 256), "float32", "S0,S1")}
        BUFFERS = {}                                                                   # the same, reached by self.b

        def forward(self, h, *, b, s):                                                 # b, s: global sizes
            x = reshard(h, "S0,R -> S0,R", grad="S0,P -> S0,R", shape=(b, s, 64), mesh=MESH)
            x = F.linear(x, self.w["up.weight"]).relu()
            down = gather(self.w["down.weight"], "S0,S1 -> R,S1", grad="P,S1 -> S0,S1", shape=(64, 256), mesh=MESH)
            x = reshard(F.linear(x, down), "S0,P -> S0,R", grad="S0,R -> S0,R", shape=(b, s, 64), mesh=MESH)
            return h + x

    class Model(ShardedModule):
        MESH = MESH
        INPUTS = {"ids": "S0,R", "labels": "S0,R"}            # in the order of forward's arguments
        # optional: plain arguments that were planned: place among all, value
        FIXED = {"use_cache": (2, False)}
        # optional: where an argument holds several inputs, names of inputs as arguments hold them
        NESTED = {"batch": {"ids": "ids", "labels": "labels"}}
        OUTPUTS = (("loss", "loss"), ("output", "logits"), ("mutation", "bn.running_mean"))   # what forward returns
        STRUCTURE = {"loss": 0, "logits": 1}                  # optional: the user's pytree, leaves are output numbers
        ALIASES = {"lm_head.weight": "wte.weight"}            # tied: alias -> the name in PARAMS
        MIXED = True                                          # optional: mixed precision, floating inputs are cast
        TRAINS = False                                        # optional: planned for inference
        NORMS = {"bn": 0.1}                                   # optional: batch norms and their momentum
        UNEVALUATED = "..."                                   # optional: why `eval()` is refused
        CHANGING = ("steps",)                                 # optional: buffers that change in evaluation, too
        # of the state dict; a path is a block
        ORDER = ("wte.weight", *(f"layers.{i}" for i in range(4)), "lm_head.weight")
        PARAMS = {"wte.weight": Param((257, 64), "float32", "R,S0", sync=(0,))}
        BUFFERS = {}
        # original names; see runtime/names.py
        RUNS = {"layers": (Layer, [f"layers.{i}" for i in range(4)])}

        def forward(self, ids, labels):
            b, s = ids.shape[0] * 2, ids.shape[1]
            h = reshard(vocab_embedding(ids, self.w["wte.weight"], vocab=257, axes=(1,), mesh=MESH), ...)
            for block in self.runs["layers"]:
                h = block(h, b=b, s=s)
            ...
            return loss, self.spread(logits, "S0,R", (b, s, 257))

    if __name__ == "__main__":
        main(Model)

Meaning of the parts:

    reshard(x, "src -> dst", grad="consumer -> producer" | None, shape=, mesh=)
        Forward runs layout.steps(src, dst); backward runs layout.steps(consumer's gradient, producer's gradient).
    gather(...)        the same for weights: begun ahead, not kept for the backward but gathered again (ZeRO-3; kept
                       with again=False); with `dims` in another order, or after `casts`, where that is how they are
                       read.
    remat(block, ...)  block(...), run again in the backward instead of keeping what its operators save.
    keep(lambda: ...)  in such a block: the result is kept, and not computed again. skip(lambda: ...): nobody needs it
                       again. enough(): nor what follows.
    self.w, self.b     local shards of parameters and buffers, by the names in PARAMS and BUFFERS.
    Param(shape, dtype, layout, sync=axes, trainable=True)
        `sync` are the axes on which gradients are left partial and summed in buckets at the end of the backward.
    self.spread(value, layout, shape)
        An output for the user: partial sums are completed, cuts stay; `model.full(outputs)` puts them together.
    registered({"namespace.name.overload": "module"})
        Operators that are not torch's, and what registers them: said where one is missing.
    MESH.local(size, axes)   the length of this rank's chunk of `size` cut by `axes`, major first.

What a user sees: `Model().load_full(state_dict)`, `model(*local_batch)`, `model.train_step(*local_batch)`,
`model.shard_batch(*global_batch)`, `model.full_state_dict()`, `model.state_dict()` (DTensors),
`model.compile_blocks()`.
"""

from autopar.runtime.count import Counted, count
from autopar.runtime.launch import Ranks, launch
from autopar.runtime.main import main
from autopar.runtime.mesh import Mesh
from autopar.runtime.module import ShardedModule
from autopar.runtime.outputs import Outputs
from autopar.runtime.params import Param
from autopar.runtime.pipeline import Pipeline, PipelinedModule
from autopar.runtime.regather import gather
from autopar.runtime.registered import registered
from autopar.runtime.rematerialise import remat
from autopar.runtime.replay import enough, keep, skip
from autopar.runtime.reshard import reshard
from autopar.runtime.rng import manual_seed
from autopar.runtime.scaling import GradScaler
from autopar.runtime.scopes import Block, Stage

__all__ = [
    "Block",
    "Counted",
    "GradScaler",
    "Mesh",
    "Outputs",
    "Param",
    "Pipeline",
    "PipelinedModule",
    "Ranks",
    "ShardedModule",
    "Stage",
    "count",
    "enough",
    "gather",
    "keep",
    "launch",
    "main",
    "manual_seed",
    "registered",
    "remat",
    "reshard",
    "skip",
]
