"""Gives every test eight CPU devices, before anything imports JAX."""

import os
import sys

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set it up.")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    flag
    for flag in (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
    )
    if flag
)
# TensorFlow serves the data pipelines only: keep its start-up quiet.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
