"""How the table of published runs says what of the forward runs again in the backward."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.costmodel.tables import Refused

PARTS = (("attention", "att"), ("mlp", "mlp"), ("experts", r"\bmoe\b(?![ _-]act)"))
"""Parts of a block that run again, by how the column names them; `moe_act` is the activation of experts alone."""

KINDS = (
    ("none", r"^(none|no|n|off|false|0|disabled)\b"),
    ("selective", r"select|partial|core|att|mlp|\bop\b"),
    ("full", r"full|whole|block|uniform|(?<![a-z])layers?(?![a-z])|^(yes|y|on|true|1|all|enabled)\b(?!/)|checkpoint"),
    ("selective", r"moe|norm"),
)
"""What runs again by how the column names it, the first that it does."""

EVERY = r"every (?:(\d+)(?:nd|rd|th)?|other|second|third|fourth)\b"
ORDINALS = {"other": 2, "second": 2, "third": 3, "fourth": 4}
SOME = r"(\d+) ?(?:of|out of|/) ?(?:the )?(\d+) (?:layers|blocks)"
FIRST = (
    r"(?i)\bblock\b.*(?:\b|_)layers?\b ?[=:]? ?(\d+)|\bblock\b\D*(\d+) layers?\b|(\d+) (?:layers|blocks) "
    r"(?:of|per|in|on) (?:each|every|a)? ?(?:pipeline |virtual )*(?:stage|place|rank|chunk)"
)
"""Ways to say that some of the blocks run again: every so many, so many of all, or so many of each stage
(Megatron-Core, recompute_method = block with recompute_num_layers; with uniform all do, in groups of so many)."""


PLAIN = r"selective|partial|\bac\b|activation|recompute|recomputation|checkpointing|granularity|[^a-z0-9]"
"""What of a kind says nothing of parts."""


@dataclass(frozen=True)
class Rerun:
    """As Setup has it: `kind`, the `share` of the blocks, or the `first` so many of each stage (0: not stated so), and
    the `parts` of each."""

    kind: str
    share: float = 1.0
    parts: tuple[str, ...] = ()
    first: int = 0

    @staticmethod
    def of(kind: str, detail: str) -> Rerun:
        """What both columns say. Raises Refused where that is none of the known ways."""
        policy = next((again for pattern, again in SAVED if re.search(pattern, f"{kind} {detail}", re.I)), None)
        if policy:
            return policy
        named = next((name for name, pattern in KINDS if re.search(pattern, kind.lower())), None) if kind else "none"
        if named is None:
            raise Refused(f"recompute is {kind}; wanted none, selective or full")
        if named == "none":
            return Rerun("none")
        detail = detail or (kind if re.sub(PLAIN, "", kind.lower()) else "")
        first = _first(detail)
        if first:
            return Rerun("full", first=first)
        if named == "full" or _share(detail) < 1.0:  # of whole blocks
            return Rerun("full", _share(detail))
        if "matmul" in detail or re.search(r"\bop\b", detail):  # all but attention and every second matmul
            return Rerun("selective", parts=("operators",))
        parts = tuple(part for part, pattern in PARTS if re.search(pattern, detail, re.I)) if detail else ("attention",)
        return Rerun("selective" if parts else "none", parts=parts)


SAVED = (
    (r"save_nothing|nothing_saveable", Rerun("full")),
    (r"save_everything|everything_saveable", Rerun("none")),
    (r"dots?_\w*context_except_mlp", Rerun("selective", parts=("mlp",))),
    (r"save_dots?_except_mlp|save_qkv", Rerun("selective", parts=("attention", "mlp"))),
    (r"save_(?:\w*out_proj|context)", Rerun("full")),
    (r"minimal_(?:flash|with_context)|save_dots?_\w*context", Rerun("none")),
    (r"save_dots?|dots?_(?:\w+_)?saveable|\bminimal\b", Rerun("selective", parts=("attention",))),
)
"""Policies of JAX that are named by what they save, and what runs again then: without queries, keys and values nearly
all of a block; attention where it is one kernel, unless its result ("context") is saved too, since policies of `dots`
save products (praxis, AutodiffCheckpointType; MaxText, remat_policy; jax.checkpoint_policies)."""


def _first(text: str) -> int:
    """How many blocks of each stage run again; 0 where it is not stated so."""
    found = re.search(FIRST, text) if not re.search(f"{EVERY}|{SOME}", text) else None
    return int(next(filter(None, found.groups()))) if found else 0


def _share(text: str) -> float:
    """Of the blocks that run again at all, the share that does."""
    some, every = re.search(SOME, text), re.search(EVERY, text, re.I)
    if every:
        return 1 / max(1, int(every[1] or ORDINALS[every[0].split()[-1].lower()]))
    return min(1.0, int(some[1]) / max(1, int(some[2]))) if some else 1.0
