"""What a compiled step says about itself: numbers for JSON, and the same for people.

Bytes are those of one chip; GB are 1e9 bytes. Memory and communication are the
compiler's. Times are lower bounds from published peaks:

    compute   hardware operations / (chips · peak)
    memory    (arguments + results + every array made, written and read) / bandwidth
    network   every collective's bytes in and out of a chip, over all its links at once
"""

import math
import re
from typing import Any

import jax

from sentence_t5 import compiled_programs, names
from sentence_t5.compile_setup import Setup
from sentence_t5.compiled_programs import Collective, Program

_GB = 1e9
_REDUCING = ("all-reduce", "reduce-scatter")


def describe(setup: Setup) -> dict[str, Any]:
    """Returns what is known before compiling."""
    trainer, topology = setup.trainer, setup.topology
    state, operations = trainer.abstract_state, setup.flops()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    return {
        "step": setup.step,
        "topology": str(topology),
        "chips": topology.num_chips,
        "mesh": dict(trainer.partitioner.mesh.shape),
        "batch_size": setup.dataset.batch_size,
        "lengths": list(setup.lengths()),
        "parameters": parameters,
        "state_bytes_per_chip": {
            "parameters": _bytes_per_chip(state.params),
            "optimizer": _bytes_per_chip(state.opt_state),
            "largest_unsplit_optimizer_leaf": _largest_unsplit(state.opt_state),
        },
        "flops": {"model": operations.model, "hardware": operations.hardware},
    }


def _bytes_per_chip(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _largest_unsplit(tree: Any) -> int:
    return max(
        (
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
            if leaf.sharding.shard_shape(leaf.shape) == leaf.shape
        ),
        default=0,
    )


def success(setup: Setup, program: Program, memory: Any) -> dict[str, Any]:
    """Returns what a compiled program adds to the report.

    Args:
        setup: what was compiled.
        program: its text.
        memory: from ``compiled.memory_analysis()``.
    """
    capacity = setup.topology.chip.memory_bytes
    peak = memory.peak_memory_in_bytes
    collectives = program.collectives()
    report = {
        "fits": peak <= capacity,
        "memory_bytes": {
            "chip": capacity,
            "peak": peak,
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes,
            "results_in_place_of_arguments": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "generated_code": memory.generated_code_size_in_bytes,
        },
        "collective_bytes": _by_kind(setup, collectives),
        "largest_collectives": [
            {
                "kind": c.kind,
                "purpose": purpose(setup, c),
                "shape": c.shape,
                "bytes": c.bytes,
                "trips": c.trips,
                "group_size": c.group_size(setup.topology.num_chips),
                "crosses_slices": _crosses(setup, c),
                "source": c.source,
            }
            for c in collectives[:20]
        ],
        "largest_buffers": [
            {"bytes": b.bytes, "shape": b.shape, "count": b.count, "source": b.source}
            for b in program.buffers()
        ],
    }
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes
    report["roofline"] = _roofline(setup, collectives, arguments + program.traffic())
    return report


def purpose(setup: Setup, collective: Collective) -> str:
    """Says what a collective carries: gradients, weights, or other arrays.

    An array with as many elements as a weight matrix, or as a chip's part of one, is
    taken for it.
    """
    sizes = set()
    for leaf in jax.tree.leaves(setup.trainer.abstract_state.params):
        for shape in (leaf.shape, leaf.sharding.shard_shape(leaf.shape)):
            if len(shape) >= 2:
                sizes.add(math.prod(shape))
                sizes.add(math.prod(shape[1:]))  # One layer of a stack.
    shapes = re.findall(r"\[([\d,]*)\]", collective.shape)
    largest = max(math.prod(int(d) for d in s.split(",") if d) for s in shapes)
    of_loss = "be,ce->bc" in collective.source
    if largest not in sizes or of_loss or largest < setup.dataset.batch_size:
        return "other"
    return "gradients" if collective.kind in _REDUCING else "weights"


def _by_kind(setup: Setup, collectives: list[Collective]) -> dict[str, dict[str, int]]:
    table = {
        kind: {"gradients": 0, "weights": 0, "other": 0}
        for kind in compiled_programs.KINDS
    }
    for c in collectives:
        table[c.kind][purpose(setup, c)] += c.total_bytes
    return {kind: row for kind, row in table.items() if any(row.values())}


def _crosses(setup: Setup, collective: Collective) -> bool:
    topology = setup.topology
    return topology.num_slices > 1 and collective.crosses(topology.chips_per_slice)


def _roofline(
    setup: Setup, collectives: list[Collective], memory_bytes: float
) -> dict[str, Any]:
    topology = setup.topology
    chip, operations = topology.chip, setup.flops()
    compute = operations.hardware / (topology.num_chips * chip.flops)
    times: dict[str, float | None] = {
        "compute": compute,
        "memory": memory_bytes / chip.memory_bandwidth,
        "network": 0.0,
    }
    between_slices = 0.0
    for c in collectives:
        times["network"] += _passed(c, c.group_size(topology.num_chips))
        if _crosses(setup, c):
            between_slices += _passed_between_slices(setup, c)
    times["network"] /= chip.ici_bandwidth
    if topology.num_slices > 1:
        known = chip.dcn_bandwidth
        times["network_between_slices"] = between_slices / known if known else None
    bound = max(time for time in times.values() if time is not None)
    return {
        "seconds": times,
        "step_seconds_at_least": bound,
        "per_second_at_most": setup.dataset.batch_size / bound,
        "model_flops_utilization_at_most": operations.model
        / (bound * topology.num_chips * chip.flops),
        "assumed": {
            "flops": chip.flops,
            "memory_bandwidth": chip.memory_bandwidth,
            "ici_bandwidth": chip.ici_bandwidth,
            "dcn_bandwidth": chip.dcn_bandwidth,
            "source": chip.source,
        },
    }


def _passed(collective: Collective, size: int) -> float:
    """Returns the bytes that a chip of a group of so many passes on in a step."""
    if collective.kind == "collective-permute":  # To one other chip, whole.
        return collective.total_bytes
    passes = 2 if collective.kind == "all-reduce" else 1
    return passes * collective.total_bytes * (size - 1) / size


def _passed_between_slices(setup: Setup, collective: Collective) -> float:
    """Returns the bytes of them that go to chips of other slices."""
    slices = setup.topology.num_slices
    if collective.kind == "collective-permute":
        return collective.total_bytes
    # A chip passes on only its part of what its slice has put together.
    part = slices / collective.group_size(setup.topology.num_chips)
    return part * _passed(collective, slices)


def refusal(message: str) -> dict[str, Any]:
    """Returns what the compiler says when a step doesn't fit.

    Args:
        message: of its error.
    """
    used = re.search(r"Used ([\d.]+)([KMGT])i? of ([\d.]+)([KMGT])", message)
    memory = {}
    if used:
        memory = {"peak": _size(*used.groups()[:2]), "chip": _size(*used.groups()[2:])}
    buffers = []
    for part in re.split(r"\n\s*\d+\.\s+Size: ", message)[1:]:
        size = re.match(r"([\d.]+)([KMGT]?)", part)
        shape = re.search(r"Shape: ([a-z]+\d*\w*\[[\d,]*\])", part)
        source = re.search(r'op_name="([^"]*)"', part)
        buffers.append(
            {
                "bytes": _size(*size.groups()),
                "shape": shape[1] if shape else "",
                "count": 1,
                "source": source[1] if source else "",
            }
        )
    return {
        "fits": False,
        "memory_bytes": memory,
        "largest_buffers": buffers[:10],
        "refusal": message.splitlines()[0],
    }


def _size(number: str, unit: str) -> int:
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    return int(float(number) * 1024 ** powers[unit])


def advice(setup: Setup, report: dict[str, Any]) -> list[str]:
    """Says what to change to need less memory, the cheapest first; [] if it fits."""
    if report["fits"]:
        return []
    trainer, mesh = setup.trainer, report["mesh"]
    held = report["state_bytes_per_chip"]
    state = held["parameters"] + held["optimizer"]
    found = []
    split = mesh[names.FSDP] * mesh[names.MODEL]
    per_slice = setup.topology.chips_per_slice
    if split < per_slice:
        found.append(
            f"split the state ({state / _GB:.1f} GB a chip, gradients as much as the "
            "parameters) over more chips: --gin.partitioning.MeshConfig.data="
            f"{setup.topology.num_slices} --gin.partitioning.MeshConfig.fsdp=-1"
        )
    if setup.step == "train":
        if trainer.model.encoder.t5.remat != "full":
            found.append(
                "recompute layers in the backward pass: "
                "--gin.config.T5Config.remat=\"'full'\""
            )
        shards = trainer.partitioner.num_batch_shards
        size = trainer.microbatch_size or setup.dataset.batch_size
        half = size // 2
        if half >= shards and half % shards == 0:
            found.append(
                "encode the batch in chunks, with the same gradients: "
                f"--gin.engine.trainer.microbatch_size={half}"
            )
    if trainer.model.encoder.t5.dtype != "bfloat16":
        found.append(
            "keep activations in half the bytes: "
            "--gin.config.T5Config.dtype=\"'bfloat16'\""
        )
    found.append("use a larger slice, a smaller batch or shorter texts")
    return found


def text(report: dict[str, Any]) -> str:
    """Writes a report for people."""
    mesh = " ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    state, flops = report["state_bytes_per_chip"], report["flops"]
    texts = " + ".join(str(length) for length in report["lengths"])
    lines = [
        f"{report['step']} step on {report['topology']}: "
        f"{report['chips']} chips, {mesh}",
        f"batch        {report['batch_size']} of {texts} tokens",
        f"parameters   {report['parameters']:,} ({_gb(state['parameters'])} a chip, "
        f"optimizer {_gb(state['optimizer'])})",
        f"operations   {flops['model'] / 1e12:.1f} T for the model, "
        f"{flops['hardware'] / 1e12:.1f} T with recomputation",
        "",
        *_memory_lines(report),
    ]
    if "collective_bytes" in report:
        lines += ["", *_collective_lines(report), "", *_roofline_lines(report)]
    seconds = report["seconds"]
    lines += ["", f"traced in {seconds['lower']} s, compiled in {seconds['compile']} s"]
    return "\n".join(lines)


def _memory_lines(report: dict[str, Any]) -> list[str]:
    memory = report["memory_bytes"]
    verdict = "FITS" if report["fits"] else "DOES NOT FIT"
    lines = [verdict]
    if memory:
        lines = [f"{verdict}: {_gb(memory['peak'])} of {_gb(memory['chip'])} a chip"]
    for key in ("arguments", "temporaries", "generated_code"):
        if key in memory:
            lines.append(f"  {key.replace('_', ' '):16} {_gb(memory[key]):>9}")
    lines.append("largest arrays (they don't all live at once):")
    for buffer in report["largest_buffers"][:5]:
        lines.append(
            f"  {_gb(buffer['bytes']):>9} {buffer['shape']} {_short(buffer['source'])}"
        )
    if report["advice"]:
        lines.append("what to change, the cheapest first:")
        lines += [f"  {i}. {text}" for i, text in enumerate(report["advice"], 1)]
    return lines


def _collective_lines(report: dict[str, Any]) -> list[str]:
    lines = [
        f"between chips, MB a step {'gradients':>14} {'weights':>10} {'other':>10}"
    ]
    for kind, row in report["collective_bytes"].items():
        lines.append(
            f"  {kind:22} {row['gradients'] / 1e6:14.1f} {row['weights'] / 1e6:10.1f} "
            f"{row['other'] / 1e6:10.1f}"
        )
    return lines


def _roofline_lines(report: dict[str, Any]) -> list[str]:
    roofline = report["roofline"]
    unit = "pairs" if report["step"] == "train" else "texts"
    lines = ["at best, ms (published peaks, everything overlapped):"]
    for name, seconds in roofline["seconds"].items():
        shown = "no figure" if seconds is None else f"{seconds * 1e3:9.2f}"
        lines.append(f"  {name.replace('_', ' '):22} {shown}")
    lines.append(
        f"  so a step takes {roofline['step_seconds_at_least'] * 1e3:.2f} ms or more: "
        f"{roofline['per_second_at_most']:,.0f} {unit}/s or fewer"
    )
    lines.append(f"  peaks: {roofline['assumed']['source']}")
    return lines


def _gb(size: float) -> str:
    return f"{size / _GB:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _short(source: str) -> str:
    return source.removeprefix("jit(_train_step)/").removeprefix("jit(_encode_step)/")
