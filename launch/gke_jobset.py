r"""Fills in gke_jobset.yaml for a slice and a command, and prints it for kubectl.

    python launch/gke_jobset.py --name=st5 --image=IMAGE --topology=v5e:8x8 -- \
        --gin_file=gin/st5_xxl_mean.gin --model_dir=gs://bucket/st5 | kubectl apply -f -

Nothing is sent anywhere; what is printed is what would be applied.
"""

import argparse
import math
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import yaml

TEMPLATE = pathlib.Path(__file__).parent / "gke_jobset.yaml"
CHIPS_PER_HOST = 4
# Chip -> GKE's name for its slices, and the number of dimensions of their shape.
ACCELERATORS = {
    "v4": ("tpu-v4-podslice", 3),
    "v5e": ("tpu-v5-lite-podslice", 2),
    "v5p": ("tpu-v5p-slice", 3),
    "v6e": ("tpu-v6e-slice", 2),
}
# The pods' names, NAME-slice-0-0-xxxxx, must fit a label of 63 characters.
_MAX_NAME = 40
_USAGE_ERROR = 2


def hosts_of(topology: str) -> int:
    """Returns how many hosts a slice has.

    Args:
        topology: chip and shape, such as ``v5e:4x4``, as the compile command takes it.

    Raises:
        ValueError: no such chip, or a shape that its slices don't have.
    """
    chip, _, shape = topology.partition(":")
    if chip not in ACCELERATORS or not re.fullmatch(r"\d+(x\d+)+", shape):
        raise ValueError(
            f"--topology={topology}: expected CHIP:SHAPE, such as v5e:4x4 or "
            f"v5p:4x4x4, with a chip of {', '.join(ACCELERATORS)}."
        )
    sizes = [int(size) for size in shape.split("x")]
    dimensions = ACCELERATORS[chip][1]
    if len(sizes) != dimensions or math.prod(sizes) % CHIPS_PER_HOST:
        raise ValueError(
            f"--topology={topology}: a slice of {chip} has {dimensions} dimensions and "
            f"a multiple of {CHIPS_PER_HOST} chips."
        )
    return math.prod(sizes) // CHIPS_PER_HOST


def render(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the manifest for the flags of ``parse``.

    Raises:
        ValueError: a name, a shape or the model's folder can't be.
    """
    if len(flags.name) > _MAX_NAME or not re.fullmatch(
        r"[a-z]([a-z0-9-]*[a-z0-9])?", flags.name
    ):
        raise ValueError(
            f"--name={flags.name}: expected at most {_MAX_NAME} of a-z, 0-9 and -, "
            "with a letter in front."
        )
    hosts = hosts_of(flags.topology)
    if flags.num_slices < 1 or (flags.num_slices > 1 and hosts == 1):
        raise ValueError(
            f"--num_slices={flags.num_slices}: expected 1 or more, and 1 for slices of "
            "a single host, which GKE does not connect."
        )
    _check_model_dir(flags.arguments)
    manifest = yaml.safe_load(TEMPLATE.read_text())
    manifest["metadata"]["name"] = flags.name
    manifest["spec"]["failurePolicy"]["maxRestarts"] = flags.max_restarts
    (slices,) = manifest["spec"]["replicatedJobs"]
    slices["replicas"] = flags.num_slices
    job = slices["template"]["spec"]
    job["parallelism"] = job["completions"] = hosts
    pod = job["template"]["spec"]
    chip, _, shape = flags.topology.partition(":")
    pod["nodeSelector"] = {
        "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[chip][0],
        "cloud.google.com/gke-tpu-topology": shape,
    }
    if flags.spot:
        pod["nodeSelector"]["cloud.google.com/gke-spot"] = "true"
    if flags.service_account:
        pod["serviceAccountName"] = flags.service_account
    (container,) = pod["containers"]
    container["image"] = flags.image
    several = ["--distributed"] if hosts * flags.num_slices > 1 else []
    container["args"] = [*several, *flags.arguments]
    return manifest


def _check_model_dir(arguments: Sequence[str]) -> None:
    given = [word for word in arguments if word.split("=")[0] == "--model_dir"]
    if not given or not given[-1].startswith("--model_dir=gs://"):
        raise ValueError(
            f"Expected --model_dir=gs://... after --, got {' '.join(given) or 'none'}: "
            "a pod's own disk is not seen by the others, and is gone when it ends."
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; ``arguments`` is what comes after ``--``."""
    own, arguments = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, arguments = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="launch/gke_jobset.py",
        description="Prints a JobSet that trains on TPU slices of GKE.",
        epilog="After --: the flags of `python -m sentence_t5.train`.",
        allow_abbrev=False,
    )
    parser.add_argument("--name", required=True, help="of the JobSet")
    parser.add_argument("--image", required=True, help="see launch/Dockerfile")
    parser.add_argument("--topology", required=True, help="of a slice, as in v5e:4x4")
    parser.add_argument("--num_slices", type=int, default=1, help="1 by default")
    parser.add_argument(
        "--max_restarts", type=int, default=20, help="of the whole set; 20 by default"
    )
    parser.add_argument(
        "--service_account", help="of Kubernetes, that may use the bucket"
    )
    parser.add_argument("--spot", action="store_true", help="on spot nodes")
    flags = parser.parse_args(own)
    flags.arguments = arguments
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the manifest.

    Args:
        argv: the arguments; the process's by default.

    Returns:
        0, or 2 for a mistake in the arguments, which is printed.
    """
    flags = parse(sys.argv[1:] if argv is None else argv)
    try:
        manifest = render(flags)
    except ValueError as error:
        print(f"launch/gke_jobset.py: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    print(yaml.safe_dump(manifest, sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
