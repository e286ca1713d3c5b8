"""Instructions: their boundary, what is pooled, and prompts that come with a model."""

import copy
import dataclasses
import itertools
import json
import logging
import os
import pathlib

import checkpoint_folders as folders
import flax.linen as nn
import jax
import numpy as np
import pytest

from sentence_t5 import (
    checkpoints,
    encoder,
    evaluate,
    export,
    import_weights,
    inference,
    instructions,
    losses,
    names,
    optim,
    partitioning,
    steps,
)
from sentence_t5.evals import sts_sets
from sentence_t5.t5 import config as t5_config
from sentence_t5.t5 import layers, stack
from sentence_t5.tokenizer import Tokenizer

T5_VOCABULARY = pathlib.Path(
    os.environ.get("SENTENCE_T5_TEST_DATA", ""), "vocab", "spiece.model"
)
TOKENIZER = Tokenizer(folders.VOCABULARY)
MAX_LENGTH = 32
CONFIG = encoder.EncoderConfig(
    t5=t5_config.T5Config(
        vocab_size=1408,
        d_model=16,
        num_heads=2,
        head_dim=8,
        d_ff=32,
        num_layers=1,
        scan_layers=False,
    ),
    projection_dim=12,
    pool_instruction=False,
)
# Ends of a word, of a sentence, of a number, open words, a space, another script.
INSTRUCTIONS = [
    "Represent the red box:",
    "un",
    "box 4",
    "Find (a",
    "the dog ;  ",
    "题：",
]
# What begins with a space, a digit, CJK, punctuation, half a word; and nothing.
TEXTS = [" a red box", "3D box", "题目", "): the dog", "happy dogs", "", "'s box"]
TEXTS += ["-5", "\n\t a"]
PAIRS = [*itertools.product(INSTRUCTIONS, TEXTS)]


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def log_reaches_pytest(monkeypatch):
    monkeypatch.setattr(logging.getLogger("sentence_t5"), "propagate", True)


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    init = encoder.SentenceEncoder(config).init
    shapes = jax.eval_shape(init, jax.random.key(0), np.ones((1, 8), np.int32))
    return jax.tree.map(
        lambda x: rng.normal(0.0, 0.5, x.shape).astype(x.dtype),
        nn.unbox(shapes["params"]),
    )


def make_model(config=CONFIG, **options):
    partitioner = partitioning.Partitioner(partitioning.MeshConfig(), jax.devices()[:1])
    return inference.SentenceT5(
        config,
        random_params(config),
        TOKENIZER,
        MAX_LENGTH,
        partitioner=partitioner,
        **options,
    )


@pytest.fixture(scope="module")
def model():
    return make_model()


class Hidden(nn.Module):
    """The outputs of the T5 encoder alone."""

    config: encoder.EncoderConfig

    @nn.compact
    def __call__(self, tokens):
        mask = (tokens != names.PAD_ID)[:, None, :]
        embedded = layers.TokenEmbedder(self.config.t5, name="token_embedder")(tokens)
        return stack.EncoderStack(self.config.t5, name="encoder")(embedded, mask, None)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


# --- the boundary ---------------------------------------------------------------------


@pytest.mark.parametrize("path", [folders.VOCABULARY, T5_VOCABULARY])
def test_pooled_mask_counts_the_texts_tokens_and_eos(path):
    if not path.exists():
        pytest.skip("needs the T5 vocabulary")
    tokenizer = Tokenizer(path)
    assert len(PAIRS) >= 50
    befores, texts = zip(*PAIRS, strict=True)
    rows, lengths = instructions.prepend(tokenizer, tokenizer.encode(texts), befores)
    width = max(map(len, rows))
    tokens = np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
    counted = (tokens != 0) & (np.arange(width) >= lengths[:, None])
    merged = 0
    for i, (before, text) in enumerate(PAIRS):
        # What is counted is the text as it is alone, id for id, and EOS.
        assert tokens[i][counted[i]].tolist() == tokenizer.encode([text])[0]
        # All of it is what SentencePiece makes of the two with a space in between ...
        assert rows[i] == tokenizer.encode([f"{before} {text}"])[0]
        # ... and without one, it may have merged across the boundary.
        merged += rows[i] != tokenizer.encode([before + text])[0]
    assert merged > 10


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_vectors_equal_brute_force(pooling):
    config = dataclasses.replace(CONFIG, pooling=pooling)
    model, params = make_model(config), random_params(config)
    befores, texts = zip(*PAIRS, strict=True)
    found = model.encode(texts, instruction=befores, batch_size=64)
    used = {key: params[key] for key in ("token_embedder", "encoder")}
    rows = TOKENIZER.encode([f"{before} {text}" for before, text in PAIRS])
    width = max(map(len, rows))
    tokens = np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
    hidden = np.asarray(jax.jit(Hidden(config).apply)({"params": used}, tokens))
    for i, (before, text) in enumerate(PAIRS):
        start, end = len(TOKENIZER.encode([before])[0]) - 1, len(rows[i])
        assert end - start == len(TOKENIZER.encode([text])[0])
        of_text = hidden[i, start:end].astype(np.float64)
        pooled = of_text.mean(axis=0) if pooling == "mean" else of_text[0]
        vector = unit(pooled @ params["projection"]["kernel"])
        np.testing.assert_allclose(found[i], vector, atol=1e-5)


# --- encode ---------------------------------------------------------------------------


def test_no_instruction_and_an_empty_one_are_plain_text_bit_for_bit(model):
    texts = ["a red box", "", "the dog runs in the park"]
    plain = model.encode(texts)
    for empty in (None, "", "  \n", ["", " ", ""]):
        np.testing.assert_array_equal(model.encode(texts, instruction=empty), plain)
    pooled = make_model(dataclasses.replace(CONFIG, pool_instruction=True))
    np.testing.assert_array_equal(pooled.encode(texts, instruction=""), plain)


def test_instruction_changes_the_vector_and_may_be_pooled(model):
    text, before = "a red box", "Represent the dog:"
    plain = model.encode(text)
    told = model.encode(text, instruction=before)
    assert plain @ told < 0.999
    assert told @ model.encode(text, instruction="Find the park:") < 0.999
    pooled = make_model(dataclasses.replace(CONFIG, pool_instruction=True))
    joined = pooled.encode(f"{before} {text}")
    np.testing.assert_allclose(
        pooled.encode(text, instruction=before), joined, atol=1e-6
    )
    assert told @ joined < 0.999


def test_each_text_may_have_its_own_instruction(model):
    texts = ["a red box", "the dog runs in the park", "a red box"]
    befores = ["Represent the dog:", "", "Find the park:"]
    together = model.encode(texts, instruction=befores)
    for vector, text, before in zip(together, texts, befores, strict=True):
        np.testing.assert_allclose(
            vector, model.encode(text, instruction=before), atol=1e-5
        )
    with pytest.raises(ValueError, match="got 1 instructions for 3 texts"):
        model.encode(texts, instruction=["x"])
    with pytest.raises(TypeError, match=r"instruction\[1\] is None"):
        model.encode(texts, instruction=["x", None, "y"])


def test_instruction_that_crowds_the_text_out(model, caplog):
    before, text = "red box " * 12, "the dog runs in the park " * 4
    with pytest.raises(ValueError, match=r"less than half of 32 tokens: .*\[0\] has"):
        model.encode([text], instruction=before)
    ids = TOKENIZER.encode([before])[0][:-1], TOKENIZER.encode([text])[0]
    assert len(ids[0]) > 16 and len(ids[1]) > 16
    kept = model.encode([text], instruction=before, on_crowding="keep_text")
    assert "1 of 1 texts truncated" in caplog.text
    row = [*ids[0][:16], *ids[1][:15], 1]
    expected = jax.jit(encoder.SentenceEncoder(CONFIG).apply)(
        {"params": random_params(CONFIG)},
        np.array([row], np.int32),
        instruction_lengths=np.array([16], np.int32),
    )
    np.testing.assert_allclose(kept, expected, atol=1e-5)
    # A short text has all the room it needs, and the instruction too.
    assert model.encode(["dog"], instruction=before).shape == (1, 12)
    with pytest.raises(ValueError, match="on_crowding: got 'drop'"):
        model.encode([text], on_crowding="drop")


# --- the step -------------------------------------------------------------------------


def test_training_pools_what_encode_pools(model):
    """Loss metrics of a batch with instructions are those of encode's vectors."""
    befores = ["Represent the red box:", "Find the park:"]
    lefts = ["a red box", "the dog runs", "two cats", "a park"]
    rights = ["box", "a dog", "the small cats", "in the park"]
    negatives = ["cup", "mug", "dog", "cat"]
    batch = {}
    for texts, before, key, length_key in (
        (lefts, befores[0], names.LEFT_TOKENS, names.LEFT_INSTRUCTION_LENGTHS),
        (rights, befores[1], names.RIGHT_TOKENS, names.RIGHT_INSTRUCTION_LENGTHS),
        (negatives, "", names.NEGATIVE_TOKENS, names.NEGATIVE_INSTRUCTION_LENGTHS),
    ):
        rows, counts = instructions.prepend(TOKENIZER, TOKENIZER.encode(texts), before)
        tokens = np.array([row + [0] * (24 - len(row)) for row in rows], np.int32)
        is_list = key == names.NEGATIVE_TOKENS
        batch[key] = tokens[:, None] if is_list else tokens
        counts = counts.astype(np.int32)
        batch[length_key] = counts[:, None] if is_list else counts
    partitioner = partitioning.Partitioner(partitioning.MeshConfig(), jax.devices()[:1])
    trainer = steps.Trainer(
        steps.Model(
            CONFIG,
            losses.LossConfig(logit_scale=5.0, own_right_only=True),
            optim.sgd(optim.constant(0.1)),
        ),
        partitioner,
    )
    values = trainer.eval_step(random_params(CONFIG), partitioner.put_batch(batch))
    left = model.encode(lefts, instruction=befores[0]).astype(np.float64)
    right = model.encode(rights, instruction=befores[1]).astype(np.float64)
    negative = model.encode(negatives).astype(np.float64)
    own = 5.0 * np.einsum("be,be->b", left, right)
    forward = np.log(np.exp(own) + np.exp(5.0 * left @ negative.T).sum(axis=1)) - own
    backward = np.log(np.exp(5.0 * left @ right.T).sum(axis=0)) - own
    np.testing.assert_allclose(values["loss"], (forward + backward).mean(), rtol=1e-5)
    assert values["negatives_per_query"] == 4


# --- prompts --------------------------------------------------------------------------


def test_prompts_by_name_and_by_default(model):
    prompts = {"query": "Find the park:", "document": "Represent the dog: "}
    plain, model = copy.copy(model), copy.copy(model)  # compiled once
    plain.prompts = model.prompts = prompts
    model.default_prompt = "query"
    texts = ["a red box", "two cats"]
    for name, prompt in prompts.items():
        expected = plain.encode(texts, instruction=prompt)
        np.testing.assert_array_equal(model.encode(texts, prompt_name=name), expected)
    by_default = model.encode(texts)
    np.testing.assert_array_equal(by_default, plain.encode(texts, prompt_name="query"))
    np.testing.assert_array_equal(
        model.encode(texts, instruction=""), plain.encode(texts)
    )
    with pytest.raises(ValueError, match="no prompt 'quary'; it has 'query', 'docum"):
        model.encode(texts, prompt_name="quary")
    with pytest.raises(ValueError, match="give one of them"):
        model.encode(texts, prompt_name="query", instruction="x")
    with pytest.raises(ValueError, match=r"default prompt is 'q', but .* are none"):
        make_model(default_prompt="q")
    assert model.truncated(["red box " * 13, "cup"]).tolist() == [True, False]
    assert not model.truncated(["red box " * 13], instruction="").any()


def test_evaluate_uses_and_records_the_prompt(model):
    model = copy.copy(model)
    model.prompts, model.default_prompt = {"sts": "Find the dog:"}, "sts"
    texts = (["a red box", "a dog", "cats"], ["a box", "the park", "two cats"])
    sets = [sts_sets.StsSet("toy", *texts, np.array([3.0, 0.0, 2.0]), ("",) * 3, "")]
    report = evaluate.make_report(model, sets)
    assert report["settings"]["prompt"] == "Find the dog:"
    assert "prompt: 'Find the dog:'" in evaluate.format_table(report)
    vectors = [model.encode(t, instruction="Find the dog:") for t in texts]
    cosines = np.einsum("ne,ne->n", *vectors)
    mean = report["sts"][0]["similarity_mean"]
    assert mean == pytest.approx(float(cosines.mean()), abs=1e-6)
    plain = evaluate.make_report(model, sets, instruction="")
    assert not plain["settings"]["prompt"]
    assert plain["sts"][0]["similarity_mean"] != pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("pool_instruction", [True, False])
def test_prompts_and_pooling_survive_export_and_import(
    tmp_path, model, pool_instruction
):
    config = dataclasses.replace(CONFIG, pool_instruction=pool_instruction)
    folder = tmp_path / "run"
    checkpoints.write_description(
        folder, config, TOKENIZER, MAX_LENGTH,
        prompts={"query": "Find the park:"}, default_prompt="query",
    )  # fmt: skip
    params = random_params(config)
    with checkpoints.Checkpointer(checkpoints.CheckpointConfig(), folder) as saver:
        saver.save(1, params=params, train={"step": np.int32(1)}, meta={})
    export.export(folder, tmp_path / "st")
    written = json.loads((tmp_path / "st" / "1_Pooling" / "config.json").read_text())
    assert written["include_prompt"] is pool_instruction
    settings = json.loads(
        (tmp_path / "st" / "config_sentence_transformers.json").read_text()
    )
    # Ended by a space, so that its last word does not run on into the text.
    assert settings["prompts"] == {"query": "Find the park: "}
    import_weights.import_weights(tmp_path / "st", tmp_path / "back")
    back = inference.SentenceT5.load(tmp_path / "back", devices=jax.devices()[:1])
    assert back.config.pool_instruction is pool_instruction
    assert back.default_prompt == "query"
    if not pool_instruction:
        texts = ["a red box", "two cats"]
        expected = model.encode(texts, instruction="Find the park:")
        np.testing.assert_allclose(back.encode(texts), expected, atol=1e-6)
    import_weights.import_weights(
        tmp_path / "st", tmp_path / "other", pool_instruction=not pool_instruction
    )
    description = checkpoints.read_description(tmp_path / "other")
    assert description.encoder.pool_instruction is not pool_instruction


def test_resuming_a_run_from_before_the_switch(tmp_path):
    config = dataclasses.replace(CONFIG, pool_instruction=True)
    checkpoints.write_description(tmp_path, config, TOKENIZER, MAX_LENGTH)
    path = tmp_path / "encoder.json"
    content = json.loads(path.read_text())
    del content["encoder"]["pool_instruction"]
    path.write_text(json.dumps(content))
    with checkpoints.Checkpointer(checkpoints.CheckpointConfig(), tmp_path) as saver:
        params = random_params(config)
        saver.save(1, params=params, train={"step": np.int32(1)}, meta={})
    checkpoints.write_description(tmp_path, config, TOKENIZER, MAX_LENGTH)
    with pytest.raises(ValueError, match="pool_instruction was True, now False"):
        checkpoints.write_description(tmp_path, CONFIG, TOKENIZER, MAX_LENGTH)
