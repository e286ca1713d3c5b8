"""TPU slices by name: their chips' published figures, and devices to compile for.

    v5e:8x8  =  generation : chips along each axis of the slice

libtpu, Google's TPU compiler, runs on any Linux host; it needs no TPU to compile for
one. Figures are those of one chip. They are peaks: no program reaches all of them.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from sentence_t5 import options as options_lib

_DOCS = "https://cloud.google.com/tpu/docs"


@dataclasses.dataclass(frozen=True)
class Chip:
    """The figures of one chip.

    Attributes:
        name: as in a topology's name.
        memory_bytes: of high-bandwidth memory (HBM).
        flops: bfloat16 operations a second.
        memory_bandwidth: of HBM, bytes a second.
        ici_bandwidth: to the chips of its slice, bytes a second over all links, one
            direction (the documents give both directions together).
        dcn_bandwidth: to other slices, bytes a second; None where it isn't published.
        num_axes: dimensions of the network.
        source: where the figures are from.
        options: what libtpu must be told beside the name.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    ici_bandwidth: float
    dcn_bandwidth: float | None
    num_axes: int
    source: str
    options: dict[str, str] = dataclasses.field(default_factory=dict)


_GIB = 2**30
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v4", 32 * _GIB, 275e12, 1.2e12, 300e9, None, 3,
            f"{_DOCS}/v4 (compute, HBM); Jouppi et al. 2023, arXiv 2304.01433, table 4 "
            "(6 links of 50 GB/s)",
            # One device a chip; otherwise its two cores count as two.
            {"chip_config_name": "megacore"},
        ),
        Chip(
            "v5e", 16 * _GIB, 197e12, 819e9, 200e9, 6.4e12 / 8 / 256, 2,
            f"{_DOCS}/v5e (ICI 400 GB/s both ways; DCN 6.4 Tb/s per 256 chips)",
        ),
        Chip(
            "v5p", 95 * _GIB, 459e12, 2765e9, 600e9, 50e9 / 8, 3,
            f"{_DOCS}/v5p (ICI 1200 GB/s both ways; DCN 50 Gb/s a chip)",
        ),
        Chip(
            "v6e", 32 * _GIB, 918e12, 1638e9, 400e9, None, 2,
            f"{_DOCS}/v6e (ICI 800 GB/s both ways)",
        ),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Topology:
    """One slice, or several of a kind.

    Attributes:
        chip: what it is made of.
        shape: chips along each axis of a slice.
        num_slices: slices, joined by the data-centre network.
    """

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1

    def __str__(self) -> str:
        name = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        return name if self.num_slices == 1 else f"{self.num_slices} x {name}"

    @property
    def chips_per_slice(self) -> int:
        """Chips of one slice."""
        return math.prod(self.shape)

    @property
    def num_chips(self) -> int:
        """Chips of all slices."""
        return self.num_slices * self.chips_per_slice


def parse(name: str, num_slices: int = 1) -> Topology:
    """Reads a name such as ``v5e:8x8``.

    Raises:
        ValueError: an unknown generation, or a shape it can't have.
    """
    match = re.fullmatch(r"(v\w+):(\d+(?:x\d+)*)", name)
    if match is None or match[1] not in CHIPS:
        raise ValueError(
            f"Topology {name!r} is unknown: write a generation of {', '.join(CHIPS)} "
            "and the chips along each axis, such as v5e:8x8 or v5p:4x4x4."
        )
    chip = CHIPS[match[1]]
    shape = tuple(int(size) for size in match[2].split("x"))
    if len(shape) != chip.num_axes or min(shape) < 1:
        example = "x".join("4" * chip.num_axes)
        raise ValueError(
            f"Topology {name!r}: a slice of {chip.name} has {chip.num_axes} axes, such "
            f"as {chip.name}:{example}."
        )
    options_lib.check_positive("num_slices", num_slices)
    return Topology(chip, shape, num_slices)


def devices(topology: Topology) -> Sequence[jax.Device]:
    """Returns devices to lower and compile for; nothing can run on them.

    Raises:
        RuntimeError: libtpu isn't installed.
        ValueError: there is no such slice.
    """
    # Without a TPU, libtpu would wait for a cloud's metadata server.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # And it would let one process at a time use a TPU that isn't there.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # It warns of the TPU that it doesn't find.
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    options: dict[str, object] = dict(topology.chip.options)
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    shape = "x".join(map(str, topology.shape))
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{topology.chip.name}:{shape}", **options
        )
    except Exception as error:
        if not has_compiler():
            raise RuntimeError(
                "Compiling for TPUs needs libtpu, Google's compiler, which runs "
                "without a TPU too: pip install 'sentence-t5[tpu]'."
            ) from error
        raise ValueError(f"libtpu knows no slice {topology}: {error}") from error
    return described.devices


def has_compiler() -> bool:
    """Says whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def compiler_version() -> str:
    """Returns libtpu's version."""
    return importlib.metadata.version("libtpu")
