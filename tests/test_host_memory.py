"""Freed memory stays in the process: a second use of it costs no page faults."""

import json
import subprocess
import sys

import pytest

from sentence_t5 import host_memory

MEGABYTE = 1 << 20
# A thread of XLA's does what this thread does: large blocks, taken and given back.
SCRIPT = f"""
import json, resource, sys, threading
from sentence_t5 import host_memory
kept = sys.argv[1] == "keep" and host_memory.keep_freed_memory()
faults = []
def work():
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in (40, 3, 70):
            block = bytearray(size * {MEGABYTE})
            del block
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(json.dumps([kept, faults]))
"""


def faults(mode: str, platform: str = "cpu") -> tuple[bool, list[int]]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode],
        env={"JAX_PLATFORMS": platform},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, counts = json.loads(result.stdout)
    return kept, counts


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_the_second_use_of_freed_memory_faults_no_page():
    kept, counts = faults("keep")
    assert kept
    assert sum(counts[1:]) < 100
    _, usual = faults("as usual")
    assert sum(usual[1:]) > 10_000  # Three times 113 MB, in pages of 4 kB: 86,784.


def test_an_accelerators_host_is_left_alone(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert not host_memory.keep_freed_memory()
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(host_memory.glob, "glob", lambda pattern: [pattern])
    assert not host_memory.keep_freed_memory()
