"""Ahead-of-time compilation: reading HLO text, counting, and a real TPU program."""

import dataclasses
import json
import logging
import math
import pathlib
import types

import gin
import jax
import numpy as np
import pytest

from sentence_t5 import (
    checkpoints,
    compile,
    compile_report,
    compile_setup,
    compile_tasks,
    compiled_programs,
    datasets,
    encoder,
    flops,
    gin_files,
    gin_flags,
    guides,
    partitioning,
    token_cache,
    tpu_topologies,
)
from sentence_t5.t5.config import T5Config
from sentence_t5.tokenizer import Tokenizer

VOCABULARY = pathlib.Path(__file__).parent.parent / "tasks" / "data" / "synthetic.model"

# Two layers scanned (the limit is in the condition), a gather that the compiler split
# into pieces inside and outside of that loop, two reductions that share a channel.
HLO = (pathlib.Path(__file__).parent / "golden/collectives.hlo").read_text()


@pytest.fixture(scope="module")
def program():
    return compiled_programs.Program(HLO)


def test_a_loop_counts_its_trips_and_a_split_gather_counts_once(program):
    found = {(c.kind, c.shape): (c.bytes, c.trips) for c in program.collectives()}
    assert found == {
        ("all-gather", "f32[16,4]"): (256, 1),
        ("all-reduce", "bf16[8,8], f32[4]"): (128 + 16, 2),
        ("all-reduce", "f32[32,8]"): (1024, 1),
        ("all-reduce", "f32[8,32]"): (1024, 1),
        ("collective-permute", "bf16[8]"): (16, 1),
    }
    totals = [c.total_bytes for c in program.collectives()]
    assert totals == sorted(totals, reverse=True)


def test_groups_of_chips_in_every_notation(program):
    groups = {c.shape: c.groups.tolist() for c in program.collectives()}
    assert groups["f32[16,4]"] == [list(range(8))]
    assert groups["bf16[8,8], f32[4]"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["f32[32,8]"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups["bf16[8]"] == [[0, 1], [1, 2]]
    crossing = {c.shape for c in program.collectives() if c.crosses(4)}
    assert crossing == {"f32[16,4]", "f32[32,8]", "f32[8,32]"}


def test_groups_along_one_axis_of_a_mesh():
    rest = "x), replica_groups=mesh['axis_0'=2,'axis_1'=3] {'axis_0'}, dimensions={0}"
    groups = compiled_programs._groups(rest)
    np.testing.assert_array_equal(groups, [[0, 3], [1, 4], [2, 5]])


def test_buffers_are_in_main_memory_and_outside_of_fusions(program):
    buffers = [(b.shape, b.bytes, b.count) for b in program.buffers()]
    assert ("f32[32,8]", 1024, 1) in buffers
    assert ("f32[16,4]", 256, 2) in buffers  # Of the fusions, not of what is inside.
    assert all(shape != "f32[8,32]" for shape, _, _ in buffers)  # On the chip itself.


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        compiled_programs.Program("HloModule nothing")


def test_flops_of_a_text_by_hand():
    t5 = T5Config(
        vocab_size=64, d_model=3, num_heads=2, head_dim=5, d_ff=7, num_layers=2,
        num_decoder_layers=1,
    )  # fmt: skip
    length = 4
    qkv_out = 4 * 3 * 10  # Multiply-adds of a token in a layer.
    weights = 2 * length * 2 * (qkv_out + 2 * 3 * 7)
    between = 2 * 2 * 2 * length * length * 10
    config = encoder.EncoderConfig(t5, "mean", 11)
    assert flops.per_text(config, length) == (weights, between, 2 * 3 * 11)
    config = encoder.EncoderConfig(t5, "decoder_first", 11)
    # One symbol: its own attention, q and out of the cross-attention, the MLP; then
    # keys and values of every token.
    decoder = 2 * (qkv_out + 2 * 3 * 10 + 2 * 3 * 7 + length * 2 * 3 * 10)
    assert flops.per_text(config, length)[0] == weights + decoder
    assert flops.per_text(config, length)[1] == between + 2 * 2 * (1 + length) * 10


def test_flops_of_a_step():
    config = encoder.EncoderConfig(T5Config(num_layers=1, remat="full"), "mean", 768)
    weights, between, projection = flops.per_text(config, 64)
    logits = 2 * 8 * 8 * 768
    step = flops.train_step(config, [(16, 64)], batch_size=8, num_candidates=8)
    assert step.model == 3 * (16 * (weights + between + projection) + logits)
    again = 16 * (weights + between)
    passes = 6 * 3 * (16 * projection + logits)
    assert step.hardware == 3 * again + again + passes
    chunked = flops.train_step(
        config, [(16, 64)], batch_size=8, num_candidates=8, is_chunked=True
    )
    assert chunked.model == step.model
    assert chunked.hardware == step.hardware + again + 6 * 16 * projection


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e", "write a generation"),
        ("v9:2x2", "v4, v5e, v5p, v6e"),
        ("v5e:2x2x2", "v5e has 2 axes"),
        ("v5p:4x4", "v5p has 3 axes"),
    ],
)
def test_wrong_topologies_are_named(name, message):
    with pytest.raises(ValueError, match=message):
        tpu_topologies.parse(name)


def test_topologies():
    topology = tpu_topologies.parse("v5e:8x8", num_slices=2)
    assert (topology.chips_per_slice, topology.num_chips) == (64, 128)
    assert str(topology) == "2 x v5e:8x8"
    assert topology.chip.memory_bytes == 16 * 2**30


def load(*flags):
    parsed = gin_flags.parse_flags(
        [*flags, "--topology=v5e:2x2"], compile.make_parser()
    )
    return gin_files.load(parsed)


@pytest.fixture
def cpu_devices(monkeypatch):
    """Puts this machine's devices in the place of a slice's."""
    monkeypatch.setattr(
        tpu_topologies, "devices", lambda topology: jax.devices()[: topology.num_chips]
    )


def set_up(*flags, step="train"):
    topology = tpu_topologies.parse("v5e:2x2")
    return compile_setup.set_up(load(*flags), topology, step)


def test_setting_up_needs_no_vocabulary_data_or_model_dir(cpu_devices):
    setup = set_up(
        "--gin_file=gin/st5_base_mean.gin",
        "--vocabulary=/nowhere/spiece.model",
        "--batch_size=16",
        "--num_negatives=3",
    )
    shapes = {key: array.shape for key, array in setup.batch().items()}
    assert shapes == {
        "left_tokens": (16, 64),
        "right_tokens": (16, 64),
        "negative_tokens": (16, 3, 64),
        "negative_mask": (16, 3),
    }
    assert setup.lengths() == (64,) * 5
    report = compile_report.describe(setup)
    assert report["parameters"] == setup.trainer.model.encoder.num_params()
    assert report["parameters"] == 110_218_368
    json.dumps(report)


def test_a_packed_step_has_the_shapes_of_training(cpu_devices):
    flags = ("--gin_file=gin/st5_base_mean.gin", "--packed_length=64")
    with pytest.raises(ValueError, match="packed_rows is open"):
        set_up(*flags).batch()
    flags += ("--batch_size=16", "--gin.train/engine.dataset.packed_rows=12")
    setup = set_up(*flags)
    shapes = {key: array.shape for key, array in setup.batch().items()}
    assert shapes == {
        "packed_tokens": (12, 64),
        "packed_slots": (12, 64),
        "packed_numbers": (12, 8),  # twice the mean of four texts to a row
        "packed_places": (4, 4, 3),
        "negative_mask": (16, 1),
    }
    weights, _, _ = flops.per_text(setup.trainer.model.encoder, 64)
    assert setup.flops().model == pytest.approx(3 * 12 * weights, rel=0.1)


@pytest.mark.parametrize(
    ("line", "network", "between_slices"),
    [
        ("collective-permute(%a), source_target_pairs={{0,4},{4,0}}", 4096, 4096),
        # A ring passes 7/8 twice; half of the 1/4 that a chip has of its slice's sum.
        ("all-reduce(%a), replica_groups={{0,1,2,3,4,5,6,7}}", 7168, 1024),
    ],
)
def test_bytes_that_a_chip_passes_on(cpu_devices, line, network, between_slices):
    text = (
        "ENTRY %main (a: f32[1024]) -> f32[1024] {\n  %a = f32[1024]{0} parameter(0)\n"
    )
    text += f"  ROOT %moved = f32[1024]{{0}} {line}\n}}\n"
    found = compiled_programs.Program(text).collectives()
    topology = tpu_topologies.parse("v5e:2x2", num_slices=2)
    chip = dataclasses.replace(topology.chip, dcn_bandwidth=1e9)
    setup = set_up("--gin_file=gin/st5_tiny_mean.gin", "--batch_size=64")
    topology = dataclasses.replace(topology, chip=chip)
    setup = dataclasses.replace(setup, topology=topology)
    seconds = compile_report._roofline(setup, found, 0.0)["seconds"]
    assert seconds["network"] * chip.ici_bandwidth == pytest.approx(network)
    between = seconds["network_between_slices"] * chip.dcn_bandwidth
    assert between == pytest.approx(between_slices)


MEDI = "--gin.medi.mixture"
PACKED = ("--packed_length=48", "--gin.train/engine.dataset.packed_rows=12")
MIXED = """
from __gin__ import dynamic_registration
from sentence_t5.tasks import adapted
from sentence_t5.tasks import files
from sentence_t5.tasks import mixtures

ASK = 'Name the color:'
TASK = @mixtures.mixture()
mixtures.mixture:
  tasks = [@plain/files.task(), @asked/adapted.task()]
  rates = [1, 1]
files.task:
  path = %TRAIN_FILE
  vocabulary = %VOCABULARY
  left = 'left'
  right = 'right'
plain/files.task.name = 'plain'
asked/adapted.task:
  task = @files.task()
  left_instruction = %ASK
  in_batch_negatives = False
  name = 'asked'
"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Writes rows of 'a' and 'b' with instructions, plain pairs, and their mixture."""
    monkeypatch.setenv("SENTENCE_T5_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(  # Comparing with SeqIO costs seconds for each task.
        token_cache, "_seqio_rows", lambda task, split: token_cache._head(task, split)
    )
    sides = {side: ["Say:", "a box"] for side in ("query", "pos", "neg")}
    rows = [json.dumps(sides | {"task_id": "ab"[i % 2]}) for i in range(32)]
    (tmp_path / "medi.jsonl").write_text("\n".join(rows) + "\n")
    pairs = ["left\tright"] + [f"a box {i}\ta cup" for i in range(16)]
    (tmp_path / "pairs.tsv").write_text("\n".join(pairs) + "\n")
    path = tmp_path / "pairs.tsv"
    (tmp_path / "mixed.gin").write_text(f"TRAIN_FILE = {str(path)!r}\n{MIXED}")
    return tmp_path


@pytest.fixture
def guide(data, monkeypatch):
    """Describes a guide of 12 numbers whose weights are zeros."""
    config = encoder.EncoderConfig(T5Config(vocab_size=2048), "mean", 12)
    (data / "guide").mkdir()
    checkpoints.write_description(data / "guide", config, Tokenizer(VOCABULARY), 8)

    def zeros(path, shardings, expected):
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), expected), 0

    monkeypatch.setattr(checkpoints, "load_params", zeros)


def shapes_in_training(setup):
    """Builds what training gives the step: name → shape and dtype."""
    root = gin_files._current.root
    references = gin.get_bindings(root, resolve_references=False)
    dataset = references["train_dataset_cfg"].scoped_configurable_fn()
    trainer = setup.trainer
    partitioner = trainer.partitioner
    batches = datasets.make_batches(
        dataset,
        datasets.load_examples(dataset),
        num_shards=partitioner.num_batch_shards,
        num_chunks=trainer.num_chunks(dataset.batch_size),
    )
    guide = guides.make_guide(trainer.model.loss.guide, partitioner)
    batch = jax.eval_shape(guide, partitioner.put_batch(batches.batch(0)[0]))
    return shapes_of(batch)


def shapes_of(batch):
    return {key: (array.shape, array.dtype) for key, array in batch.items()}


@pytest.mark.parametrize("packed", [(), PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("flags", "extras"),
    [
        (["--train_file=pairs.tsv", "--left=left", "--right=right"], (False, False)),
        (["--medi_file=medi.jsonl"], (True, False)),
        (["--medi_file=medi.jsonl", f"{MEDI}.without_in_batch=('b',)"], (True, True)),
        (["--medi_file=medi.jsonl", f"{MEDI}.with_instructions=False"], (False, False)),
        (["--medi_file=medi.jsonl", "--num_negatives=0"], (True, False)),
        (["--gin_file=mixed.gin", "--num_negatives=0"], (True, True)),
        (
            ["--gin_file=mixed.gin", "--num_negatives=0", "--gin.ASK=' '",
             "--gin.asked/adapted.task.in_batch_negatives=None"],
            (False, False),
        ),
    ],
)  # fmt: skip
def test_the_batch_is_that_of_training(
    cpu_devices, data, monkeypatch, flags, extras, packed
):
    monkeypatch.chdir(data)
    setup = set_up(
        "--gin_file=gin/st5_tiny_mean.gin", *flags, "--batch_size=8",
        "--max_length=24", *packed,
    )  # fmt: skip
    assert dataclasses.astuple(setup.extras) == extras
    found = shapes_of(setup.batch())
    assert found == shapes_in_training(setup)
    prefix = "packed" if packed else "left"
    assert (f"{prefix}_instruction_lengths" in found, "in_batch" in found) == extras


@pytest.mark.parametrize("packed", [(), PACKED], ids=["padded", "packed"])
def test_a_guide_is_part_of_the_step(cpu_devices, data, guide, monkeypatch, packed):
    monkeypatch.chdir(data)
    setup = set_up(
        "--gin_file=gin/st5_tiny_mean.gin", "--medi_file=medi.jsonl", "--batch_size=8",
        "--max_length=24", "--gin.LossConfig.guide='guide'", *packed,
    )  # fmt: skip
    found = shapes_of(setup.batch())
    assert found == shapes_in_training(setup)
    assert found["negative_guide"] == ((8, 1, 12), np.float32)
    setup.lower()  # Which refuses a batch without a guide's vectors.


def test_a_task_of_the_registry_says_what_it_adds(cpu_devices, monkeypatch):
    task = types.SimpleNamespace(
        output_features={"inputs": None, "inputs_instruction_length": None},
        source=types.SimpleNamespace(in_batch_negatives=False),
    )
    monkeypatch.setattr(
        datasets.DatasetConfig,
        "tasks",
        lambda cfg: {"own": [(task, 1.0)]}[cfg.mixture_or_task_name],
    )
    setup = set_up("--gin_file=gin/st5_tiny_mean.gin", "--gin.TASK='own'")
    assert setup.extras == compile_tasks.Extras(True, True)


def test_a_task_of_another_package_is_taken_for_plain_and_said(
    cpu_devices, data, monkeypatch, caplog
):
    monkeypatch.setattr(logging.getLogger("sentence_t5"), "propagate", True)
    (data / "own.py").write_text("def task():\n    raise AssertionError\n")
    text = "from __gin__ import dynamic_registration\nimport own\nTASK = @own.task()\n"
    (data / "own.gin").write_text(text)
    monkeypatch.syspath_prepend(data)
    monkeypatch.chdir(data)
    setup = set_up("--gin_file=gin/st5_tiny_mean.gin", "--gin_file=own.gin")
    assert setup.extras == compile_tasks.NO_EXTRAS
    assert "@own.task() have instructions" in caplog.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--packed_length=64"], "packed_rows is open"),
        (
            ["--gin.LossConfig.guide='/nowhere'"],
            "LossConfig.guide is /nowhere, and the",
        ),
        (["--gin.engine.trainer.microbatch_size=24"], "microbatch_size is 24"),
        (
            ["--packed_length=64", "--gin.train/engine.dataset.packed_rows=6"],
            "packed_rows is 6: 4 devices take them in 1 chunks",
        ),
    ],
)
def test_what_tracing_would_refuse_is_a_message(cpu_devices, capsys, flags, message):
    argv = ["--gin_file=gin/st5_tiny_mean.gin", "--topology=v5e:2x2", *flags]
    assert compile.main([*argv, "--batch_size=64"]) == 2
    assert message in capsys.readouterr().err


def test_a_batch_that_the_mesh_cannot_share_is_refused(cpu_devices):
    with pytest.raises(ValueError, match="can't be split over 4 devices"):
        set_up("--gin_file=gin/st5_tiny_mean.gin", "--batch_size=6")


def test_advice_names_flags_that_exist(cpu_devices):
    setup = set_up("--gin_file=gin/st5_tiny_mean.gin", "--batch_size=64")
    report = compile_report.describe(setup) | {"fits": False}
    flags = [
        word
        for line in compile_report.advice(setup, report)
        for word in line.replace('"', "").split()
        if word.startswith("--gin.")
    ]
    assert len(flags) == 5
    changed = set_up("--gin_file=gin/st5_tiny_mean.gin", "--batch_size=64", *flags)
    assert changed.trainer.microbatch_size == 32
    assert changed.trainer.model.encoder.t5.remat == "full"
    assert changed.trainer.partitioner.mesh.shape["fsdp"] == 4


def test_a_refusal_is_read():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
        "memory space hbm. Used 38.00G of 15.75G hbm. Exceeded hbm capacity by 22.25G."
        "\n\nLargest program allocations in hbm:\n\n  1. Size: 12.00G\n     Operator: "
        'op_name="jit(_train_step)/while/body/dot_general"\n     Shape: '
        "bf16[24,2048,64,2048]{3,2,1,0:T(8,128)(2,1)}\n     Unpadded size: 12.00G\n"
    )
    report = compile_report.refusal(message)
    assert not report["fits"]
    assert report["memory_bytes"]["chip"] == int(15.75 * 2**30)
    assert report["largest_buffers"] == [
        {
            "bytes": 12 * 2**30,
            "shape": "bf16[24,2048,64,2048]",
            "count": 1,
            "source": "jit(_train_step)/while/body/dot_general",
        }
    ]


def test_slices_lie_along_data():
    with pytest.raises(ValueError, match="data=1 can't lie across num_slices=2"):
        partitioning.MeshConfig(data=1, fsdp=-1, num_slices=2).sizes(8)
    config = partitioning.MeshConfig(data=2, fsdp=-1, num_slices=2)
    assert config.sizes(8) == (2, 4, 1)
    partitioner = partitioning.Partitioner(config, jax.devices())
    with pytest.raises(ValueError, match=r"on 1 slice\(s\), .* is 2: set it to 1"):
        _ = partitioner.mesh


needs_compiler = pytest.mark.skipif(
    not tpu_topologies.has_compiler(),
    reason="libtpu isn't installed: pip install 'sentence-t5[tpu]'",
)


@needs_compiler
def test_two_slices_lie_along_data():
    topology = tpu_topologies.parse("v5e:2x2", num_slices=2)
    config = partitioning.MeshConfig(data=2, fsdp=-1, num_slices=2)
    devices = tpu_topologies.devices(topology)
    mesh = partitioning.Partitioner(config, devices).mesh
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "model": 1}
    for row in mesh.devices:
        assert len({device.slice_index for device in row.flat}) == 1
    assert len({device.slice_index for device in mesh.devices.flat}) == 2


@needs_compiler
def test_tiny_compiles_for_four_chips(tmp_path, capfd):
    path, hlo = tmp_path / "report.json", tmp_path / "program.txt"
    # Not 64 pairs: their embeddings would be as large as the projection, D being 64.
    code = compile.main(
        ["--gin_file=gin/st5_tiny_mean.gin", "--topology=v5e:2x2", "--batch_size=128",
         "--num_negatives=0", f"--json={path}", f"--hlo={hlo}"]
    )  # fmt: skip
    assert code == 0
    assert "FITS" in capfd.readouterr().out
    report = json.loads(path.read_text())
    assert report["fits"] and 0 < report["memory_bytes"]["peak"] < 2**30
    assert report["parameters"] == 238_016
    rows = report["collective_bytes"]
    gradients = sum(row["gradients"] for row in rows.values())
    # Every weight's gradient is reduced once, in 4 bytes or fewer; an array of the loss
    # may be as large as the smallest matrix and count for it.
    assert 2 * 200_000 < gradients <= 1.05 * 4 * 238_016
    # Each tower's embeddings are gathered once at most, in float32, and nothing else of
    # that size.
    assert rows["all-gather"]["other"] < 2.1 * 128 * 768 * 4
    assert report["roofline"]["step_seconds_at_least"] > 0
    assert compiled_programs.Program(hlo.read_text()).collectives()
    assert math.isfinite(report["roofline"]["per_second_at_most"])


@needs_compiler
def test_packed_texts_stay_on_their_chips(tmp_path):
    path = tmp_path / "report.json"
    code = compile.main(
        ["--gin_file=gin/st5_tiny_mean.gin", "--topology=v5e:2x2", "--batch_size=128",
         "--num_negatives=0", "--packed_length=64", f"--json={path}",
         "--gin.train/engine.dataset.packed_rows=64"]
    )  # fmt: skip
    assert code == 0
    rows = json.loads(path.read_text())["collective_bytes"]
    # The loss gathers towers of embeddings; hidden states, [64 64 64], are 1 MB more.
    assert rows["all-gather"]["other"] < 3.1 * 128 * 768 * 4
