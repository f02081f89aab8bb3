"""Which architectures of transformers plans are right for: each made narrow and shallow, on four gloo ranks against one
device, in float64.

    python -m benchmarks.architectures [--kinds causal images ...] [--only llama bert ...] [--plans searched "random 0"
    ...] [--json FILE]

Configs are the defaults of their classes with every size that SIZES names made small, whatever the architecture. Some
cannot be made so: their constructor or their validation refuses the sizes, or what is left is still large. Those that
can are captured and run under each of the plans (tests/helpers/verify.py says what they are; `zero3` and other recipes
on a mesh of 4, the others on 2x2): loss, outputs, gradients, parameters after an AdamW step, and collectives run =
collectives priced. Each is looked at in a process of its own, since models that take too much memory are killed there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from tabulate import tabulate

from autopar.errors import AutoparError, RunError
from autopar.frontend.labels import HEADS
from autopar.plan import write_atomic
from autopar.recipes import RECIPES
from tests.helpers.tiny import TINY
from tests.helpers.verify import planned, subject

KINDS = {
    **dict(zip(("causal", "masked", "seq2seq"), HEADS, strict=True)),
    "answers": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "texts": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "pixels": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "videos": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "sounds": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
"""Where transformers lists its architectures of a kind."""

PLANS = ("searched", "random 0", "random 1", "zero3")
REFUSALS = (
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What constructors and validations of transformers raise where they do not take the sizes."""

LIMIT_S = 240.0
LARGE = 12_000_000
"""Parameters of a model that was not made small."""

SIZES: dict[int, str] = {
    32: "hidden_size d_model n_embd dim n_embed embed_dim word_embed_proj_dim embedding_size emb_dim",
    64: """intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size mlp_hidden_size
    shared_expert_intermediate_size vocab_size
           max_position_embeddings n_positions n_ctx d_inner prefix_intermediate_size shared_intermediate_size mlp_dim
           decoder_vocab_size""",
    24: "q_lora_rank",
    16: "kv_lora_rank mamba_d_head moe_intermediate_size time_step_rank expert_intermediate_size mamba_head_dim",
    8: """head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim sliding_window mamba_d_state state_size
    d_kv linear_key_head_dim linear_value_head_dim
          index_head_dim ssm_state_size mamba_state_dim attention_head_dim local_window linear_head_dim""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
    num_local_experts n_routed_experts mamba_n_heads
          linear_num_value_heads linear_num_heads index_n_heads moe_num_experts num_key_value_heads num_kv_heads
          kv_n_heads rotary_dim
          num_frames frames_per_clip""",
    2: """num_hidden_layers n_layer n_layers num_layers num_layers_per_stack encoder_layers decoder_layers
    num_decoder_layers num_experts_per_tok moe_k moe_top_k experts_per_token
          num_experts_per_token linear_num_key_heads num_experts_per_topk moe_topk""",
    1: "n_shared_experts num_shared_experts first_k_dense_replace n_group topk_group mamba_n_groups n_groups",
}
"""What a size becomes, by what configs call it."""

SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
PICTURE_SIDE = 64  # pixels
AT_RANDOM = ("layerdrop", "apply_spec_augment")
"""What is turned off: layers left out, or numpy's random masks, which a graph would have alike in every step."""
BY_STAGE = ("depths", "depth", "num_block_repeats")
"""How many layers each stage of an image model has: one is kept."""
BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")
"""Lists of what each layer is: one layer of each kind is kept, two at least."""


@dataclass(frozen=True)
class Found:
    """What became of one architecture: `outcome` is one of right, refused, wrong, "not made small" or stopped, `why`
    the first line of the reason."""

    kind: str
    name: str
    outcome: str
    why: str = ""
    worst: float = 0.0
    seconds: float = 0.0


def shrink(config: Any) -> None:
    """Make a config of transformers small, the configs inside it too."""
    staged = next((name for name in BY_STAGE if isinstance(getattr(config, name, None), (list, tuple))), None)
    for name, value in list(vars(config).items()):
        if name == "image_size" and value:
            config.image_size = [PICTURE_SIDE] * len(value) if isinstance(value, (list, tuple)) else PICTURE_SIDE
        elif name == staged:
            setattr(config, name, [1] * len(value))
        elif staged and not hasattr(value, "to_dict"):
            continue  # widths go with lists of others
        elif name in SMALL and type(value) is int:
            setattr(config, name, SMALL[name])
        elif name.endswith("token_id") and isinstance(value, int):
            setattr(config, name, 1 if "eos" in name else 0)
        elif name.endswith(AT_RANDOM) and value:
            setattr(config, name, type(value)(0))
        elif name in BY_LAYER and isinstance(value, list):
            kept = list(dict.fromkeys(value))
            setattr(config, name, (kept * 2)[: max(2, min(len(kept), 3))])
            config.num_hidden_layers = len(getattr(config, name))
        elif hasattr(value, "to_dict"):
            shrink(value)
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 0  # which most default configs leave out


def made(kind: str, name: str, folder: Path) -> str:
    """The spec of a small model of an architecture, written into `folder`. Raises one of REFUSALS where it cannot be
    made."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[name]()
    shrink(config)
    # of layers that may be gone
    sizes = {size: value for size, value in config.to_dict().items() if size not in ("out_features", "out_indices")}
    config = type(config).from_dict(sizes)  # which looks at the sizes again
    model = getattr(transformers, architectures(kind)[name])(config)
    count = sum(p.numel() for p in model.parameters())
    if count > LARGE:
        raise ValueError(f"{count} parameters are left")
    where = folder / f"{kind}-{name}.json"
    write_atomic(where, json.dumps(config.to_dict() | {"architectures": [type(model).__name__]}, default=str))
    return f"hf:{where}"


def architectures(kind: str) -> dict[str, str]:
    """The class of each architecture of a kind, by its name."""
    from transformers.models.auto import modeling_auto

    listed = getattr(modeling_auto, KINDS[kind]).items()
    return {name: found if isinstance(found, str) else found[0] for name, found in listed}


def one(kind: str, name: str, plans: Sequence[str], folder: Path) -> Found:
    """Make, plan and verify one architecture in this process."""
    begin = time.perf_counter()
    try:
        spec = made(kind, name, folder)
    except REFUSALS as error:
        return Found(kind, name, "not made small", " ".join(f"{type(error).__name__}: {error}".split()))
    TINY[name] = spec
    worst = 0.0
    try:
        for how in plans:
            who = subject(name)
            report = who.verified(planned(who, (4,) if how in RECIPES else (2, 2), how))
            worst = max(worst, report.value_error)
            if not report.ok:
                return Found(kind, name, "wrong", f"{how}: {report.first}", worst, time.perf_counter() - begin)
    except RunError as error:
        return Found(kind, name, "stopped", str(error).splitlines()[-1], worst, time.perf_counter() - begin)
    except AutoparError as error:
        return Found(kind, name, "refused", str(error).splitlines()[0], worst, time.perf_counter() - begin)
    return Found(kind, name, "right", "", worst, time.perf_counter() - begin)


def apart(kind: str, name: str, plans: Sequence[str], folder: Path) -> Found:
    """`one` in a process of its own, for LIMIT_S seconds at most."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(there, kind, name, plans, folder))
    child.start()
    there.close()
    try:
        found: Found = here.recv() if here.poll(LIMIT_S) else Found(kind, name, "stopped", f"after {LIMIT_S:g} s")
    except EOFError:
        found = Found(kind, name, "stopped", "its process was killed, for memory most likely")
    finally:
        child.kill()
        child.join()
    return found


def _send(end: Connection, *args: Any) -> None:
    end.send(one(*args))


def table(found: Sequence[Found]) -> str:
    """A row for each kind, then what is not right."""
    kinds = dict.fromkeys(each.kind for each in found)
    outcomes = ("right", "refused", "wrong", "stopped", "not made small")
    rows = []
    for kind in kinds:
        mine = [each for each in found if each.kind == kind]
        counts = Counter(each.outcome for each in mine)
        rows.append(
            [
                kind,
                len(mine),
                *(counts[outcome] for outcome in outcomes),
                max((each.worst for each in mine), default=0.0),
                sum(each.seconds for each in mine),
            ]
        )
    others = [[each.kind, each.name, each.outcome, each.why[:160]] for each in found if each.outcome != "right"]
    return (
        tabulate(
            rows,
            headers=["kind", "architectures", *outcomes, "worst error", "seconds"],
            floatfmt=(*("",) * 7, ".1e", ".0f"),
        )
        + "\n\n"
        + tabulate(others, headers=["kind", "architecture", "outcome", "why"])
    )


def main() -> int:
    """Print the table; the exit code is 0 when nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    todo = [
        (kind, name)
        for kind in options.kinds
        for name in architectures(kind)
        if not options.only or name in options.only
    ]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (kind, name) in enumerate(todo):
            found.append(apart(kind, name, options.plans, Path(folder)))
            print(f"{number + 1}/{len(todo)} {found[-1]}", file=sys.stderr, flush=True)
    print(table(found))
    if options.json:
        write_atomic(options.json, json.dumps([asdict(each) for each in found], indent=1))
    return 1 if any(each.outcome == "wrong" for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
