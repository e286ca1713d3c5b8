"""Inference: texts in, one vector each out, in the order given.

    SentenceT5.load("runs/mean").encode(["A dog runs.", "Hello"])  # float32 [2 E]
    model.encode(titles, instruction="Represent the paper's title for retrieval:")

Texts are packed, or sorted and padded, into a few fixed shapes (``text_layouts``), so
that a long input costs a bounded number of compilations and little padding. The batch
is laid over all local devices. TensorFlow is never imported.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from sentence_t5 import (
    __version__,
    checkpoints,
    descriptions,
    encoder,
    given_texts,
    instructions,
    options,
    partitioning,
    progress,
    text_layouts,
)
from sentence_t5 import tokenizer as tokenizer_lib

# A progress bar shows from this number of batches on.
_LONG_INPUT_BATCHES = 20
# Batches under way at once: one computes while the next is put together.
_IN_FLIGHT = 2


class SentenceT5:
    """A trained sentence encoder, ready for texts.

    Attributes:
        config: the encoder's config; its dtype may differ from the training's.
        tokenizer: the vocabulary.
        max_length: tokens a text is trimmed to by default, EOS included; an
            instruction's tokens count.
        prompts: instructions by name, for ``encode(..., prompt_name=...)``.
        default_prompt: name of the one used where none is asked for, or None.
        step: number of updates behind the weights; None if unknown.
        embedding_dim: width ``E`` of the vectors.
        num_compilations: token shapes compiled so far.
    """

    def __init__(
        self,
        config: encoder.EncoderConfig,
        params: Any,
        tokenizer: tokenizer_lib.Tokenizer,
        max_length: int,
        *,
        partitioner: partitioning.Partitioner | None = None,
        step: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str | None = None,
        dim: int | None = None,
    ):
        """Takes parameters as they are; ``load`` reads them from a checkpoint.

        Args:
            config: the encoder's config.
            params: its parameters, unboxed.
            tokenizer: the vocabulary.
            max_length: tokens a text is trimmed to by default.
            partitioner: mesh to run on; the batch over all local devices by default.
            step: number of updates behind the weights.
            prompts: instructions by name.
            default_prompt: name of the one to use where none is asked for.
            dim: width to shorten vectors to (see ``encode``); the encoder's by default.

        Raises:
            ValueError: an embedding table smaller than the vocabulary, a default prompt
                that isn't among the prompts, or a width that the encoder doesn't have.
        """
        descriptions.check_table(config, tokenizer)
        self.prompts = dict(prompts or {})
        self.default_prompt = default_prompt
        descriptions.check_prompts(self.prompts, default_prompt)
        self.config = config
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.step = step
        self.embedding_dim = _check_dim(dim, config, config.embedding_dim)
        self.num_compilations = 0
        self._partitioner = partitioner or _local_partitioner()
        shardings, _ = self._partitioner.encoder_params(config)
        self._params = jax.device_put(params, shardings)
        module = encoder.SentenceEncoder(config)

        def embed(params, tokens, inputs):
            self.num_compilations += 1  # runs while tracing, once per shape
            return module.apply({"params": params}, tokens, **inputs)

        self._embed = jax.jit(embed)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        step: int | None = None,
        *,
        mesh: partitioning.MeshConfig | None = None,
        devices: list[jax.Device] | None = None,
        dtype: str | None = None,
        dim: int | None = None,
    ) -> "SentenceT5":
        """Loads a model that ``train`` saved.

        Args:
            path: a model_dir, or one step's folder in its ``checkpoints``.
            step: which checkpoint; the newest by default, 0 for the untrained model.
            mesh: layout of the devices; by default each holds the whole model and a
                part of the batch.
            devices: devices to use; all of this host by default.
            dtype: of activations, ``float32`` or ``bfloat16``; as in training by
                default.
            dim: width to shorten all vectors to, as ``encode`` does for a call.

        Returns:
            The model.

        Raises:
            FileNotFoundError: no checkpoint or no description there.
            ValueError: a damaged checkpoint, one of another encoder, or a width that
                the encoder doesn't have.
        """
        description = checkpoints.read_description(path)
        config = description.encoder
        _check_dim(dim, config, config.embedding_dim)
        if dtype is not None:
            t5 = dataclasses.replace(config.t5, dtype=dtype)
            config = dataclasses.replace(config, t5=t5)
        partitioner = _local_partitioner(mesh, devices)
        shardings, expected = partitioner.encoder_params(config)
        params, step = checkpoints.load_params(
            path, step, shardings=shardings, expected=expected
        )
        return cls(
            config,
            params,
            description.tokenizer,
            description.max_length,
            partitioner=partitioner,
            step=step,
            prompts=description.prompts,
            default_prompt=description.default_prompt,
            dim=dim,
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the weights, the config, the vocabulary and the release's number.

        Two models with one fingerprint give one vector for a text, up to rounding, as
        long as the same code computes it: of the code, the fingerprint holds the
        release's number alone, so that a change within a release doesn't show. Reading
        the weights takes about a second per gigabyte.
        """
        described = {
            "config": self.config.to_dict(),
            "vocabulary": [self.tokenizer.sha256, self.tokenizer.extra_ids],
            "release": __version__,
        }
        if self.embedding_dim != self.config.embedding_dim:
            described["dim"] = self.embedding_dim
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(self._params):
            digest.update(jax.tree_util.keystr(path).encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        instruction: str | Sequence[str] | None = None,
        prompt_name: str | None = None,
        batch_size: int = 64,
        max_length: int | None = None,
        on_truncate: str = "warn",
        on_crowding: str = "error",
        show_progress: bool | None = None,
        dim: int | None = None,
    ) -> np.ndarray:
        """Embeds texts.

        Args:
            texts: strings in any number and order; the empty string has a vector too.
                One string alone gives one vector alone.
            instruction: put before each text; a list has one for each. "" is none,
                None is the model's default prompt, if it has one.
            prompt_name: instead, the name of one of the model's ``prompts``.
            batch_size: rows computed at once, of one text or several, rounded up to a
                multiple of the devices. The vectors don't depend on it beyond rounding.
            max_length: tokens to trim a text to, EOS included; the model's by default.
            on_truncate: what to do if texts are trimmed: ``warn`` (one line in the
                log), ``error`` or ``ignore``.
            on_crowding: what to do if an instruction leaves its text less than half of
                ``max_length`` and the text needs more: ``error``, or ``keep_text``,
                which cuts the instruction.
            show_progress: show a progress bar; None shows one for long inputs.
            dim: numbers to keep of each vector, the first ones, scaled to unit length
                again if the encoder's vectors are; the model's ``embedding_dim`` by
                default. Short vectors are good where training was for them
                (``LossConfig.prefix_widths``).

        Returns:
            float32 [n E] in the order of ``texts``; [E] for a single string; ``dim``
            instead of E if it is given.

        Raises:
            TypeError: a text or instruction that is not a string; it is named.
            ValueError: an option out of range, an unknown prompt, texts that are too
                long with ``on_truncate="error"``, or an instruction that is.
            FloatingPointError: the weights give a vector that is not finite.
        """
        options.check_positive("batch_size", batch_size)
        options.check_positive("max_length", max_length)
        dim = _check_dim(dim, self.config, self.embedding_dim)
        single = isinstance(texts, str)
        max_length = self.max_length if max_length is None else max_length
        rows, lengths = self._tokenize(
            [texts] if single else texts, instruction, prompt_name
        )
        rows, lengths = instructions.fit(rows, lengths, max_length, on_crowding)
        given_texts.report_truncated(rows, max_length, on_truncate)
        rows = [tokenizer_lib.trim(row, max_length) for row in rows]
        result = self._encode_rows(
            rows, lengths, batch_size, max_length, show_progress, dim
        )
        return result[0] if single else result

    def truncated(
        self,
        texts: str | Iterable[str],
        max_length: int | None = None,
        *,
        instruction: str | Sequence[str] | None = None,
        prompt_name: str | None = None,
    ) -> np.ndarray:
        """Returns which texts ``encode`` would trim, bool [n]; [] for a single string.

        Raises:
            TypeError: a text or instruction that is not a string; it is named.
            ValueError: a ``max_length`` below 1, or an unknown prompt.
        """
        options.check_positive("max_length", max_length)
        single = isinstance(texts, str)
        max_length = self.max_length if max_length is None else max_length
        rows, _ = self._tokenize([texts] if single else texts, instruction, prompt_name)
        result = np.array([len(row) > max_length for row in rows], bool)
        return result[0] if single else result

    def _tokenize(
        self,
        texts: Iterable[str],
        instruction: str | Sequence[str] | None,
        prompt_name: str | None,
    ) -> tuple[list[list[int]], np.ndarray]:
        """Returns untrimmed ids, and how many of each row are an instruction's."""
        chosen = instructions.choose(
            instruction, prompt_name, self.prompts, self.default_prompt
        )
        rows = self.tokenizer.encode(given_texts.check(texts))
        return instructions.prepend(self.tokenizer, rows, chosen)

    def _encode_rows(
        self,
        rows: list[list[int]],
        lengths: np.ndarray,
        batch_size: int,
        max_length: int,
        show_progress: bool | None,
        dim: int,
    ) -> np.ndarray:
        """Embeds token rows, float32 [n dim] in their order."""
        # Without an instruction to leave out, the program is that of plain texts.
        leaves_out = not self.config.pool_instruction and lengths.any()
        # A text that occurs again is computed once.
        firsts, times, same_as = given_texts.distinct(rows, lengths)
        rows, lengths = [rows[i] for i in firsts], lengths[firsts]
        result = np.empty((len(rows), dim), np.float32)
        layouts = text_layouts.lay_out(
            rows,
            self.config,
            batch_size=batch_size,
            max_length=max_length,
            num_shards=self._partitioner.num_batch_shards,
        )
        if show_progress is None:
            show_progress = len(same_as) > _LONG_INPUT_BATCHES * batch_size
        bar = progress.bar("encode", len(same_as), "text", shown=show_progress)
        with bar, self._partitioner.scope():
            left_out = lengths if leaves_out else None
            for layout, vectors in self._embed_layouts(layouts, left_out, dim):
                result[layout.texts] = vectors[layout.places]
                bar.update(int(times[layout.texts].sum()))
        result = result[same_as]
        self._check_finite(result)
        return result

    def _embed_layouts(
        self,
        layouts: Iterable[text_layouts.Layout],
        lengths: np.ndarray | None,
        dim: int,
    ) -> Iterator[tuple[text_layouts.Layout, np.ndarray]]:
        """Yields each array with the vectors of its places, [b dim] or [b S, dim]."""
        in_flight = collections.deque()
        for layout in layouts:
            embeddings = self._embed_layout(layout, lengths)
            if dim < self.config.embedding_dim:
                embeddings = _shorten(embeddings, dim, self.config.normalize)
            in_flight.append((layout, embeddings))
            if len(in_flight) > _IN_FLIGHT:
                layout, embeddings = in_flight.popleft()
                yield layout, np.asarray(embeddings).reshape(-1, dim)
        for layout, embeddings in in_flight:
            yield layout, np.asarray(embeddings).reshape(-1, dim)

    def _check_finite(self, vectors: np.ndarray) -> None:
        """Raises a FloatingPointError that names the first text without a vector."""
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise FloatingPointError(
                f"{len(bad)} of {len(vectors)} vectors are not finite, first that of "
                f"texts[{bad[0]}]: the weights of step {self.step} are damaged, or "
                f"overflow in {self.config.t5.dtype}."
            )

    def _embed_layout(
        self, layout: text_layouts.Layout, lengths: np.ndarray | None
    ) -> jax.Array:
        """Starts computing the vectors of one array, [b E] or [b S E]."""
        inputs: dict[str, np.ndarray] = {}
        if lengths is not None:
            inputs["instruction_lengths"] = layout.spread(lengths)
        if layout.slots is not None:
            inputs["slots"] = layout.slots
            # For their shape alone: without dropout their values do nothing.
            shape = (len(layout.tokens), layout.num_slots)
            inputs["text_numbers"] = np.zeros(shape, np.int32)
        tokens, inputs = jax.device_put(
            (layout.tokens, inputs), self._partitioner.batch_sharding
        )
        return self._embed(self._params, tokens, inputs)


def _shorten(
    embeddings: Float[Array, "*lead E"], dim: int, normalize: bool
) -> Float[Array, "*lead dim"]:
    """Keeps the first numbers of each vector, at unit length if the whole is."""
    prefixes = embeddings[..., :dim]
    return encoder.l2_normalize(prefixes) if normalize else prefixes


def _check_dim(dim: int | None, config: encoder.EncoderConfig, default: int) -> int:
    """Returns the width of the vectors asked for."""
    width = config.embedding_dim
    if dim is not None and not 1 <= dim <= width:
        raise ValueError(
            f"dim: got {dim}, expected 1 to {width}, the width of this model's vectors."
        )
    return default if dim is None else dim


def _local_partitioner(
    mesh: partitioning.MeshConfig | None = None,
    devices: list[jax.Device] | None = None,
) -> partitioning.Partitioner:
    """Lays a mesh over this host's devices."""
    return partitioning.Partitioner(
        mesh or partitioning.MeshConfig(), devices or jax.local_devices()
    )
