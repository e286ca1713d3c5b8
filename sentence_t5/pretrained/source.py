"""Source: an opened checkpoint of any format, under our parameter names.

Opening reads headers only. What a format knows besides weights (the model's shape, a
vocabulary, prompts) travels along, as far as it is there.
"""

import dataclasses
from collections.abc import Mapping

from sentence_t5 import encoder as encoder_lib
from sentence_t5.pretrained import name_tables, tensors


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A SentencePiece model and the number of sentinels behind its pieces."""

    model_bytes: bytes
    extra_ids: int


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint opened for reading.

    Attributes:
        path: where it is.
        family: its format, in words.
        tensors: our unrolled names -> tensors in our orientation, as stored.
        foreign: names this model has no place for -> tensors, under their own names.
        never_needed: what no encoder needs (an output head, optimizer state), by name.
        config: the encoder that fits; None if the shapes are of no T5.
        vocabulary: None if the checkpoint has none.
        max_length: tokens that texts are trimmed to; None where nothing says it.
        prompts: texts to put before an input, by name.
        default_prompt: the name of the prompt used when none is asked for.
        step: number of updates behind the weights; None where nothing says it.
    """

    path: str
    family: str
    tensors: Mapping[str, tensors.Tensor]
    foreign: Mapping[str, tensors.Tensor] = dataclasses.field(default_factory=dict)
    never_needed: tuple[str, ...] = ()
    config: encoder_lib.EncoderConfig | None = None
    vocabulary: Vocabulary | None = None
    max_length: int | None = None
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None
    step: int | None = None


def count_layers(names: Mapping[str, object] | set[str], stack: str) -> int:
    """Counts the layers of the ``encoder`` or the ``decoder`` among unrolled names."""
    numbers = {
        layer[1]
        for name in names
        if (layer := name_tables.layer_number(name)) and layer[0] == stack
    }
    return max(numbers, default=-1) + 1


def translate(
    opened: Mapping[str, tensors.Tensor], table: name_tables.NameTable
) -> tuple[dict[str, tensors.Tensor], dict[str, tensors.Tensor]]:
    """Renames tensors to ours; returns them and those the table doesn't hold."""
    ours, foreign = {}, {}
    for name, tensor in opened.items():
        translated = table.to_ours(name)
        if translated is None:
            foreign[name] = tensor
        else:
            ours[translated[0]] = tensor.T if translated[1] else tensor
    return ours, foreign
