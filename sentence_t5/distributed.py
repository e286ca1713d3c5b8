"""Joining the other hosts of a run, before JAX looks at any device.

Where a cluster describes itself (Cloud TPU VMs, GKE, Slurm, Open MPI), JAX reads the
addresses from the environment; elsewhere three flags say them. A host that dies ends
the others within the heartbeat's timeout instead of leaving them waiting for it.
"""

import argparse
import logging
import os

from sentence_t5.gin_reader import ConfigError

_logger = logging.getLogger(__name__)

# Variables that count the hosts of a job, by the system that sets them.
_COUNTS = {
    "SLURM_NTASKS": "Slurm",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
}
# Variables that list the hosts of a job, or name the first of several.
_LISTS = {"TPU_WORKER_HOSTNAMES": "Cloud TPU"}
_ADDRESSES = {
    "JAX_COORDINATOR_ADDRESS": "JAX",
    "MEGASCALE_COORDINATOR_ADDRESS": "multi-slice TPU",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``initialize``; none is needed on one host."""
    group = parser.add_argument_group("several hosts")
    group.add_argument(
        "--distributed", action="store_true",
        help="join the hosts that the environment describes; on by itself under Slurm, "
        "Open MPI and GKE, needed on Cloud TPU VMs",
    )  # fmt: skip
    group.add_argument(
        "--coordinator_address", metavar="HOST:PORT", help="where process 0 listens"
    )
    group.add_argument("--num_processes", type=int, help="hosts in all")
    group.add_argument("--process_id", type=int, help="number of this host, from 0")
    group.add_argument(
        "--heartbeat_timeout_seconds", type=int, default=30,
        help="a host that is silent for so long ends the run on all",
    )  # fmt: skip


def initialize(flags: argparse.Namespace) -> None:
    """Joins the other hosts, if there are any.

    Args:
        flags: from ``add_flags``.

    Raises:
        ConfigError: the flags contradict each other, the hosts can't be reached, or
            another number of them came together than the flags say.
    """
    given = {
        name: getattr(flags, name)
        for name in ("coordinator_address", "num_processes", "process_id")
        if getattr(flags, name) is not None
    }
    if flags.heartbeat_timeout_seconds < 1:
        raise ConfigError(
            f"--heartbeat_timeout_seconds={flags.heartbeat_timeout_seconds}: expected "
            "1 or more."
        )
    source = _described_by()
    if not (given or flags.distributed or source):
        return
    if given and source is None and not flags.distributed and len(given) < 3:
        missing = sorted(
            {"coordinator_address", "num_processes", "process_id"} - set(given)
        )
        raise ConfigError(
            "Several hosts need --coordinator_address, --num_processes and "
            "--process_id where the environment doesn't say them. Missing: "
            f"{', '.join(missing)}."
        )
    import jax  # Costs half a second, which --help and mistakes needn't wait for.

    try:
        jax.distributed.initialize(
            **given, heartbeat_timeout_seconds=flags.heartbeat_timeout_seconds
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"This host could not join the others ({source or 'from flags'}): {error} "
            "Pass --coordinator_address, --num_processes and --process_id."
        ) from error
    expected = flags.num_processes
    if expected is not None and jax.process_count() != expected:
        raise ConfigError(
            f"{jax.process_count()} hosts came together, --num_processes says "
            f"{expected}: each would train alone. Check the addresses."
        )
    _logger.info(
        "Host %d of %d, %d local devices of %d.",
        jax.process_index(), jax.process_count(),
        jax.local_device_count(), jax.device_count(),
    )  # fmt: skip
    if jax.process_index() != 0:
        # Progress is the same on all; only trouble is this host's own.
        logging.getLogger("sentence_t5").setLevel(logging.WARNING)


def _described_by() -> str | None:
    """Returns the system whose variables describe several hosts, or None."""
    for variable, system in _COUNTS.items():
        if int(os.environ.get(variable, "1") or 1) > 1:
            return system
    for variable, system in _LISTS.items():
        if "," in os.environ.get(variable, ""):
            return system
    for variable, system in _ADDRESSES.items():
        if os.environ.get(variable):
            return system
    return None
