"""Recipes: on every size and pooling, with the papers' values; stages follow."""

import pathlib

import gin
import pytest

from sentence_t5 import engine, gin_files, gin_flags, losses

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = ("tiny", "base", "v1_1_xl", "xxl")
# Steps, batch, length of left and right texts, negatives; from the papers where known.
VALUES = {
    "st5_raw": (0, 64, 256, 256, 1),
    "st5_stage1_cqa": (800_000, 2048, 64, 64, 0),
    "st5_nli_only": (1600, 512, 64, 64, 1),
    "st5_stage2_nli": (1600, 512, 64, 64, 1),
    "gtr_stage1_cqa": (800_000, 2048, 64, 256, 0),
    "gtr_stage2_msmarco": (20_000, 2048, 64, 256, 0),
    "instructor": (20_000, 256, 512, 512, 1),
}
# Where a stage starts from another's weights, they must be named.
LATER = ("st5_raw", "st5_stage2_nli", "gtr_stage2_msmarco", "instructor")
VOCABULARY = f"--vocabulary={ROOT}/tasks/data/synthetic.model"


@pytest.fixture(autouse=True)
def _clear_gin():
    yield
    gin.clear_config()


def load(size, recipe, *flags, pooling="mean"):
    parser = gin_files.make_parser("train")
    argv = [
        f"--gin_file=gin/st5_{size}_{pooling}.gin",
        f"--gin_file=gin/recipes/{recipe}.gin",
        "--model_dir=/nowhere",
        *flags,
    ]
    return gin_files.load(gin_flags.parse_flags(argv, parser))


def dataset(task=""):
    """Builds the training data's config without its task, whose files aren't here."""
    references = gin.get_bindings("engine.train", resolve_references=False)
    return references["train_dataset_cfg"].scoped_configurable_fn(task)


@pytest.mark.parametrize("recipe", VALUES)
def test_values_on_any_size(recipe):
    for size in SIZES:
        config = load(size, recipe)
        model = gin.get_configurable(engine.model)()
        expected = None if recipe == "st5_raw" else 768
        assert model.encoder.projection_dim == expected
        assert model.encoder.t5.vocab_size == 32128
        assert (model.loss.logit_scale, model.loss.bidirectional) == (100.0, True)
        data, steps = dataset(), VALUES[recipe][0]
        lengths = data.lengths()
        assert VALUES[recipe] == (
            gin.query_parameter("TRAIN_STEPS/gin.macro.value"),
            data.batch_size,
            lengths["inputs"],
            lengths["targets"],
            data.num_negatives,
        )
        if recipe == "instructor":
            at = {0: 0.0, 2000: 2e-5, 11_000: 1e-5, steps: 0.0}
        else:
            at = {0: 1e-3, steps: 0.0} if steps else {}
        rates = {s: float(model.optimizer.learning_rate(s)) for s in at}
        assert rates == pytest.approx(at)
        missing = {key[0] for key in config.usage.required}
        assert ("INITIAL_CHECKPOINT_PATH" in missing) == (recipe in LATER)


@pytest.mark.parametrize("pooling", ["first", "encdec"])
def test_other_poolings(pooling):
    load("small", "st5_stage2_nli", pooling=pooling)
    chosen = gin.get_configurable(engine.model)().encoder.pooling
    assert chosen == {"first": "first", "encdec": "decoder_first"}[pooling]


def test_first_stage_reads_questions_and_answers(tmp_path):
    pairs = tmp_path / "qa.tsv"
    pairs.write_text("question\tanswer\nwhy\tbecause\n")
    flags = [f"--train_file={pairs}", VOCABULARY]
    arguments = load("tiny", "gtr_stage1_cqa", *flags).arguments()
    task = arguments["train_dataset_cfg"].mixture_or_task_name
    (row,) = next(task.source.blocks("train"))
    assert row == {"inputs": "why", "targets": "because"}
    assert arguments["checkpoint_cfg"].allow_missing == ("projection/.*",)
    assert arguments["infer_eval_dataset_cfg"] is None


def test_second_stage_reads_mined_pairs(tmp_path):
    mined = tmp_path / "mined.jsonl"
    mined.write_text('{"anchor": "q", "positive": "p", "negatives": ["a", "b"]}\n')
    arguments = load(
        "tiny",
        "gtr_stage2_msmarco",
        *(f"--train_file={mined}", "--negatives=negatives", VOCABULARY),
        *("--initial_checkpoint_path=/stage1", "--num_negatives=2"),
        "--gin.PASSAGE_LENGTH=512",
    ).arguments()
    data = arguments["train_dataset_cfg"]
    assert (data.num_negatives, data.lengths()["negative_targets"]) == (2, 512)
    (row,) = next(data.mixture_or_task_name.source.blocks("train"))
    assert row["negative_targets"] == ["a", "b"]
    assert arguments["checkpoint_cfg"].restore_path == "/stage1"


OTHER_DATA = {
    "msmarco_triples": ("why\tbecause\tnever\nhow\tso\tno\n", "triples.tsv", 1),
    "beir_folder": (None, "folder", 0),
}


@pytest.mark.parametrize("name", OTHER_DATA)
def test_other_sources_take_the_place_of_tfds(name, tmp_path):
    text, path, num_negatives = OTHER_DATA[name]
    path = tmp_path / path
    if text:
        path.write_text(text)
    else:
        (path / "qrels").mkdir(parents=True)
        (path / "corpus.jsonl").write_text('{"_id": "d", "text": "because"}\n')
        (path / "queries.jsonl").write_text('{"_id": "q", "text": "why"}\n')
        qrels = path / "qrels" / "train.tsv"
        qrels.write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    data = load(
        "tiny",
        "gtr_stage2_msmarco",
        *(f"--gin_file=gin/data/{name}.gin", f"--train_file={path}", VOCABULARY),
        "--initial_checkpoint_path=/stage1",
    ).arguments()["train_dataset_cfg"]
    row = next(data.mixture_or_task_name.source.blocks("train"))[0]
    assert (row["inputs"], row["targets"]) == ("why", "because")
    assert data.num_negatives == num_negatives == len(row.get("negative_targets", []))


def test_instructor_reads_rows_with_instructions(tmp_path):
    row = '{"query": ["", "a"], "pos": ["", "b"], "neg": ["", "c"], "task_id": 1}\n'
    (tmp_path / "m.jsonl").write_text(row * 9)
    flags = (f"--medi_file={tmp_path / 'm.jsonl'}", VOCABULARY, "--batch_size=4")
    arguments = load(
        "tiny", "instructor", *flags, "--gin.INITIAL_CHECKPOINT_PATH=None"
    ).arguments()
    model, data = arguments["model"], arguments["train_dataset_cfg"]
    assert not model.encoder.pool_instruction
    assert model.loss == losses.LossConfig(100.0, own_right_only=True)
    assert (data.mix_by, data.batch_size) == ("batches", 4)
    ((task, rate),) = data.tasks()
    assert (task.name, rate) == ("medi_1", 9)
    assert arguments["infer_eval_dataset_cfg"] is None


def test_every_recipe_is_tested():
    assert set(VALUES) == {p.stem for p in (ROOT / "gin" / "recipes").glob("*.gin")}


def test_data_of_tfds_that_is_not_prepared_is_named(tmp_path):
    from sentence_t5 import gin_reader

    flags = ["--gin_file=gin/data/cqa_tfds.gin", VOCABULARY]
    flags += ["--gin.CQA_DATA_SET='glue/stsb:2.0.0'", "--gin.EVAL_PERIOD=7"]
    config = load(
        "tiny",
        "st5_stage1_cqa",
        *flags,
        f"--gin.community_qa.task.data_dir='{tmp_path}'",
    )
    with pytest.raises(gin_reader.ConfigError, match=r"stsb:2.0.0.* is not prepared"):
        config.arguments()
