"""How the process's own allocator treats the memory of a step, on a CPU.

XLA's CPU runtime allocates a program's temporaries anew at every run. glibc gives a
large block back to the kernel when it is freed, and the kernel zeroes it page by page
when it is asked for again: for a small model a quarter of the step's CPU time (a tiny
model with the 32,128-word table: 240 -> 320 pairs/s without).
"""

import ctypes
import glob
import os

# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_NEVER = -1
_GROWTH_BYTES = 256 << 20
_ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")


def keep_freed_memory() -> bool:
    """Keeps freed memory in the process, where steps run on the CPU.

    To be called before the first thread starts: a thread's arena stays as it was made,
    and only the main arena can hold blocks of any size without mapping each.

    Returns:
        Whether it was done. Not with an accelerator, whose host has many threads and
        no temporaries, nor where the C library isn't glibc.
    """
    if not _runs_on_cpu():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {
        _ARENA_MAX: 1,
        _MMAP_MAX: 0,
        _TRIM_THRESHOLD: _NEVER,
        _TOP_PAD: _GROWTH_BYTES,
    }
    return all(mallopt(name, value) for name, value in settings.items())


def _runs_on_cpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms == "cpu"
    return not any(glob.glob(pattern) for pattern in _ACCELERATORS)
