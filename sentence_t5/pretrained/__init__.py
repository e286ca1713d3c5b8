"""Weights of other projects, and our own, as parameters of our encoder.

    Hugging Face, sentence-transformers, T5X, our own ─► Source ─► restore ─► parameters

``restore`` fills a model that is there already; ``load_encoder`` makes one that fits
the checkpoint. Neither needs torch, transformers or t5x.
"""

from sentence_t5.pretrained.loading import (
    PretrainedEncoder,
    abstract_params,
    check_vocabulary,
    load_encoder,
    open_checkpoint,
    restore,
)
from sentence_t5.pretrained.matching import Report
from sentence_t5.pretrained.source import Source, Vocabulary

__all__ = [
    "PretrainedEncoder",
    "Report",
    "Source",
    "Vocabulary",
    "abstract_params",
    "check_vocabulary",
    "load_encoder",
    "open_checkpoint",
    "restore",
]
