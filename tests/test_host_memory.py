"""Freed memory stays in the process: a second use of it costs no page faults."""

import json
import subprocess
import sys

import pytest

from sentence_t5 import host_memory

MEGABYTE = 1 << 20
# A thread of XLA's does what this thread does: large blocks, taken and given back. The
# largest isn't touched: whether the heap shrinks is seen from where it ends.
SCRIPT = f"""
import ctypes, json, resource, sys, threading
from sentence_t5 import host_memory
kept = sys.argv[1] == "keep" and host_memory.keep_freed_memory()
faults, given_back = [], []
def work():
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in (40, 3, 70):
            block = bytearray(size * {MEGABYTE})
            del block
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(2200 * {MEGABYTE}))
    end = libc.sbrk(0)
    libc.free(ctypes.c_void_p(block))
    given_back.append(end - libc.sbrk(0))
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(json.dumps([kept, faults, *given_back]))
"""


def run(mode: str) -> tuple[bool, list[int], int]:
    """Returns whether memory is kept, page faults of each pass, bytes given back."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode],
        env={"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_the_second_use_of_freed_memory_faults_no_page():
    kept, counts, given_back = run("keep")
    assert kept
    assert sum(counts[1:]) < 100
    assert given_back == 0
    _, usual, _ = run("as usual")
    assert sum(usual[1:]) > 10_000  # Three times 113 MB, in pages of 4 kB: 86,784.


def test_an_accelerators_host_is_left_alone(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert not host_memory.keep_freed_memory()
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(host_memory.glob, "glob", lambda pattern: [pattern])
    assert not host_memory.keep_freed_memory()
