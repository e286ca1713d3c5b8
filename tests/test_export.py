"""Models handed to other tools: what is written, and that it computes the same."""

import dataclasses
import json
import types

import checkpoint_folders as folders
import flax.traverse_util
import jax
import numpy as np
import pytest

from sentence_t5 import checkpoints, export, inference, pretrained, retrieve
from sentence_t5 import encoder as encoder_lib
from sentence_t5 import tokenizer as tokenizer_lib
from sentence_t5.export import model_card, programs, st_folder
from sentence_t5.t5 import config as t5_config

TOKENIZER = tokenizer_lib.Tokenizer(folders.VOCABULARY)
CONFIG = encoder_lib.EncoderConfig(
    t5=t5_config.T5Config(
        vocab_size=TOKENIZER.vocab_size,
        d_model=16,
        num_heads=4,
        head_dim=3,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=1,
        relpos_num_buckets=8,
        relpos_max_distance=20,
    ),
    projection_dim=6,
)
VOCABULARY = pretrained.Vocabulary(TOKENIZER.model_bytes, 100)
TEXTS = ["The dog runs.", "", "a cat sits on the table. " * 9, "12 ÄÖ?"]


def make_source(config=CONFIG, **more):
    more = {"vocabulary": VOCABULARY, "max_length": 24, **more}
    return folders.as_source(config, folders.random_params(config), **more)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A trained-looking model: checkpoint, description, config and metrics."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    params = flax.traverse_util.unflatten_dict(folders.random_params(CONFIG), sep="/")
    checkpoints.write_description(folder, CONFIG, TOKENIZER, 24)
    with checkpoints.Checkpointer(checkpoints.CheckpointConfig(), folder) as writer:
        writer.save(
            40,
            params=params,
            train={"step": np.zeros((), np.int32)},
            meta={"step": 40, "data": {"rows": 1000, "batch_size": 8}},
        )
    lines = (
        {"step": 20, "train/loss": 1.0},
        {"step": 20, "sts/dev/spearman": 40.0},
        {"step": 40, "sts/dev/spearman": 61.234},
    )
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "config.gin").write_text("train.total_steps = 40\n")
    return folder


def test_exported_folder_reads_back_bit_for_bit(model_dir, tmp_path):
    out = tmp_path / "st"
    assert export.main([str(model_dir), "--output", str(out)]) == 0
    back = pretrained.load_encoder(out)
    assert back.config == dataclasses.replace(
        CONFIG, t5=dataclasses.replace(CONFIG.t5, num_decoder_layers=0)
    )
    assert back.vocabulary == VOCABULARY
    assert back.max_length == 24
    ours = folders.random_params(CONFIG)
    theirs = flax.traverse_util.flatten_dict(back.read_params(), sep="/")
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value, err_msg=name)


def test_exported_files(model_dir, tmp_path):
    out = tmp_path / "st"
    export.export(model_dir, out)
    read = {
        str(p.relative_to(out)): json.loads(p.read_text())
        for p in out.glob("**/*.json")
    }
    assert [m["type"].rsplit(".", 1)[-1] for m in read["modules.json"]] == [
        "Transformer", "Pooling", "Dense", "Normalize",
    ]  # fmt: skip
    assert [m["path"] for m in read["modules.json"]] == [
        "", "1_Pooling", "2_Dense", "3_Normalize",
    ]  # fmt: skip
    assert read["2_Dense/config.json"] == {
        "in_features": 16,
        "out_features": 6,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    assert read["1_Pooling/config.json"]["pooling_mode_mean_tokens"]
    assert read["sentence_bert_config.json"]["max_seq_length"] == 24
    assert read["tokenizer_config.json"]["model_max_length"] == 24
    assert read["config.json"]["relative_attention_max_distance"] == 20
    assert read["config.json"]["d_kv"] == 3
    weights = pretrained.open_checkpoint(out).tensors
    assert len(weights) == 20


def test_model_card_tells_recipe_data_scores_and_limits(model_dir, tmp_path):
    export.export(model_dir, tmp_path / "st")
    card = (tmp_path / "st" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\n")
    assert "| sts/dev/spearman | 61.23 | 40 |" in card
    assert "40.00" not in card and "train/loss" not in card
    assert "- rows: 1000" in card
    assert "train.total_steps = 40" in card
    assert "cut to 24 tokens" in card
    bare = model_card.make_card(make_source(), tmp_path)
    assert "None recorded." in bare and "Not recorded." in bare


def test_model_card_is_of_the_exported_step(tmp_path):
    folder = tmp_path / "run"
    params = flax.traverse_util.unflatten_dict(folders.random_params(CONFIG), sep="/")
    checkpoints.write_description(folder, CONFIG, TOKENIZER, 24)
    with checkpoints.Checkpointer(checkpoints.CheckpointConfig(), folder) as writer:
        for step in (2, 3):
            writer.save(
                step,
                params=params,
                train={"step": np.zeros((), np.int32)},
                meta={"step": step, "data": {"rows": 100 * step}},
            )
    lines = (
        {"step": 1, "sts/dev/pearson": 11.5},
        {"step": 2, "sts/dev/spearman": 22.5},
        {"step": 3, "sts/dev/spearman": 33.5},
    )
    # The last line was cut off by a kill.
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "sts'
    (folder / "metrics.jsonl").write_text(text)
    for step, flags in ((2, ["--step=2"]), (3, [])):
        out = tmp_path / f"st{step}"
        assert export.main([str(folder), f"--output={out}", *flags]) == 0
        card = (out / "README.md").read_text()
        other = 5 - step
        assert f"- weights of step {step}\n" in card
        assert "| sts/dev/pearson | 11.50 | 1 |" in card
        assert f"| sts/dev/spearman | {11 * step}.50 | {step} |" in card
        assert f"{11 * other}.50" not in card
        assert f"- rows: {100 * step}\n" in card and f"rows: {100 * other}" not in card


@pytest.mark.parametrize(
    "normalize, name, words",
    [(True, "cosine", "cosine"), (False, "dot", "dot product")],
)
def test_exported_similarity_is_that_of_retrieval(tmp_path, normalize, name, words):
    config = dataclasses.replace(CONFIG, normalize=normalize)
    source = make_source(config)
    card = model_card.make_card(source, tmp_path)
    st_folder.write_folder(source, tmp_path / "st", card)
    settings = tmp_path / "st" / "config_sentence_transformers.json"
    assert json.loads(settings.read_text())["similarity_fn_name"] == name
    assert f"one vector per text, compared by {words}.\n" in card
    assert f"{words.capitalize()}s rank texts" in card
    assert retrieve.similarity_of(types.SimpleNamespace(config=config)) == name


def test_prompts_travel(tmp_path):
    opened = make_source(
        dataclasses.replace(CONFIG, pool_instruction=False),
        prompts={"query": "query:"},
        default_prompt="query",
    )
    st_folder.write_folder(opened, tmp_path / "st")
    back = pretrained.load_encoder(tmp_path / "st")
    assert back.prompts == {"query": "query: "}
    assert back.default_prompt == "query"
    assert not back.config.pool_instruction


@pytest.mark.parametrize("pooling, projection_dim, normalize",
                         [("first", None, True), ("max", 6, False)])  # fmt: skip
def test_other_poolings_and_absent_modules(
    tmp_path, pooling, projection_dim, normalize
):
    config = encoder_lib.EncoderConfig(CONFIG.t5, pooling, projection_dim, normalize)
    st_folder.write_folder(make_source(config), tmp_path / "st")
    back = pretrained.open_checkpoint(tmp_path / "st").config
    assert (back.pooling, back.projection_dim) == (pooling, projection_dim)
    assert back.normalize == normalize


@pytest.mark.parametrize("pooling", ["decoder_first", "attention"])
def test_what_the_folder_cannot_hold_is_said(tmp_path, pooling):
    config = dataclasses.replace(CONFIG, pooling=pooling)
    with pytest.raises(ValueError, match=r"can hold mean, first, max. .*=stablehlo"):
        st_folder.write_folder(make_source(config), tmp_path / "st")
    assert not (tmp_path / "st").exists()


def test_export_refuses(model_dir, tmp_path, capsys):
    with pytest.raises(ValueError, match="has no vocabulary, and the folder needs one"):
        st_folder.write_folder(make_source(vocabulary=None), tmp_path / "st")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    assert export.main([str(model_dir), "--output", str(tmp_path / "full")]) == 1
    assert "is not an empty folder. Name another folder." in capsys.readouterr().err
    item = model_dir / "checkpoints" / "40" / "params"
    lonely = tmp_path / "lonely"
    item.rename(lonely)
    try:
        assert export.main([str(lonely), "--output", str(tmp_path / "x")]) == 1
        assert "does not say which encoder" in capsys.readouterr().err
    finally:
        lonely.rename(item)


def test_stablehlo_computes_the_same_without_this_package(model_dir, tmp_path):
    out = tmp_path / "program"
    command = [str(model_dir), "--output", str(out), "--format", "stablehlo"]
    assert export.main(command) == 0
    program = jax.export.deserialize((out / programs.PROGRAM_FILE).read_bytes())
    assert set(program.platforms) == {"cpu", "cuda", "tpu"}
    weights = dict(np.load(out / programs.WEIGHTS_FILE))
    expected = inference.SentenceT5.load(model_dir).encode(TEXTS, on_truncate="ignore")
    rows = [tokenizer_lib.trim(row, 24) for row in TOKENIZER.encode(TEXTS)]
    tokens = np.zeros((4, 30), np.int32)  # more padding than any text needs
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    np.testing.assert_allclose(program.call(weights, tokens), expected, atol=1e-5)
    alone = program.call(weights, np.array(rows[:1], np.int32))
    np.testing.assert_allclose(alone, expected[:1], atol=1e-5)
    description = json.loads((out / programs.DESCRIPTION_FILE).read_text())
    assert description["embedding_dim"] == 6 and description["max_length"] == 24


@pytest.mark.parametrize("bidirectional", [True, False])
def test_position_bias_of_any_length_equals_the_models(bidirectional):
    module = programs.relative_positions.RelativePositionBias(CONFIG.t5, bidirectional)
    table = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    variables = {"params": {"embedding": table}}
    # 60 is three times the distance from which on all offsets share a bucket.
    expected = module.apply(variables, 60, 60)
    ours = module.bind(variables)
    np.testing.assert_array_equal(programs.position_bias(ours, 60, 60), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pooling", encoder_lib.POOLINGS)
def test_onnx_computes_the_same(tmp_path, pooling):
    pytest.importorskip("jax2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    config = dataclasses.replace(CONFIG, pooling=pooling)
    opened = make_source(config)
    programs.write_onnx(opened, tmp_path)
    session = onnxruntime.InferenceSession(str(tmp_path / programs.ONNX_FILE))
    params = flax.traverse_util.unflatten_dict(folders.random_params(config), sep="/")
    embed = jax.jit(encoder_lib.SentenceEncoder(config).apply)
    rng = np.random.default_rng(0)
    for batch, length in ((1, 1), (5, 7), (2, 512)):
        tokens = rng.integers(2, config.t5.vocab_size, (batch, length))
        tokens[-1, length // 2 + 1 :] = 0
        (ours,) = session.run(None, {"input_ids": tokens.astype(np.int64)})
        assert ours.shape == (batch, 6)
        np.testing.assert_allclose(np.linalg.norm(ours, axis=-1), 1.0, atol=1e-5)
        np.testing.assert_allclose(ours, embed({"params": params}, tokens), atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("output_format", ["stablehlo", "onnx"])
def test_programs_leave_instructions_out(tmp_path, output_format):
    config = dataclasses.replace(CONFIG, pool_instruction=False)
    opened = make_source(config, prompts={"query": "a b"})
    params = flax.traverse_util.unflatten_dict(folders.random_params(config), sep="/")
    tokens = np.array([[5, 6, 7, 1], [8, 9, 1, 0], [7, 1, 0, 0]], np.int32)
    lengths = np.array([2, 1, 0], np.int32)
    expected = jax.jit(encoder_lib.SentenceEncoder(config).apply)(
        {"params": params}, tokens, instruction_lengths=lengths
    )
    if output_format == "stablehlo":
        programs.write_stablehlo(opened, tmp_path)
        program = jax.export.deserialize(
            bytearray((tmp_path / programs.PROGRAM_FILE).read_bytes())
        )
        weights = dict(np.load(tmp_path / programs.WEIGHTS_FILE))
        ours = program.call(weights, tokens, lengths)
    else:
        pytest.importorskip("jax2onnx")
        onnxruntime = pytest.importorskip("onnxruntime")
        programs.write_onnx(opened, tmp_path)
        session = onnxruntime.InferenceSession(str(tmp_path / programs.ONNX_FILE))
        inputs = {"input_ids": tokens, "instruction_lengths": lengths}
        (ours,) = session.run(None, {k: v.astype(np.int64) for k, v in inputs.items()})
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    description = json.loads((tmp_path / programs.DESCRIPTION_FILE).read_text())
    assert "instruction_lengths" in description
