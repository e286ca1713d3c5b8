"""A model as ``mteb`` takes it: right prompts, right similarity, no stale scores.

    import mteb
    from sentence_t5 import SentenceT5
    from sentence_t5.evals import mteb_encoder

    encoder = mteb_encoder.MtebEncoder(
        SentenceT5.load("runs/gtr"), "me/gtr", prompts={"query": "query: "}
    )
    mteb.evaluate(encoder, mteb.get_tasks(["SciFact", "STSBenchmark"]))

mteb prepends nothing for an encoder that is not its own: what it passes is the task
and, for retrieval, the side. Prompts are found here by mteb's keys in mteb's order:
"SciFact-query", "SciFact", "Retrieval-query", "Retrieval", "query"; then the task's own
prompt, if asked for; then the model's default.

mteb keeps scores under the model's name and revision, and hands them out without
encoding anything. The revision is therefore a hash of the weights and of all the
options that change a vector or a score.

Source: mteb 2.26, ``mteb.models.models_protocols.EncoderProtocol``.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sentence_t5 import embedding_cache, encoder, inference, retrieve

_QUERY, _DOCUMENT = "query", "document"
# What models made for sentence-transformers may call the side of documents.
_DOCUMENT_NAMES = ("passage", "corpus")


class MtebEncoder:
    """Encodes the texts of mteb's tasks.

    Attributes:
        prompts: prompts by mteb's keys, the model's own among them.
        similarity_name: "cosine" or "dot".
        prompts_used: task and side -> the prompt its texts had, for the record.
    """

    def __init__(
        self,
        model: inference.SentenceT5,
        name: str,
        *,
        prompts: Mapping[str, str] | None = None,
        use_task_prompts: bool = False,
        similarity: str | None = None,
        max_length: int | None = None,
        query_length: int | None = None,
        document_length: int | None = None,
        batch_size: int = 64,
        cache_dir: str | os.PathLike | None = None,
    ):
        """Takes a model and how to use it.

        Args:
            model: the model.
            name: what mteb calls it, "organization/model".
            prompts: put before texts as they are, by task name, task type ("STS"), side
                ("query", "document") or the first two with a side ("STS12-query"); ""
                is none. They go before the model's own prompts of these names.
            use_task_prompts: use what a task says itself, where no key matches. Right
                for models trained with instructions.
            similarity: "cosine" or "dot"; as the model was trained by default.
            max_length: tokens a text is trimmed to; the model's own by default.
            query_length: the same, for retrieval's queries.
            document_length: the same, for retrieval's documents.
            batch_size: texts computed at once, unless mteb's ``encode_kwargs`` say so.
            cache_dir: where vectors are kept; None keeps none.

        Raises:
            ValueError: a name without an organization, or an unknown similarity.
        """
        if name.count("/") != 1:
            raise ValueError(f"name: got {name!r}, expected 'organization/model'.")
        self._model = model
        self._name = name
        self.prompts = _rename({**model.prompts, **(prompts or {})})
        self._use_task_prompts = use_task_prompts
        # Checks the similarity.
        asked = retrieve.Options(similarity=similarity).similarity
        self.similarity_name = retrieve.similarity_of(model, asked)
        default = max_length or model.max_length
        self._lengths = {
            None: default,
            _QUERY: query_length or default,
            _DOCUMENT: document_length or default,
        }
        self._batch_size = batch_size
        self._cache_dir = cache_dir
        self.prompts_used = {}

    @functools.cached_property
    def mteb_model_meta(self) -> Any:
        """What mteb records; it keeps scores under ``name`` and ``revision``."""
        try:
            from mteb.models.model_meta import ModelMeta, ScoringFunction
        except ImportError as error:
            raise ImportError("Takes mteb: pip install 'sentence-t5[mteb]'.") from error
        return ModelMeta.create_empty(
            overwrites={
                "name": self._name,
                "revision": self.revision,
                "framework": ["JAX"],
                "n_parameters": self._model.config.num_params(),
                "max_tokens": self._lengths[None],
                "embed_dim": self._model.embedding_dim,
                "similarity_fn_name": ScoringFunction(self.similarity_name),
                "use_instructions": bool(self.prompts) or self._use_task_prompts,
            }
        )

    @functools.cached_property
    def revision(self) -> str:
        """Hash of the weights and of the options that change a vector or a score."""
        described = {
            "model": self._model.fingerprint,
            "prompts": self.prompts,
            "default_prompt": self._model.default_prompt,
            "use_task_prompts": self._use_task_prompts,
            "similarity": self.similarity_name,
            "lengths": [self._lengths[side] for side in (None, _QUERY, _DOCUMENT)],
        }
        text = json.dumps(described, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def encode(
        self,
        inputs: Iterable[Any],
        *,
        task_metadata: Any = None,
        hf_split: str = "",
        hf_subset: str = "",
        prompt_type: Any = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Embeds the texts of one call of mteb's.

        Args:
            inputs: batches with a list under "text", as mteb's loaders yield them; or
                texts.
            task_metadata: the task; without one, only keys of sides are looked at.
            hf_split: the task's split.
            hf_subset: its subset.
            prompt_type: "query" or "document" for retrieval, else None.
            **kwargs: mteb's ``encode_kwargs``; ``batch_size`` counts.

        Returns:
            float32 [n E] in the order of the texts.

        Raises:
            TypeError: inputs without texts.
        """
        del hf_split, hf_subset
        side = getattr(prompt_type, "value", prompt_type)
        prompt = self.prompt_for(task_metadata, side)
        task_name = getattr(task_metadata, "name", "texts")
        self.prompts_used[f"{task_name}-{side}" if side else task_name] = prompt
        vectors = embedding_cache.encode(
            self._model,
            _texts(inputs),
            prompt=prompt,
            max_length=self._lengths.get(side, self._lengths[None]),
            batch_size=kwargs.get("batch_size", self._batch_size),
            cache_dir=self._cache_dir,
            label=task_name,
        )
        return np.array(vectors)

    def prompt_for(self, task_metadata: Any, side: str | None) -> str:
        """Returns what goes before the texts of a task's side.

        Args:
            task_metadata: the task, with ``name``, ``type`` and ``prompt``; or None.
            side: "query", "document" or None.
        """
        names = [getattr(task_metadata, key, None) for key in ("name", "type")]
        keys = [key for n in names if n for key in (side and f"{n}-{side}", n)]
        for key in [*keys, side]:
            if key in self.prompts:
                return self.prompts[key]
        if self._use_task_prompts:
            prompt = getattr(task_metadata, "prompt", None)
            if isinstance(prompt, Mapping):
                prompt = prompt.get(side)
            if prompt:
                return prompt
        return retrieve.prompt_of(self._model, retrieve.Side())

    def similarity(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Returns the similarity of each row with each, [n E] and [m E] → [n m]."""
        left, right = self._ready(embeddings1), self._ready(embeddings2)
        return left @ right.T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Returns the similarity of each pair of rows, [n E] and [n E] → [n]."""
        left, right = self._ready(embeddings1), self._ready(embeddings2)
        return np.sum(left * right, axis=-1)

    def _ready(self, embeddings: Any) -> np.ndarray:
        """Returns rows whose inner products are the similarity."""
        rows = np.atleast_2d(np.asarray(embeddings, np.float32))
        if self.similarity_name == encoder.DOT:
            return rows
        norms = np.linalg.norm(rows, axis=-1, keepdims=True)
        return rows / np.maximum(norms, np.finfo(np.float32).tiny)


def _rename(prompts: dict[str, str]) -> dict[str, str]:
    """Gives the side of documents mteb's name, where it has another."""
    for name in _DOCUMENT_NAMES:
        if name in prompts:
            prompts.setdefault(_DOCUMENT, prompts[name])
    return prompts


def _texts(inputs: Iterable[Any]) -> list[str]:
    """Returns the texts of batches, or of a list of texts."""
    if isinstance(inputs, str):
        raise TypeError("got one str, expected an iterable of batches or of texts.")
    texts = []
    for batch in inputs:
        if isinstance(batch, str):
            texts.append(batch)
        elif isinstance(batch, Mapping) and "text" in batch:
            found = batch["text"]
            texts += [found] if isinstance(found, str) else list(found)
        else:
            got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise TypeError(
                f"got a batch of {got}, expected a str or a mapping with 'text': only "
                "tasks of texts can be scored."
            )
    return texts
