"""The study: wordings, held-out rows, what is planned, scored again, and the page."""

import json
import pathlib
import sys

import gin
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "launch"))

import study  # noqa: E402
import study_data  # noqa: E402
import study_page  # noqa: E402
import study_plan  # noqa: E402
import study_report  # noqa: E402
import study_scores  # noqa: E402
import study_wordings  # noqa: E402
import sweep  # noqa: E402
import sweep_plan  # noqa: E402
import sweep_table  # noqa: E402
from test_sweep import write_checkpoint, write_metrics  # noqa: E402

ASK = "Represent the medical question for retrieving an answer:"
SAME = "Represent the title for finding similar titles:"


@pytest.fixture(autouse=True)
def _clear_gin():
    yield
    gin.clear_config()


# --- wordings and files -------------------------------------------------------------


@pytest.mark.parametrize(
    "instruction",
    [
        ASK,
        "Represent the medical question for retrieving an answer; Input:",
        "represent a medical question for retrieving an answer.",
        "Represent medical question for retrieving an answer",
    ],
)
def test_instructions_are_taken_apart(instruction):
    assert study_wordings.short("t", instruction) == "medical question:"
    first = study_wordings.paraphrase(study_wordings.PARAPHRASES[2])
    assert first("t", instruction) == (
        "For retrieving an answer, represent the medical question:"
    )
    assert study_wordings.tag("medquad", instruction) == "medquad:"
    assert study_wordings.detailed("t", instruction) == instruction
    assert study_wordings.none("t", instruction) == ""


def test_instructions_of_another_form_stay():
    other = "Find duplicates:"
    assert not study_wordings.has_form(other)
    assert study_wordings.short("t", other) == other
    assert study_wordings.paraphrase("{what}")("t", other) == other


def test_no_model_is_scored_with_a_wording_that_it_was_trained_on():
    assert not set(study_wordings.PARAPHRASES) & set(study_wordings.TRAINED_PARAPHRASES)
    assert len(set(study_wordings.PARAPHRASES)) == 5


def write_medi(path: pathlib.Path, num_rows: int = 120) -> str:
    with path.open("w") as file:
        for i in range(num_rows):
            left, right = (ASK, "Represent the answer for retrieval:")
            if i % 3:
                left = right = SAME
            row = {
                "query": [left, f"query {i}"],
                "pos": [right, f"answer {i % 100}"],
                "neg": [right, f"wrong {i}"] if i % 2 else None,
                "task_id": "similar" if i % 3 else "asked",
            }
            file.write(json.dumps(row) + "\n")
    return str(path)


def read(path: str) -> list[dict]:
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def texts_of(row: dict) -> list[str]:
    return [row["query"][1], row["pos"][1], *(text for _, text in row["neg"])]


def test_held_out_rows_share_nothing_with_training(tmp_path):
    files = study_data.prepare(write_medi(tmp_path / "m.jsonl"), tmp_path / "data")
    train, held_out = read(files.train("detailed")), read(files.held_out("detailed"))
    assert 3 <= len(held_out) <= 30
    seen = {text for row in train for text in (row["query"][1], row["pos"][1])}
    assert not any({r["query"][1], r["pos"][1]} & seen for r in held_out)
    # Rows 100 to 119 have the right texts of 0 to 19: some are lost to both.
    assert len(train) + len(held_out) < 120
    assert sum(files.train_rows.values()) == len(train)
    assert files.kinds == {"asked": "asymmetric", "similar": "symmetric"}
    assert files.tasks("mixed") == ["asked", "similar"]
    assert files.tasks("symmetric") == ["similar"]


def test_files_differ_in_their_instructions_alone(tmp_path):
    files = study_data.prepare(write_medi(tmp_path / "m.jsonl"), tmp_path / "data")
    detailed = read(files.train("detailed"))
    for wording in ("none", "tag", "short", "varied"):
        other = read(files.train(wording))
        assert list(map(texts_of, other)) == list(map(texts_of, detailed))
    assert {r["query"][0] for r in read(files.train("tag"))} == {"asked:", "similar:"}
    assert {r["query"][0] for r in read(files.train("none"))} == {""}
    varied = {r["query"][0] for r in read(files.train("varied"))}
    assert {SAME, "Describe the title for finding similar titles:"} < varied
    assert len(varied) == 8  # Two instructions, four wordings.
    paraphrased = read(files.held_out("paraphrase_1"))
    assert {r["query"][0] for r in paraphrased} & varied == set()


def test_files_are_made_once_and_anew_from_another_file(tmp_path):
    path, data = write_medi(tmp_path / "m.jsonl"), tmp_path / "data"
    first = study_data.prepare(path, data)
    written = pathlib.Path(first.train("tag")).stat().st_mtime_ns
    assert study_data.prepare(path, data) == first
    assert pathlib.Path(first.train("tag")).stat().st_mtime_ns == written
    write_medi(tmp_path / "m.jsonl", num_rows=80)
    assert study_data.prepare(path, data).train_rows != first.train_rows
    write_medi(tmp_path / "m.jsonl", num_rows=1)
    with pytest.raises(ValueError, match="the study needs some of both"):
        study_data.prepare(path, data)


# --- what is planned ----------------------------------------------------------------


def flags_of(tmp_path, *more: str):
    for name in ("nli.tsv", "qa.jsonl", "sts.tsv"):
        (tmp_path / name).touch()
    return study.parse(
        [
            *(f"--out={tmp_path / 'out'}", f"--nli_file={tmp_path / 'nli.tsv'}"),
            *(f"--cqa_file={tmp_path / 'qa.jsonl'}", "--vocabulary=v.model"),
            *("--sts", str(tmp_path / "sts.tsv"), *more),
        ]
    )


def test_one_factor_changes_at_a_time(tmp_path):
    models = study_plan.plan(flags_of(tmp_path, "--poolings=mean,first"), None)
    names = [model.run.name for model in models]
    stages = ("raw", "nli", "cqa", "cqa_nli")
    columns = ("tiny_mean", "tiny_first", "small_mean")
    assert names == [
        *(f"{stage}/{column}" for column in columns for stage in stages),
        "equal/tiny_mean",
    ]
    by_name = dict(zip(names, models, strict=True))
    raw, nli, both = (
        by_name[f"{stage}/tiny_mean"] for stage in ("raw", "nli", "cqa_nli")
    )
    assert (raw.num_pairs, raw.run.total_steps) == (0, 0)
    assert raw.run.settings["encoder.EncoderConfig.projection_dim"] == "None"
    assert both.num_pairs == 2 * nli.num_pairs
    assert f"--initial_checkpoint_path={tmp_path}/out/cqa/tiny_mean" in (
        both.run.arguments
    )
    assert nli.run.settings["INITIAL_CHECKPOINT_PATH"] == "None"
    small = by_name["nli/small_mean"]
    assert "--gin_file=gin/study/tiny.gin" in nli.run.arguments
    assert "--gin_file=gin/study/small.gin" in small.run.arguments
    assert by_name["equal/tiny_mean"].num_pairs == small.num_pairs < nli.num_pairs
    assert by_name["nli/tiny_first"].run.settings["encoder.EncoderConfig.pooling"] == (
        "'first'"
    )
    assert nli.scored_by[:4] == (
        "--sts", f"{tmp_path}/sts.tsv", "--geometry", f"{tmp_path}/sts.tsv",
    )  # fmt: skip


@pytest.mark.slow
def test_instructions_are_compared_at_the_first_size(tmp_path):
    files = study_data.prepare(write_medi(tmp_path / "m.jsonl"), tmp_path / "data")
    flags = flags_of(tmp_path, "--sizes=tiny", "--poolings=first", "--labelled=asked")
    models = [m for m in study_plan.plan(flags, files) if m.stage == "instructions"]
    assert [(model.data, model.wording) for model in models] == [
        ("symmetric", "none"), ("symmetric", "detailed"), ("asymmetric", "none"),
        ("asymmetric", "detailed"), ("mixed", "none"), ("mixed", "detailed"),
        ("mixed", "tag"), ("mixed", "short"), ("mixed", "varied"),
    ]  # fmt: skip
    for model in models:
        settings = model.run.settings
        assert settings["encoder.EncoderConfig.pool_instruction"] == "False"
        assert settings["medi.mixture.without_in_batch"] == "('asked',)"
        assert settings["WARMUP_STEPS"] == str(model.run.total_steps // 10)
    assert "--gin_file=gin/study/tiny_instructions.gin" in models[0].run.arguments
    assert models[0].run.settings["medi.mixture.only"] == "('similar',)"
    assert len(models[5].scored_by) == 8  # --medi, own and five wordings, --labelled
    assert models[-1].scored_by[1] == files.held_out("detailed")


@pytest.mark.slow
def test_weights_of_t5_take_the_recipes_own_steps(tmp_path):
    flags = flags_of(
        tmp_path, "--sizes=small,base", "--initial_checkpoint_path=t5-{size}",
        "--poolings=encdec",
    )  # fmt: skip
    models = {model.run.name: model for model in study_plan.plan(flags, None)}
    nli = models["nli/base_encdec"].run
    assert nli.settings["INITIAL_CHECKPOINT_PATH"] == "'t5-base'"
    assert nli.total_steps == 1600
    assert nli.settings["IGNORE"] == "()"
    assert "equal/base_encdec" not in models
    raw = models["raw/small_encdec"].run
    assert (raw.total_steps, raw.settings["ALLOW_MISSING"]) == (0, "()")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nli_columns=a,b"], "--nli_columns: got 2 names, expected 3."),
        (["--beir", "/nowhere"], "there is no /nowhere."),
        (["--sizes="], "expected one name or more of each"),
    ],
)
def test_mistakes_end_the_study_at_once(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit):
        flags_of(tmp_path, *flags)
    assert message in capsys.readouterr().err


def test_something_must_be_trained_on(tmp_path, capsys):
    (tmp_path / "sts.tsv").touch()
    with pytest.raises(SystemExit):
        study.parse([f"--out={tmp_path}", "--sts", str(tmp_path / "sts.tsv")])
    assert "nothing to train on: pass --nli_file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        study.parse([f"--out={tmp_path}", f"--nli_file={tmp_path / 'sts.tsv'}"])
    assert "nothing to score sentences on: pass --sts" in capsys.readouterr().err


# --- scores and the page ------------------------------------------------------------


def make_model(out: pathlib.Path, stage: str, size: str, pooling: str, **more):
    name = f"{stage}/{size}_{pooling}"
    run = sweep_plan.Run(
        name=name,
        values={},
        model_dir=str(out / name),
        arguments=(),
        t5x_arguments=(),
        total_steps=4,
        num_params={"tiny": 2_000_000, "small": 35_000_000}[size],
        settings={"BATCH_SIZE": "8", "MAX_LENGTH": "16"},
    )
    given = {"data": "", "wording": "", "num_pairs": 32, "scored_by": ()} | more
    return study_plan.Model(run=run, stage=stage, size=size, pooling=pooling, **given)


def report_of(spearman: float) -> dict:
    geometry = {
        "name": "sts", "texts": 9, "positive_pairs": 3, "positive_score": 4.0,
        "alignment": 0.5, "uniformity": -spearman / 20, "average_cosine": 0.1,
        "effective_rank": 2.5, "embedding_dim": 3, "singular_values": [0.5, 0.25, 0.0],
    }  # fmt: skip
    sts = [
        {
            "name": name, "file": f"/d/{name}.tsv", "pairs": 5, "sha256": "c0ffee",
            "notes": [], "all": {"spearman": value},
        }
        for name, value in (("sts", spearman), ("sick", spearman + 2))
    ]  # fmt: skip
    model = {
        "dtype": "float32",
        "versions": {"jax": "1"},
        "vocabulary": {"sha256": "5e"},
    }
    settings = {"similarity": "cosine", "prompt": None}
    return {
        "model": model, "settings": settings, "sts": sts, "geometry": [geometry],
        "transfer": [], "retrieval": [], "instructions": [],
    }  # fmt: skip


def row_of(text: str, *starts: str) -> list[str]:
    """Returns the cells of the first table row that starts with these cells."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if tuple(cells[: len(starts)]) == starts:
            return cells
    raise AssertionError(f"no row {starts} in\n{text}")


@pytest.mark.slow
def test_page_compares_what_was_scored(tmp_path):
    pytest.importorskip("matplotlib")
    scores = {
        "raw/tiny_mean": 40.0, "nli/tiny_mean": 50.0, "cqa_nli/tiny_mean": 53.5,
        "nli/tiny_first": 45.0, "nli/small_mean": 48.0, "equal/tiny_mean": 44.0,
    }  # fmt: skip
    models = []
    for name in scores:
        stage, _, column = name.partition("/")
        pairs = 16 if "small" in name or stage == "equal" else 32
        models.append(make_model(tmp_path, stage, *column.split("_"), num_pairs=pairs))
        folder = pathlib.Path(models[-1].run.model_dir)
        write_checkpoint(folder, 4)
        line = {"train/loss": 2.0, "train/accuracy": 0.5, "train/pairs_per_second": 9.0}
        write_metrics(folder, {"step": 2, **line}, {"step": 4, **line})
    models.append(make_model(tmp_path, "raw", "small", "mean"))
    reports = {name: report_of(score) for name, score in scores.items()}
    study_report.write(models, reports, {}, None, tmp_path)
    text = (tmp_path / "study.md").read_text()
    # The mean of two sets: one above what was given.
    assert row_of(text, "mean", "41.00")[1:3] == ["41.00", "51.00"]
    assert row_of(text, "tiny", "mean", "41.00") == [
        "tiny", "mean", "41.00", "51.00", "+10.00", "54.50", "+3.50",
    ]  # fmt: skip
    assert row_of(text, "tiny", "2,000,000")[-1] == "45.00 (16)"
    assert row_of(text, "small", "35,000,000")[-1] == "49.00 (16)"
    assert "raw/small_mean (not started)" in text
    assert row_of(text, "mean", "55.97 (recalled)")[-1] == "83.3 (authors)"
    page = (tmp_path / "study.html").read_text()
    plots = (
        "scaling_sts.png",
        "geometry.png",
        "curves_loss.png",
        "curves_accuracy.png",
    )
    assert page.count("data:image/png;base64,") == len(plots)
    assert "src=" not in page.replace('src="data:', "")
    for name in plots:
        assert (tmp_path / name).read_bytes()[1:4] == b"PNG"


def test_page_escapes_and_aligns():
    table = [{"name": "a<b", "score": "1.50 (3)"}, {"name": "`c|d`", "score": ""}]
    section = study_page.Section("A & B", ["*so* <i>", table])
    page = study_page.to_html("T", [section], pathlib.Path())
    assert "<h2>A &amp; B</h2>" in page
    assert "<p><em>so</em> &lt;i&gt;</p>" in page
    assert '<td>a&lt;b</td><td class="number">1.50 (3)</td>' in page
    assert "<code>c|d</code>" in page
    text = study_page.to_markdown("T", [section])
    assert r"| `c\|d` |" in text


def test_gap_between_paraphrases(tmp_path):
    def entry(name, pairs):
        task = {"pairs": pairs, "pairs_rows": 4, "retrieval": None, "retrieval_rows": 0}
        return {"name": f"held_out.{name}", "tasks": {"t": task}}

    model = make_model(tmp_path, "instructions", "tiny", "mean", data="mixed")
    entries = [entry(f"paraphrase_{i + 1}", 60.0 + i) for i in range(5)]
    report = {"instructions": [entry("detailed", 70.0), *entries]}
    row = study_scores.Scored(model, report, sweep_table.Progress())
    got = study_scores.instructed(row, "held_out.paraphrase_5", ["t", "other"])
    assert got == {"pairs": 64.0, "retrieval": None}
    assert study_scores.instructed(row, "held_out.tag", ["t"])["pairs"] is None
    assert study_scores.instructed(None, "held_out.tag", ["t"])["pairs"] is None


def test_reports_are_kept_until_weights_or_files_change(tmp_path, monkeypatch, capsys):
    stand_in = "import sys; open(sys.argv[-1].split('=')[1], 'w').write('{}')"
    monkeypatch.setattr(study, "EVALUATE", (sys.executable, "-S", "-c", stand_in))
    # The study has no JAX running when it forks; this process may.
    monkeypatch.setattr(sweep, "end_with_parent", None)
    data = tmp_path / "sts.tsv"
    data.write_text("a")
    model = make_model(tmp_path, "nli", "tiny", "mean", scored_by=("--sts", str(data)))

    def said() -> str:
        assert study.score([model], tmp_path) == {}
        return capsys.readouterr().out

    assert said() == ""  # Not trained yet.
    write_checkpoint(pathlib.Path(model.run.model_dir), 4)
    assert said() == "[1/1] nli/tiny_mean: scoring\n"
    assert study.report_path(tmp_path, model).read_text() == "{}"
    assert said() == "[1/1] nli/tiny_mean: scored before\n"
    data.write_text("another")
    assert "scoring" in said()
    monkeypatch.setattr(
        study, "EVALUATE", (sys.executable, "-S", "-c", "raise SystemExit('no data')")
    )
    data.write_text("a third")
    assert study.score([model], tmp_path) == {"nli/tiny_mean": "not scored (1)"}
    assert "no data" in capsys.readouterr().out
