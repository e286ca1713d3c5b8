"""Checks between hosts, in one process and in two that share this machine."""

import pathlib
import socket
import subprocess
import sys

import pytest

from sentence_t5 import preflight

# Each process has a folder of its own beside the one they share, as hosts do.
WORKER = """
import pathlib, sys
import jax
address, process_id, folder = sys.argv[1:]
process_id, folder = int(process_id), pathlib.Path(folder)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=process_id)
from sentence_t5 import preflight
preflight._PATIENCE_SECONDS = 1.0

def outcome(check):
    try:
        check()
    except Exception as error:
        print(f"> {type(error).__name__}: {error}")
    else:
        print("> passed")

def load():
    with preflight.together("loading the data"):
        if process_id == 1:
            raise FileNotFoundError("pairs.tsv is not there.")

outcome(lambda: preflight.check_shared(folder / "shared"))
outcome(lambda: preflight.check_shared(folder / f"own{process_id}"))
outcome(load)
outcome(lambda: preflight.check_same("seed", "7"))
outcome(lambda: preflight.check_same("data", "x" * 5000 + str(process_id)))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Returns what each of two processes printed, line by line."""
    folder = tmp_path_factory.mktemp("hosts")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(i), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    printed = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed[0][1]
    # Gloo prints lines of its own.
    lines = [
        [line[2:] for line in out.splitlines() if line.startswith("> ")]
        for out, _ in printed
    ]
    assert not list(folder.glob("**/.shared*"))
    return list(zip(*lines, strict=True))


def test_a_shared_folder_passes(outcomes):
    assert outcomes[0] == ("passed", "passed")


def test_a_folder_of_each_hosts_own_is_refused_on_all(outcomes):
    # Each host names the folder it was given.
    for i, message in enumerate(outcomes[1]):
        assert message.startswith("ValueError: model_dir ")
        assert f"own{i} is not one folder for all hosts" in message
        assert f"{socket.gethostname()} (1 of 2 hosts) don't see" in message
        assert "gs://" in message


def test_an_error_on_one_host_ends_all_with_its_message(outcomes):
    other, failing = outcomes[2]
    assert failing == "FileNotFoundError: pairs.tsv is not there."
    assert other.startswith(
        "OtherHostError: 1 of 2 hosts failed at loading the data, this one did not: "
        "host 1 ("
    )
    assert other.endswith("FileNotFoundError: pairs.tsv is not there.)")


def test_hosts_compare_texts(outcomes):
    assert outcomes[3] == ("passed", "passed")
    for message in outcomes[4]:
        assert message.startswith("ValueError: The hosts do not have the same data:")
        assert len(message) < 700


def test_one_process_checks_nothing(tmp_path: pathlib.Path):
    preflight.check_shared(tmp_path / "none")
    preflight.check_same("config", "anything")
    assert not (tmp_path / "none").exists()
    with pytest.raises(OSError, match="no disk"), preflight.together("reading"):
        raise OSError("no disk")
