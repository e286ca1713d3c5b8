"""Console, metrics.jsonl and TensorBoard; what happens to a NaN."""

import json
import logging
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from sentence_t5 import metrics_file, reporting

PARAMS = ["encoder/final_norm/scale", "projection/kernel"]


def values(loss=1.0, accuracy=0.5, **more):
    """Returns a step's metrics as the device gives them."""
    return {
        "loss": jnp.float32(loss),
        "accuracy": jnp.float32(accuracy),
        "grad_norm": jnp.float32(2.0),
        "update_norm": jnp.float32(0.1),
        "grad_norm_by_param": jnp.ones(2),
    } | {key: jnp.asarray(value, jnp.float32) for key, value in more.items()}


def make_reporter(folder, start_step=0, total_steps=100):
    return reporting.Reporter(
        str(folder), start_step=start_step, total_steps=total_steps, batch_size=16,
        param_names=PARAMS,
    )  # fmt: skip


def lines_of(folder):
    text = (folder / metrics_file.NAME).read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


ROWS = [np.arange(4), np.arange(4, 8), np.array([3, 1])]


def test_means_over_the_steps_since_the_last_report(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, logger="sentence_t5"),
        make_reporter(tmp_path) as reporter,
    ):
        for step, loss in ((1, 1.0), (2, 2.0), (3, 6.0)):
            reporter.collect(step, values(loss, loss / 10), ROWS[step - 1])
        reporter.report({"train/learning_rate": 0.01})
        reporter.report({})  # Nothing new: no line.
        reporter.collect(4, values(5.0), ROWS[0])
        reporter.report({})
    first, second = lines_of(tmp_path)
    assert first["step"] == 3 and second["step"] == 4
    assert first["train/loss"] == pytest.approx(3.0)
    assert first["train/accuracy"] == pytest.approx(0.3)
    assert first["train/learning_rate"] == 0.01
    assert "train/grad_norm_by_param" not in first
    assert second["train/loss"] == 5.0
    # Row ids are summed up in order, and anew after each report.
    all_rows = b"".join(rows.tobytes() for rows in ROWS)
    assert first["train/rows_crc32"] == zlib.crc32(all_rows)
    assert second["train/rows_crc32"] == zlib.crc32(ROWS[0].tobytes())
    assert "step 3/100  loss 3.0000  accuracy 0.300" in caplog.messages[0]


def test_speed_leaves_pauses_out(tmp_path, monkeypatch, caplog):
    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(reporting.time, "perf_counter", lambda: next(clock))
    with (
        caplog.at_level(logging.INFO, logger="sentence_t5"),
        make_reporter(tmp_path) as reporter,
    ):
        reporter.start_clock()  # At 10: what was before, compilation, doesn't count.
        for step in (1, 2):
            reporter.collect(step, values(), ROWS[0])
        reporter.report({}, pause=2.0)  # At 20: two steps in 8 seconds.
    (line,) = lines_of(tmp_path)
    assert line["train/pairs_per_second"] == pytest.approx(2 * 16 / 8)
    # 98 steps of 4 seconds.
    assert "4 pairs/s  6:32 left" in caplog.messages[0]


def test_evaluations_have_lines_and_undefined_scores_are_said(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, logger="sentence_t5"),
        make_reporter(tmp_path) as reporter,
    ):
        reporter.evaluation(0, {})
        reporter.evaluation(5, {"sts/x/spearman": 51.234, "sts/x/pearson": None})
    expected = {"step": 5, "sts/x/spearman": 51.234, "sts/x/pearson": None}
    assert lines_of(tmp_path) == [expected]
    (message,) = caplog.messages
    assert message == "step 5/100  sts/x/spearman 51.23  sts/x/pearson undefined"


def test_tensorboard_has_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    with make_reporter(tmp_path) as reporter:
        reporter.collect(1, values(2.5), ROWS[0])
        reporter.report({})
        reporter.evaluation(1, {"sts/x/spearman": 51.25, "sts/x/pearson": None})
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    found = {
        tag: float(tensor_util.make_ndarray(events.Tensors(tag)[0].tensor_proto))
        for tag in events.Tags()["tensors"]
    }
    assert found["train/loss"] == 2.5
    assert found["sts/x/spearman"] == 51.25
    assert "sts/x/pearson" not in found


# --- going on after a kill ------------------------------------------------------------


def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / metrics_file.NAME
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "tr')
    with make_reporter(tmp_path, start_step=2) as reporter:
        reporter.collect(3, values(), ROWS[0])
        reporter.report({})
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("cut", ['{"step": 2}', '{"step": 2', "{", '{"step": 2}\n\n'])
def test_a_line_cut_off_does_not_swallow_the_next(tmp_path, cut):
    (tmp_path / metrics_file.NAME).write_text('{"step": 1}\n' + cut)
    with make_reporter(tmp_path, start_step=2) as reporter:
        reporter.evaluation(3, {"x": 1.0})
    steps = [line["step"] for line in lines_of(tmp_path)]
    assert steps in ([1, 2, 3], [1, 3])


def test_whole_lines_are_read_up_to_a_step(tmp_path):
    path = epath.Path(tmp_path / metrics_file.NAME)
    assert metrics_file.read(path) == []
    metrics_file.append(path, 1, {"train/loss": 2.0})
    metrics_file.append(path, 4, {"sts/x": None, "sts/y": 3.0})
    path.write_text(path.read_text() + '{"step": 5, "sts/x": 7')
    first, second = {"step": 1, "train/loss": 2.0}, {"step": 4, "sts/x": None}
    second["sts/y"] = 3.0
    assert metrics_file.read(path) == [first, second]
    assert metrics_file.read(path, 3) == [first]
    assert metrics_file.evaluations(first) == {}
    assert metrics_file.evaluations(second) == {"sts/x": None, "sts/y": 3.0}


def test_a_new_run_starts_with_no_lines(tmp_path):
    (tmp_path / metrics_file.NAME).write_text('{"step": 0}\n{"step": 7}\n')
    with make_reporter(tmp_path) as reporter:
        reporter.evaluation(1, {"x": 1.0})
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 1]


# --- non-finite values ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "grad_norm", "update_norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_stop_with_the_first_bad_step(tmp_path, name, value):
    with make_reporter(tmp_path) as reporter:
        reporter.collect(6, values(), ROWS[0])
        reporter.collect(7, values(**{name: value}), ROWS[0])
        reporter.collect(8, values(np.nan), ROWS[0])
        with pytest.raises(
            reporting.NonFiniteError, match=rf"Step 7: {name} is .*not finite: none"
        ):
            reporter.report({})
    assert not (tmp_path / metrics_file.NAME).exists()


def test_non_finite_gradients_are_named(tmp_path):
    bad = values(grad_norm=np.nan, grad_norm_by_param=[1.0, np.nan])
    with make_reporter(tmp_path) as reporter:
        reporter.collect(3, bad, ROWS[0])
        with pytest.raises(
            reporting.NonFiniteError,
            match=r"Step 3: grad_norm is nan.*not finite: projection/kernel\. .*last "
            r"checkpoint is good.*lower learning rate",
        ):
            reporter.report({})


def test_other_values_may_be_undefined(tmp_path):
    with make_reporter(tmp_path) as reporter:
        reporter.collect(1, values(accuracy=np.nan), ROWS[0])
        reporter.report({})
    assert np.isnan(lines_of(tmp_path)[0]["train/accuracy"])


# --- the console ----------------------------------------------------------------------


def test_console_shows_our_lines_once(capsys):
    logger = logging.getLogger("sentence_t5")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        for _ in range(3):  # a process may train more than once
            reporting.log_to_console()
        logging.getLogger("sentence_t5.train").info("step %d", 3)
        logging.getLogger("sentence_t5.train").debug("not shown")
        logging.getLogger("another").info("nor is this")
    finally:
        logger.handlers, logger.level, logger.propagate = before
    shown = capsys.readouterr().err
    assert shown.count("step 3") == 1
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00"),
        (59.6, "1:00"),
        (392, "6:32"),
        (3600, "1:00:00"),
        (9e4, "25:00:00"),
    ],
)
def test_durations(tmp_path, monkeypatch, caplog, seconds, text):
    clock = iter([0.0, seconds])
    monkeypatch.setattr(reporting.time, "perf_counter", lambda: next(clock))
    with (
        caplog.at_level(logging.INFO, logger="sentence_t5"),
        make_reporter(tmp_path, total_steps=2) as reporter,
    ):
        reporter.collect(1, values(), ROWS[0])
        reporter.report({})
    assert caplog.messages[0].endswith(f"  {text} left")
