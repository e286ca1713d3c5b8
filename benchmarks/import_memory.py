"""Measures the host memory that reading a T5-large checkpoint takes.

    python benchmarks/import_memory.py [--size=large] [--dtype=float32] [--folder=/tmp]

Writes random weights in Hugging Face's layout, then reads them in a process each: into
numpy, into one device, into the shards of eight devices, and through the import
command. Prints one JSON line per way; ``ratio`` is the peak of the resident memory,
Python and JAX included, over the parameters' size in float32.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

SIZES = {
    "small": (512, 8, 64, 2048, 6),
    "base": (768, 12, 64, 3072, 12),
    "large": (1024, 16, 64, 4096, 24),
}
# Encoder and decoder: the whole checkpoint is used.
POOLING = "decoder_first"
WAYS = ("imports only", "numpy", "one device", "eight devices", "import command")


def write_checkpoint(folder: pathlib.Path, size: str, dtype: str) -> int:
    """Writes the folder; returns the number of parameters."""
    import numpy as np

    from sentence_t5 import encoder
    from sentence_t5.export import st_folder
    from sentence_t5.pretrained import loading, name_tables, safetensors_io, tensors
    from sentence_t5.t5 import config as t5_config

    d_model, num_heads, head_dim, d_ff, num_layers = SIZES[size]
    t5 = t5_config.T5Config(
        d_model=d_model,
        num_heads=num_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        num_layers=num_layers,
        num_decoder_layers=num_layers,
        scan_layers=False,
    )
    config = encoder.EncoderConfig(t5, POOLING, projection_dim=None)

    def random(shape):
        def read(index):
            rng = np.random.default_rng(0)
            return rng.standard_normal(shape, np.float32).astype(dtype)[index]

        return tensors.Tensor(shape, np.dtype(dtype), read)

    held = {}

    def collect(tree, prefix=""):
        for name, leaf in tree.items():
            if isinstance(leaf, dict):
                collect(leaf, f"{prefix}{name}/")
            else:
                held[prefix + name] = random(leaf.shape)

    collect(loading.abstract_params(config))
    weights = {}
    for name, tensor in held.items():
        theirs, transposed = name_tables.HUGGINGFACE.to_theirs(name)
        weights[theirs] = tensor.T if transposed else tensor
    folder.mkdir(parents=True, exist_ok=True)
    safetensors_io.write_file(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps(st_folder.transformer_config(t5)))
    return config.num_params()


def read_checkpoint(folder: pathlib.Path, way: str) -> None:
    """Reads the folder in one way; runs in a process of its own."""
    import jax
    import numpy as np

    from sentence_t5 import import_weights, pretrained

    if way == "imports only":
        jax.numpy.zeros(1).block_until_ready()
    elif way == "numpy":
        pretrained.load_encoder(folder, pooling=POOLING).read_params()
    elif way == "import command":
        shipped = pathlib.Path(__file__).parent.parent / "tasks/data/synthetic.model"
        with tempfile.TemporaryDirectory(dir=folder) as model_dir:
            import_weights.import_weights(
                folder, model_dir, vocabulary=shipped, pooling=POOLING
            )
    else:
        devices = np.array(jax.devices())
        mesh = jax.sharding.Mesh(devices, ("fsdp",))
        config = pretrained.open_checkpoint(folder).config
        config = dataclasses.replace(config, pooling=POOLING)

        def place(leaf):
            axes = [None] * len(leaf.shape)
            if len(leaf.shape) > 1:
                axes[-1] = "fsdp"
            spec = jax.sharding.PartitionSpec(*axes)
            sharding = jax.sharding.NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        shapes = jax.tree.map(place, pretrained.abstract_params(config))
        params, _ = pretrained.restore(folder, shapes, config)
        jax.block_until_ready(params)


def measure(folder: pathlib.Path, way: str) -> tuple[int, float]:
    """Returns the peak resident bytes and the seconds of one way."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    if way == "eight devices":
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, f"--folder={folder}", f"--read={way}"],
        env=environment,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"reading by {way!r} failed")
    return usage.ru_maxrss * 1024, time.perf_counter() - began


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--read", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read_checkpoint(args.folder, args.read)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        folder = pathlib.Path(folder)
        num_params = write_checkpoint(folder, args.size, args.dtype)
        size = num_params * 4
        for way in WAYS:
            peak, seconds = measure(folder, way)
            line = {
                "benchmark": "import_memory",
                "machine": platform.node(),
                "size": args.size,
                "stored": args.dtype,
                "way": way,
                "float32_mb": round(size / 1e6),
                "peak_mb": round(peak / 1e6),
                "ratio": round(peak / size, 3),
                "seconds": round(seconds, 1),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
