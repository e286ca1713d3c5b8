"""Gin files: every one builds what it says, and every mistake is named."""

import dataclasses
import json
import logging
import pathlib
import shutil
import subprocess
import sys
import types

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sentence_t5 import (
    checkpoint_files,
    distributed,
    encoder,
    engine,
    gin_checks,
    gin_files,
    gin_flags,
    gin_reader,
    preflight,
    reporting,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = "--gin_file=gin/st5_tiny_mean.gin"
MODEL_DIR = "--model_dir=/nowhere"
HOSTS = ["--coordinator_address=host:1", "--num_processes=2", "--process_id=0"]

# Parameters in millions: encoder with the 768-wide projection, and the whole
# encoder-decoder (with the projection, without T5 1.1's output table, which embeds
# nothing). From the shapes published with T5.
COUNTS = {
    "small": (35.72, 60.51 + 0.393),
    "base": (110.22, 222.90 + 0.590),
    "large": (335.73, 737.67 + 0.786),
    "xl": (1241.7, 2851.6 + 0.8),
    "xxl": (4865.6, 11307.3 + 0.8),
    "v1_1_base": (110.22, 247.58 - 32128 * 768e-6 + 0.590),
    "v1_1_large": (342.02, 783.15 - 32128 * 1024e-6 + 0.786),
    "v1_1_xl": (1225.1, 2849.8 - 32128 * 2048e-6 + 1.6),
    "v1_1_xxl": (4765.5, 11135.3 - 32128 * 4096e-6 + 3.1),
}
POOLINGS = {"mean": "mean", "first": "first", "encdec": "decoder_first"}


@pytest.fixture(autouse=True)
def _clear_gin():
    yield
    gin.clear_config()


def load(*argv: str) -> gin_files.Config:
    parser = gin_files.make_parser("train")
    return gin_files.load(gin_flags.parse_flags(argv, parser))


def model():
    """Builds the model of the configuration that gin holds."""
    return gin.get_configurable(engine.model)()


def error_of(capsys, *argv: str) -> str:
    """Runs a command line that must fail at once; returns its message."""
    assert gin_files.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


# --- every file ---------------------------------------------------------------------


def test_every_size_and_pooling_has_a_file():
    names = {path.stem for path in (ROOT / "gin").glob("*.gin")}
    assert names == {f"st5_{s}_{p}" for s in ["tiny", *COUNTS] for p in POOLINGS}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("size", COUNTS)
def test_file_builds_the_published_model(size, pooling):
    load(f"--gin_file=gin/st5_{size}_{pooling}.gin")
    config = model().encoder
    assert config.pooling == POOLINGS[pooling]
    shapes = jax.eval_shape(
        encoder.SentenceEncoder(config).init,
        jax.random.key(0),
        jax.ShapeDtypeStruct((2, 8), jnp.int32),
    )
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
    assert count == config.num_params()
    expected = COUNTS[size][pooling == "encdec"]
    # The published counts have four or five digits.
    assert count / 1e6 == pytest.approx(expected, rel=2e-4)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("pooling", ["attention", "max"])
def test_other_poolings_go_on_any_size(pooling):
    load("--gin_file=gin/st5_small_mean.gin", f"--gin_file=gin/pooling/{pooling}.gin")
    assert model().encoder.pooling == pooling


def test_every_shared_file_is_used():
    included = set()
    for path in (ROOT / "gin").glob("*.gin"):
        name = str(path.relative_to(ROOT))
        included |= {name, *load(f"--gin_file={name}").reader.files}
    on_top = {"pooling/attention", "pooling/max", "optim/adamw"}
    on_top |= {"data/files", "data/labelled", "data/sts_file"}
    on_top |= {"data/cqa_tfds", "data/msmarco", "data/msmarco_triples"}
    on_top |= {"data/beir_folder", "data/medi"}
    # launch/study.py puts them on top; tests/test_study.py sees to it.
    on_top |= {"study/tiny", "study/tiny_instructions", "study/small"}
    on_top |= {f"recipes/{path.stem}" for path in (ROOT / "gin" / "recipes").glob("*")}
    shared = {
        path.relative_to(ROOT / "gin").with_suffix("").as_posix()
        for path in (ROOT / "gin").glob("*/*.gin")
    }
    assert shared == on_top | {
        name.removeprefix("gin/").removesuffix(".gin")
        for name in included
        if name.count("/") == 2
    }


@pytest.mark.parametrize("size", ["tiny", "xl"])
def test_gin_itself_reads_the_same(size, monkeypatch):
    """T5X reads the files with gin's own parser, from the checkout's root."""
    load(f"--gin_file=gin/st5_{size}_mean.gin", "--gin.TRAIN_STEPS=3", MODEL_DIR)
    ours = gin.config_str()
    gin.clear_config()
    monkeypatch.chdir(ROOT)
    gin.parse_config_files_and_bindings(
        [f"gin/st5_{size}_mean.gin"], ["TRAIN_STEPS = 3", "MODEL_DIR = '/nowhere'"]
    )
    assert gin.config_str() == ours


def test_example_in_the_docs(tmp_path):
    text = (ROOT / "docs" / "gin.md").read_text().split("## Writing one")[1]
    path = tmp_path / "my_run.gin"
    path.write_text(text.split("```")[1])
    config = load(f"--gin_file={path}")
    assert _value(config, "MAX_LENGTH") == 128
    assert model().loss.mask_duplicates


def test_paper_values_of_a_real_size():
    config = load("--gin_file=gin/st5_base_mean.gin", MODEL_DIR)
    built = model()
    assert (built.loss.logit_scale, built.loss.bidirectional) == (100.0, True)
    rates = [float(built.optimizer.learning_rate(step)) for step in (0, 160, 880, 1600)]
    assert rates == pytest.approx([1e-3, 1e-3, 0.5e-3, 0.0])
    assert _value(config, "BATCH_SIZE") == 512
    assert _value(config, "VOCABULARY_PATH").startswith("gs://t5-data/vocabs/cc_all")


def test_labelled_pairs_on_any_size(tmp_path):
    (tmp_path / "p.tsv").write_text("sentence1\tsentence2\tlabel\na\tb\t1\na\tc\t0\n")
    train = load(
        TINY,
        "--gin_file=gin/data/labelled.gin",
        MODEL_DIR,
        f"--train_file={tmp_path / 'p.tsv'}",
    ).arguments()["train_dataset_cfg"]
    assert train.mixture_or_task_name.name == "labelled_p"
    assert train.num_negatives == 1


def test_tiny_arguments_are_built_whole():
    arguments = load(TINY, MODEL_DIR, "--train_steps=7").arguments()
    assert arguments["model_dir"] == "/nowhere"
    assert arguments["total_steps"] == 7
    train, score = arguments["train_dataset_cfg"], arguments["infer_eval_dataset_cfg"]
    assert (train.batch_size, train.num_negatives) == (64, 1)
    assert (score.split, score.num_negatives) == ("validation", 0)
    vocabulary = train.mixture_or_task_name.output_features["inputs"].vocabulary
    assert vocabulary.vocab_size <= arguments["model"].encoder.t5.vocab_size


def _value(config: gin_files.Config, macro: str):
    return config.reader.bindings[macro, "gin.macro", "value"][-1].value


# --- flags --------------------------------------------------------------------------


def test_small_model_on_a_file_by_flags_alone(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("anchor\tpositive\twrong\na b\ta c\td e\n")
    scored = tmp_path / "sts.tsv"
    scored.write_text("sentence1\tsentence2\tscore\na b\ta c\t3.5\n")
    vocabulary = ROOT / "tasks" / "data" / "synthetic.model"
    arguments = load(
        TINY,
        MODEL_DIR,
        f"--train_file={pairs}",
        "--negatives=wrong",
        f"--eval_file={scored}",
        "--vocabulary",
        str(vocabulary),
        "--batch_size=128",
        "--max_length=24",
        "--train_steps=400",
        "--gin.T5Config.d_model=128",
        "--gin.T5Config.head_dim=32",
        "--gin.T5Config.d_ff=512",
        "--gin.EncoderConfig.projection_dim=256",
    ).arguments()
    t5 = arguments["model"].encoder.t5
    assert (t5.d_model, t5.num_layers, t5.num_heads, t5.head_dim) == (128, 2, 4, 32)
    assert (t5.d_ff, t5.vocab_size) == (512, 32128)
    assert arguments["model"].encoder.projection_dim == 256
    train = arguments["train_dataset_cfg"]
    assert (train.batch_size, train.num_negatives) == (128, 1)
    assert train.task_feature_lengths == {"inputs": 24, "targets": 24}
    assert arguments["infer_eval_dataset_cfg"].mixture_or_task_name is not None


def test_train_file_alone_switches_evaluation_off(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("anchor\tpositive\na b\ta c\n")
    arguments = load(TINY, MODEL_DIR, f"--train_file={pairs}").arguments()
    assert arguments["infer_eval_dataset_cfg"] is None
    assert arguments["train_dataset_cfg"].num_negatives == 0


def test_gin_flag_beats_plain_flag_beats_later_file_beats_earlier(tmp_path):
    later = tmp_path / "later.gin"
    later.write_text("TRAIN_STEPS = 1\nBATCH_SIZE = 2\nEVAL_PERIOD = 3\n")
    config = load(
        "--gin.TRAIN_STEPS=10",
        "--train_steps=20",
        "--batch_size=30",
        TINY,
        f"--gin_file={later}",
    )
    values = [_value(config, m) for m in ("TRAIN_STEPS", "BATCH_SIZE", "EVAL_PERIOD")]
    assert values == [10, 30, 3]


def test_a_path_needs_no_quotes():
    path = "/a folder/with 'quotes'"
    assert _value(load(TINY, "--model_dir", path), "MODEL_DIR") == path


def test_t5x_spelling_of_bindings():
    config = load(TINY, "--gin_bindings=TRAIN_STEPS = 4", "--gin.BATCH_SIZE=5")
    assert (_value(config, "TRAIN_STEPS"), _value(config, "BATCH_SIZE")) == (4, 5)


# Every class and function that a gin file binds, with a value other than the default.
BINDABLE = {
    "T5Config.dropout_rate=0.25": lambda a: a["model"].encoder.t5.dropout_rate,
    "EncoderConfig.normalize=False": lambda a: a["model"].encoder.normalize,
    "LossConfig.logit_scale=20.0": lambda a: a["model"].loss.logit_scale,
    "MeshConfig.model=2": lambda a: a["partitioner"].mesh.shape["model"],
    "checkpoints.keep=7": lambda a: a["checkpoint_cfg"].keep,
    "dataset.cache_dir='/c'": lambda a: a["train_dataset_cfg"].cache_dir,
    "linear_decay.peak=0.5": lambda a: float(a["model"].optimizer.learning_rate(0)),
    "engine.train.eval_steps=3": lambda a: a["eval_steps"],
    "synthetic.task.name='t'": lambda a: (
        a["train_dataset_cfg"].mixture_or_task_name.name
    ),
}


@pytest.mark.parametrize("binding", BINDABLE)
def test_binding_reaches_what_is_built(binding):
    arguments = load(TINY, MODEL_DIR, f"--gin.{binding}").arguments()
    expected = gin.config.parse_value(binding.partition("=")[2])
    assert BINDABLE[binding](arguments) == expected


# --- mistakes -----------------------------------------------------------------------

MISTAKES = {
    "macro": (
        ["--gin.TRAIN_STPES=9"],
        ["--gin.TRAIN_STPES=9", "nothing uses", "Did you mean TRAIN_STEPS?"],
    ),
    "scope": (
        ["--gin.infer_evla/engine.dataset.batch_size=2"],
        ["engine.dataset is never used in scope infer_evla", "mean infer_eval?"],
    ),
    "parameter": (
        ["--gin.T5Config.d_modle=8"],
        ["T5Config has no parameter d_modle", "mean d_model?", "num_heads, head_dim"],
    ),
    "function": (
        ["--gin.T5Confg.d_model=8"],
        ["nothing called T5Confg", "Did you mean T5Config?"],
    ),
    "flag": (["--trian_steps=3"], ["Unknown flag --trian_steps", "--train_steps?"]),
    "word": (["stray"], ["Unknown flag stray"]),
    "number": (["--train_steps=ten"], ["--train_steps: got 'ten'", "a whole number"]),
    "quotes": (
        ["--gin.MODEL_DIR=/tmp/x"],
        ["--gin.MODEL_DIR=/tmp/x", "needs quotes of its own"],
    ),
    "space": (["--gin.MODEL_DIR", "x"], ["write --gin.MODEL_DIR=VALUE"]),
    "reference": (
        ["--gin.TASK=@synthetic.tsak()"],
        ["nothing called synthetic.tsak", "Did you mean synthetic.task?"],
    ),
    "undefined macro": (
        ["--gin.BATCH_SIZE=%BTCH"],
        ["%BTCH is used by BATCH_SIZE (--gin.BATCH_SIZE=%BTCH) but never set"],
    ),
    "overridden": (
        ["--gin.engine.dataset.batch_size=9"],
        [
            "has no effect",
            "overridden by infer_eval/engine.dataset.batch_size (gin/runs",
        ],
    ),
    "replaced": (
        [
            "--gin.MAX_LENGTH=9",
            "--gin.TASK_FEATURE_LENGTHS={'inputs': 5, 'targets': 5}",
        ],
        ["MAX_LENGTH has no effect", "replaced by TASK_FEATURE_LENGTHS (--gin.TASK_F"],
    ),
    "not built in": (
        ["--gin_file=gin/optim/adamw.gin", "--gin.adafactor.decay_rate=0.5"],
        [
            "adafactor.decay_rate has no effect",
            "replaced by engine.model.optimizer (gin/",
        ],
    ),
    "refused value": (
        ["--gin.T5Config.dropout_rate=1.5"],
        ["T5Config.dropout_rate: got 1.5, expected in [0, 1)"],
    ),
    "no vocabulary": (
        ["--vocabulary=/no/such.model"],
        ["/no/such.model", "VOCABULARY_PATH", "--vocabulary"],
    ),
    "no training file": (
        ["--train_file=/no/pairs.tsv"],
        ["/no/pairs.tsv", "--train_file"],
    ),
    "no evaluation file": (
        ["--eval_file=/no/sts.tsv"],
        ["/no/sts.tsv", "--eval_file"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named_before_anything_runs(capsys, mistake):
    flags, expected = MISTAKES[mistake]
    message = error_of(capsys, TINY, MODEL_DIR, *flags)
    for part in expected:
        assert part in message
    assert "Traceback" not in message


def test_function_that_nothing_refers_to(capsys, tmp_path):
    path = tmp_path / "more.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\nfrom sentence_t5.tasks import sts\n"
        "sts.stsb.name = 'mine'\n"
    )
    message = error_of(capsys, TINY, MODEL_DIR, f"--gin_file={path}")
    assert f"{path}:3: nothing refers to sts.stsb, so that sts.stsb.name has" in message


def test_all_idle_statements_are_listed_at_once(capsys):
    message = error_of(capsys, TINY, MODEL_DIR, "--gin.AAA=1", "--gin.BBB=2")
    assert "AAA" in message
    assert "BBB" in message


def test_open_values_say_which_flag_to_pass(capsys):
    assert "Pass --model_dir=" in error_of(capsys, TINY)
    message = error_of(capsys, TINY, "--gin_file=gin/data/files.gin")
    assert "TRAIN_FILE has no value (gin/data/files.gin:" in message
    assert "Pass --train_file=" in message
    assert "Pass --model_dir=" in message


def test_flag_without_a_target_says_which_files_lack_it(capsys, tmp_path):
    run = tmp_path / "run.gin"
    run.write_text(
        "from __gin__ import dynamic_registration\nfrom sentence_t5 import engine\n"
        "engine.train.total_steps = 3\n"
    )
    message = error_of(capsys, f"--gin_file={run}", "--seed=3")
    assert (
        f"--seed=3 sets RANDOM_SEED, which the given gin files don't have: {run}"
        in (message)
    )


def test_no_file_and_no_root(capsys):
    assert "No gin file is given" in error_of(capsys)
    message = error_of(capsys, "--gin_file=gin/pooling/mean.gin")
    assert "none binds engine.train" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_processes=2"], "Missing: coordinator_address, process_id."),
        (["--heartbeat_timeout_seconds=0"], "expected 1 or more"),
        (HOSTS, "This host could not join the others (from flags): no one answers"),
    ],
)
def test_mistake_in_the_flags_of_several_hosts(capsys, monkeypatch, flags, message):
    for variable in [
        *distributed._COUNTS,
        *distributed._LISTS,
        *distributed._ADDRESSES,
    ]:
        monkeypatch.delenv(variable, raising=False)

    def join(**given):
        raise RuntimeError("no one answers")

    monkeypatch.setattr(jax.distributed, "initialize", join)
    assert message in error_of(capsys, TINY, MODEL_DIR, *flags)


def test_fewer_hosts_than_the_flags_say(capsys, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: None)
    error = error_of(capsys, TINY, MODEL_DIR, *HOSTS)
    assert "1 hosts came together, --num_processes says 2" in error


def test_missing_file_says_where_it_looked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = error_of(
        capsys, "--gin_file=gin/st5_tiny_maen.gin", "--gin_search_paths=/a"
    )
    assert "no gin file gin/st5_tiny_maen.gin" in message
    for folder in ("/a", str(tmp_path), str(ROOT), str(ROOT / "sentence_t5")):
        assert folder in message
    assert "Did you mean gin/st5_tiny_mean.gin?" in message


# What stands in line 3, after `from sentence_t5 import engine`.
FILE_MISTAKES = {
    "include 'gin/sizes/tyni.gin'": [
        "run.gin:3",
        "gin/sizes/tyni.gin",
        "sizes/tiny.gin?",
    ],
    "import no.such_module": ["run.gin:3: cannot import no.such_module", "No module"],
    "from sentence_t5 import lossses": ["run.gin:3: cannot import sentence_t5.lossses"],
    "engine.train.total_setps = 3": ["run.gin:3", "total_setps", "mean total_steps?"],
    "engine.trian.total_steps = 3": ["run.gin:3", "engine.trian", "mean train?"],
    "engin.train.total_steps = 3": ["run.gin:3: 'engin' was not", "mean engine?"],
    "engine.train.model = @engine.modle()": ["run.gin:3", "modle", "mean model?"],
    "engine.train.total_steps = 3 4": ["run.gin:3", "Expected newline", "3 4"],
    "engine.train.total_steps = [3": ["run.gin"],
    "engine.train.total_steps = %STEPS": ["%STEPS", "(run.gin:3)", "never set"],
    "STEPS = 3": ["run.gin:3: nothing uses the macro STEPS"],
}


@pytest.mark.parametrize("line", FILE_MISTAKES)
def test_mistake_in_a_file_is_named_with_its_line(capsys, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("run.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        f"from sentence_t5 import engine\n{line}\n"
    )
    message = error_of(capsys, TINY, "--gin_file=run.gin")
    for part in FILE_MISTAKES[line]:
        assert part in message


def test_file_that_includes_itself(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("a.gin").write_text("include 'b.gin'\n")
    pathlib.Path("b.gin").write_text("include 'a.gin'\n")
    assert "b.gin:1: a.gin includes itself" in error_of(capsys, "--gin_file=a.gin")


def test_what_a_replaced_task_used_is_no_mistake(tmp_path):
    later = tmp_path / "later.gin"
    later.write_text("EVAL_PERIOD = 5\n")
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("anchor\tpositive\na b\ta c\n")
    config = load(TINY, f"--gin_file={later}", f"--train_file={pairs}", MODEL_DIR)
    idle = set(config.reader.bindings) - config.usage.used
    assert ("", "sentence_t5.tasks.synthetic.task", "vocabulary") in idle
    assert "synthetic" not in config.text().partition("# Macros")[2].replace(
        "vocabularies.synthetic", ""
    )


def test_nothing_here_skips_what_gin_does_not_know():
    sources = [*ROOT.glob("sentence_t5/**/*.py"), *ROOT.glob("tasks/*.py")]
    assert len(sources) > 10
    assert not [path for path in sources if "skip_unknown" in path.read_text()]


# --- gin itself: private parts, pinned ----------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    """A module whose functions record every value that gin passes them."""
    module = types.ModuleType("fake_for_gin")
    module.seen = set()

    def see(*values):
        module.seen.update(v for v in values if isinstance(v, int))

    def root(first, second=None, third=None):
        see(first, second, third)
        if callable(third):
            third()

    def leaf(x=None, y=None, inner=None):
        see(x, y)

    for function in (root, leaf):
        function.__module__ = module.__name__
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


WALK = """
from __gin__ import dynamic_registration
import fake_for_gin

fake_for_gin.root.first = [@a/fake_for_gin.leaf(), {'k': %MACRO}]
fake_for_gin.root.second = (@b/c/fake_for_gin.leaf(),)
fake_for_gin.root.third = @fake_for_gin.leaf
MACRO = @fake_for_gin.leaf()
a/fake_for_gin.leaf.x = 1
a/fake_for_gin.leaf.inner = @e/fake_for_gin.leaf()
fake_for_gin.leaf.x = 2
fake_for_gin.leaf.y = %NUMBER
b/fake_for_gin.leaf.y = 4
b/c/fake_for_gin.leaf.x = 5
c/fake_for_gin.leaf.x = 6
MACRO/fake_for_gin.leaf.y = 7
NUMBER = 8
e/fake_for_gin.leaf.y = 11
d/fake_for_gin.leaf.inner = @a/fake_for_gin.leaf()
UNUSED = 9
NUMBER/fake_for_gin.leaf.x = 10
"""


def test_walk_finds_what_gin_uses(fake, tmp_path):
    path = tmp_path / "walk.gin"
    path.write_text(WALK)
    reader = gin_reader.Reader([])
    reader.read_file(str(path))
    usage = gin_checks.walk(reader.bindings, "fake_for_gin.root")
    walked = [reader.bindings[key][-1].value for key in usage.used]
    gin.finalize()
    gin.get_configurable(fake.root)()
    assert fake.seen == {1, 2, 4, 5, 7, 8, 11}
    assert {v for v in walked if isinstance(v, int)} == fake.seen
    # What the reader kept is what gin holds.
    assert {
        (scope, selector, parameter): value
        for (scope, selector), table in gin.config._CONFIG.items()
        for parameter, value in table.items()
    } == {key: given[-1].value for key, given in reader.bindings.items()}


# --- what is written beside a run ---------------------------------------------------


def test_config_gin_repeats_the_run(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("anchor\tpositive\na b\ta c\n")
    config = load(
        TINY, f"--model_dir={tmp_path}", f"--train_file={pairs}", "--gin.BATCH_SIZE=3"
    )
    first = config.arguments()
    first["summarize_config_fn"](first["model_dir"], None, 0)
    text = (tmp_path / "config.gin").read_text()
    again = load(f"--gin_file={tmp_path}/config.gin")
    assert again.text() == config.text()
    second = again.arguments()
    more = {key: value for key, value in second.items() if key not in first}
    assert more == {"compilation_cache_dir": None, "profile_steps": None}  # defaults
    assert first["model"].encoder == second["model"].encoder
    assert first["model"].loss == second["model"].loss
    left, right = first["train_dataset_cfg"], second["train_dataset_cfg"]
    assert dataclasses.replace(left, mixture_or_task_name="") == dataclasses.replace(
        right, mixture_or_task_name=""
    )
    assert left.batch_size == 3
    # Defaults are written out, so that a later version's do not creep in.
    assert "T5Config.dropout_rate = 0.0" in text
    assert "include" not in text.partition("\n\n")[2]


def test_explain_names_value_and_origin(capsys):
    assert gin_files.main([TINY, "--explain=T5Config.d_model"]) == 0
    assert capsys.readouterr().out == "T5Config.d_model = 64  # gin/sizes/tiny.gin:7\n"
    flag = "--gin.T5Config.d_model=128"
    assert gin_files.main([TINY, flag, "--explain=T5Config.d_model"]) == 0
    assert capsys.readouterr().out == (
        f"T5Config.d_model = 128  # {flag}; before: 64 (gin/sizes/tiny.gin:7)\n"
    )
    assert gin_files.main([TINY, "--batch_size=9", "--explain=dataset.batch_size"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        "train/engine.dataset.batch_size = %BATCH_SIZE = 9  # gin/"
    )
    assert lines[1].endswith(", --batch_size=9")
    assert gin_files.main([TINY, "--explain=T5Config.dropout_rate"]) == 0
    assert capsys.readouterr().out == "T5Config.dropout_rate = 0.0  # default\n"
    message = error_of(capsys, TINY, "--explain=T5Config.d_modle")
    assert "Did you mean T5Config.d_model?" in message


def test_the_guide_shows_what_explain_prints(capsys):
    argv = ["--gin_file=gin/st5_base_mean.gin", "--batch_size=9"]
    assert gin_files.main([*argv, "--explain=BATCH_SIZE"]) == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "gin.md").read_text()


def test_explain_hides_only_defaults_that_are_made_anew(monkeypatch):
    @dataclasses.dataclass
    class Options:
        made: list = dataclasses.field(default_factory=list)
        kind: str = "factory"

    config = load(TINY)
    defaults = {
        ("", "own.Options", name): parameter.default
        for name, parameter in gin_reader.parameters(Options).items()
    }
    monkeypatch.setattr(gin_files.Config, "defaults", lambda config: defaults)
    assert config.explain("Options") == "Options.kind = 'factory'  # default"


def test_config_command_lists_everything(capsys):
    assert gin_files.main([TINY], command="config") == 0
    out = capsys.readouterr().out
    for name in (
        "MODEL_DIR = %gin.REQUIRED",
        "TRAIN_STEPS = ",
        "LossConfig.logit_scale",
    ):
        assert name in out


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "T5Config.dropout_rate=1.5",
            "T5Config.dropout_rate: got 1.5, expected in [0,",
        ),
        ("LossConfig.logit_scale=-1.0", "LossConfig.logit_scale: got -1.0, expected"),
        ("BATCH_SIZE=0", "batch_size must be at least 1, got 0"),
        ("engine.checkpoints.keep=-1", "CheckpointConfig.keep: got -1, expected"),
    ],
)
def test_config_command_finds_values_that_training_refuses(capsys, flag, message):
    assert gin_files.main([TINY, f"--gin.{flag}"], command="config") == 2
    printed = capsys.readouterr()
    assert (
        flag.split("=")[0] in printed.out
    )  # Where it comes from is said all the same.
    assert printed.err.startswith("sentence-t5 config: error: ")
    assert message in printed.err


def test_config_command_needs_no_data(capsys):
    argv = [TINY, "--train_file=/no/pairs.tsv", "--eval_file=/no/sts.tsv"]
    assert gin_files.main(argv, command="config") == 0
    for path in sorted((ROOT / "gin" / "recipes").glob("*.gin")):
        argv = ["--gin_file=gin/st5_tiny_mean.gin", f"--gin_file={path}"]
        assert gin_files.main(argv, command="config") == 0, capsys.readouterr().err
        gin.clear_config()


# --- what training refuses ----------------------------------------------------------


def caught(function, *arguments) -> Exception:
    """Runs a function that must fail; returns the error with its traceback."""
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def ours(text: str):
    """Makes a function of this package out of its body."""
    space = {"preflight": preflight, "reporting": reporting, "json": json}
    space["__name__"] = "sentence_t5.made_up"
    exec(f"def run():\n    {text}", space)
    return space["run"]


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('no')",
        "raise FileNotFoundError('no')",
        "raise preflight.OtherHostError('no')",
        "raise reporting.NonFiniteError('no')",
        "open('/no/such/file')",
    ],
)
def test_what_the_package_refuses_is_for_the_user(text):
    assert gin_files.is_for_the_user(caught(ours(text)))


@pytest.mark.parametrize(
    "text",
    [
        "None + 1",
        "raise RuntimeError('no')",
        "raise KeyError('no')",
        "raise FloatingPointError('no')",
    ],
)
def test_a_defect_keeps_its_traceback(text):
    assert not gin_files.is_for_the_user(caught(ours(text)))


def test_what_another_package_refuses_keeps_its_traceback():
    assert not gin_files.is_for_the_user(caught(json.loads, "{"))
    assert not gin_files.is_for_the_user(caught(np.reshape, np.zeros(3), (2, 2)))


def test_an_error_handed_on_is_told_by_where_it_arose():
    def hand_on(text):
        with preflight.together("a test"):
            ours(text)()

    assert gin_files.is_for_the_user(caught(hand_on, "raise ValueError('no')"))
    assert not gin_files.is_for_the_user(caught(hand_on, "json.loads('{')"))


def test_training_refuses_in_one_line(capsys, caplog, monkeypatch, tmp_path):
    path = tmp_path / "FILE"
    path.touch()
    caplog.set_level(logging.DEBUG, logger="sentence_t5.gin_files")
    monkeypatch.setattr(logging.getLogger("sentence_t5"), "propagate", True)
    assert gin_files.main([TINY, f"--model_dir={path}", "--train_steps=1"]) == 1
    assert capsys.readouterr().err == (
        f"sentence-t5 train: error: model_dir {path} is a file, expected a folder. "
        "Name a folder; it is made if it isn't there.\n"
    )
    assert "in check_engine" in caplog.text
    assert gin_files.main([TINY, MODEL_DIR, "--gin.STATS_PERIOD=0"]) == 1
    assert capsys.readouterr().err == (
        "sentence-t5 train: error: train.stats_period: got 0, expected 1 or more.\n"
    )


def test_a_defect_in_training_is_not_printed_as_a_message(monkeypatch):
    monkeypatch.setattr(
        checkpoint_files, "check_engine", lambda *_, **__: ours("None + 1")()
    )
    with pytest.raises(TypeError, match="unsupported operand"):
        gin_files.main([TINY, MODEL_DIR, "--train_steps=1"])


# --- from anywhere ------------------------------------------------------------------


def test_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(TINY).reader.files[0] == "gin/st5_tiny_mean.gin"


def test_the_users_folders_come_first(tmp_path, monkeypatch):
    here, theirs = tmp_path / "here", tmp_path / "theirs"
    for folder, steps in ((here, 11), (theirs, 12)):
        folder.mkdir()
        (folder / "steps.gin").write_text(f"TRAIN_STEPS = {steps}\n")
    monkeypatch.chdir(here)
    flags = [TINY, "--gin_file=steps.gin"]
    assert _value(load(*flags), "TRAIN_STEPS") == 11
    assert _value(load(*flags, f"--gin_search_paths={theirs}"), "TRAIN_STEPS") == 12


@pytest.mark.slow
@pytest.mark.entry
def test_command_from_an_installed_copy(tmp_path):
    """Lays the package out as a wheel does, and runs it from another folder."""
    site = tmp_path / "site"
    ignore = shutil.ignore_patterns("__pycache__", "tests")
    shutil.copytree(ROOT / "sentence_t5", site / "sentence_t5", ignore=ignore)
    shutil.copytree(ROOT / "tasks", site / "sentence_t5" / "tasks", ignore=ignore)
    shutil.copytree(ROOT / "gin", site / "sentence_t5" / "gin")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = (
        "import sys, sentence_t5.cli; import sentence_t5.tasks\n"
        f"assert sentence_t5.tasks.__file__.startswith({str(site)!r})\n"
        "sys.exit(sentence_t5.cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "config", TINY, "--explain=TRAIN_STEPS"],
        cwd=elsewhere,
        env={"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TRAIN_STEPS = ")
