"""Gives every test eight CPU devices, before anything imports JAX."""

import os
import sys

import pytest

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set it up.")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    flag
    for flag in (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Compiling is most of the suite's time: a train step in 2 s instead of 14 s.
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
    )
    if flag
)
# TensorFlow serves the data pipelines only: keep its start-up quiet.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(scope="module")
def quick_compilation():
    """Leaves out the compiler's optimizations, where a program runs once or twice."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
