"""Our parameter names and other projects', one table per family, used both ways.

Names on our side are those of unrolled layers (``encoder/layers_3/mlp/wo/kernel``); a
scanned model's stacked leaves are cut into these, or assembled from them.

Sources: ``save_pretrained`` of transformers 5.24 for Hugging Face; the checkpoints of
T5X and T5X Retrieval for theirs. Hugging Face keeps kernels as [out, in], and T5X its
position biases as [heads, buckets]: both are transposed on the way.
"""

import dataclasses
import re
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parameter, or one per layer where the names hold ``{i}``.

    Attributes:
        ours: our name.
        theirs: the other project's name.
        transposed: whether one is the other's transpose.
    """

    ours: str
    theirs: str
    transposed: bool = False


class NameTable:
    """Rules read from either side."""

    def __init__(self, rules: Sequence[Rule]):
        self.rules = tuple(rules)
        self._ours = [(_pattern(rule.ours), rule) for rule in rules]
        self._theirs = [(_pattern(rule.theirs), rule) for rule in rules]

    def to_ours(self, name: str) -> tuple[str, bool] | None:
        """Translates their name.

        Args:
            name: a name in a checkpoint.

        Returns:
            Our name and whether to transpose; None for a name the table does not hold.
        """
        for pattern, rule in self._theirs:
            if match := pattern.fullmatch(name):
                return rule.ours.format(**match.groupdict()), rule.transposed
        return None

    def to_theirs(self, name: str) -> tuple[str, bool] | None:
        """Translates our name; the inverse of ``to_ours``."""
        for pattern, rule in self._ours:
            if match := pattern.fullmatch(name):
                return rule.theirs.format(**match.groupdict()), rule.transposed
        return None


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)"))


_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}
_MLP = ("wi", "wi_0", "wi_1", "wo")


def _hf_attention(ours: str, theirs: str) -> list[Rule]:
    return [
        Rule(f"{ours}/{long}/kernel", f"{theirs}.{short}.weight", True)
        for long, short in _ATTENTION.items()
    ]


def _hf_stack(stack: str, sublayers: Sequence[tuple[str, str, str]]) -> list[Rule]:
    """Rules of an encoder or a decoder, whose sublayers are numbered from 0."""
    rules = [
        Rule(
            f"{stack}/relpos_bias/embedding",
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
        Rule(f"{stack}/final_norm/scale", f"{stack}.final_layer_norm.weight"),
    ]
    for i, (norm, ours, theirs) in enumerate(sublayers):
        layer, block = f"{stack}/layers_{{i}}", f"{stack}.block.{{i}}.layer.{i}"
        rules.append(Rule(f"{layer}/{norm}/scale", f"{block}.layer_norm.weight"))
        if ours == "mlp":
            rules += [
                Rule(f"{layer}/mlp/{n}/kernel", f"{block}.{theirs}.{n}.weight", True)
                for n in _MLP
            ]
        else:
            rules += _hf_attention(f"{layer}/{ours}", f"{block}.{theirs}")
    return rules


HUGGINGFACE = NameTable(
    [
        Rule("token_embedder/embedding", "shared.weight"),
        *_hf_stack(
            "encoder",
            [
                ("attention_norm", "attention", "SelfAttention"),
                ("mlp_norm", "mlp", "DenseReluDense"),
            ],
        ),
        *_hf_stack(
            "decoder",
            [
                ("self_attention_norm", "self_attention", "SelfAttention"),
                ("cross_attention_norm", "cross_attention", "EncDecAttention"),
                ("mlp_norm", "mlp", "DenseReluDense"),
            ],
        ),
    ]
)


def _t5x_stack(stack: str, renamed: dict[str, str]) -> list[Rule]:
    layer = f"{stack}/layers_{{i}}"
    bias = f"{stack}/relpos_bias"
    rules = [
        Rule(f"{bias}/embedding", f"{bias}/rel_embedding", True),
        Rule(f"{stack}/final_norm/scale", f"{stack}/{stack}_norm/scale"),
        *(Rule(f"{layer}/mlp/{n}/kernel", f"{layer}/mlp/{n}/kernel") for n in _MLP),
    ]
    for ours, theirs in renamed.items():
        if ours.endswith("_norm"):
            rules.append(Rule(f"{layer}/{ours}/scale", f"{layer}/{theirs}/scale"))
        else:
            rules += [
                Rule(f"{layer}/{ours}/{n}/kernel", f"{layer}/{theirs}/{n}/kernel")
                for n in _ATTENTION
            ]
    return rules


T5X = NameTable(
    [
        Rule("token_embedder/embedding", "token_embedder/embedding"),
        Rule("projection/kernel", "projection_layer/kernel"),
        *_t5x_stack(
            "encoder",
            {
                "attention_norm": "pre_attention_layer_norm",
                "attention": "attention",
                "mlp_norm": "pre_mlp_layer_norm",
            },
        ),
        *_t5x_stack(
            "decoder",
            {
                "self_attention_norm": "pre_self_attention_layer_norm",
                "self_attention": "self_attention",
                "cross_attention_norm": "pre_cross_attention_layer_norm",
                "cross_attention": "encoder_decoder_attention",
                "mlp_norm": "pre_mlp_layer_norm",
            },
        ),
    ]
)

_STACKED = re.compile(r"(encoder|decoder)/layers/(.+)")
_UNROLLED = re.compile(r"(encoder|decoder)/layers_(\d+)/(.+)")


def stacked_parts(name: str, num_layers: int) -> list[str] | None:
    """Names of the unrolled leaves in a scanned model's stacked leaf, else None."""
    match = _STACKED.fullmatch(name)
    if not match:
        return None
    stack, rest = match.groups()
    return [f"{stack}/layers_{i}/{rest}" for i in range(num_layers)]


def layer_number(name: str) -> tuple[str, int] | None:
    """The stack and layer an unrolled name belongs to, else None."""
    match = _UNROLLED.fullmatch(name)
    return (match[1], int(match[2])) if match else None
