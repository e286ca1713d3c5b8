"""``sentence-t5 compile``: the very step of a gin file, compiled for a TPU slice.

    gin file ─► shapes and shardings ─► TPU compiler ─► FITS or DOES NOT FIT, and why

No TPU is needed, no data and no vocabulary: libtpu compiles on any Linux host, and a
step depends on shapes alone. What the compiler says of memory and of communication is
exact; the times are a roofline of published peaks, which real runs don't reach.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from sentence_t5 import (
    compile_report,
    compile_setup,
    compiled_programs,
    gin_files,
    gin_flags,
    tpu_topologies,
)

_USAGE_ERROR = 2
_DOES_NOT_FIT = 1


def compile_step(setup: compile_setup.Setup) -> tuple[dict[str, Any], str]:
    """Compiles a step and describes the result.

    Args:
        setup: from ``compile_setup.set_up``.

    Returns:
        A JSON-able report, which ``compile_report`` prints and whose ``fits`` is the
        compiler's verdict; and the compiled program's text, "" where the compiler
        refused.
    """
    report = compile_report.describe(setup)
    report["versions"] = {
        "jax": jax.__version__,
        "libtpu": tpu_topologies.compiler_version(),
    }
    began = time.perf_counter()
    lowered = setup.lower()
    report["seconds"] = {"lower": round(time.perf_counter() - began, 1)}
    began, cpu = time.perf_counter(), time.process_time()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        compiled = None
        report |= compile_report.refusal(str(error))
    report["seconds"]["compile"] = round(time.perf_counter() - began, 1)
    report["seconds"]["compile_cpu"] = round(time.process_time() - cpu, 1)
    text = ""
    if compiled is not None:
        text = compiled.as_text()
        program = compiled_programs.Program(text)
        memory = compiled.memory_analysis()
        report |= compile_report.success(setup, program, memory)
    report["advice"] = compile_report.advice(setup, report)
    return report, text


def make_parser() -> argparse.ArgumentParser:
    """Makes the verb's parser."""
    parser = argparse.ArgumentParser(
        prog="sentence-t5 compile",
        description="Compiles a gin file's step for a TPU slice, without a TPU: does "
        "it fit, what does it move between chips, how fast can it be at best?",
        epilog="Also --gin.NAME=VALUE for any macro or parameter. See docs/gin.md. "
        "Exit code 1: it does not fit.",
        allow_abbrev=False,
    )
    gin_flags.add_flags(parser)
    parser.add_argument(
        "--topology", required=True, metavar="NAME",
        help="chips along each axis of a slice: v5e:8x8, v6e:4x4, v4:4x4x4, v5p:4x4x4",
    )  # fmt: skip
    parser.add_argument(
        "--num_slices", type=int, default=1,
        help="slices of that kind; the gin file's MeshConfig.num_slices must agree",
    )  # fmt: skip
    parser.add_argument(
        "--step", choices=compile_setup.STEPS, default="train", help="what to compile"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report here, too")
    parser.add_argument(
        "--hlo", metavar="FILE", help="write the compiled program's text here"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles as a command line says.

    Returns:
        0 if the step fits, 1 if it doesn't, 2 for a mistake in files or flags.
    """
    # TensorFlow comes with the tasks' modules and does nothing here: keep it quiet.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # The slice's devices come from libtpu; anything else runs on this host's CPU.
    jax.config.update("jax_platforms", "cpu")
    argv = sys.argv[1:] if argv is None else argv
    try:
        flags = gin_flags.parse_flags(argv, make_parser())
        config = gin_files.load(flags)
        if flags.explain is not None:
            print(config.explain(flags.explain))
            return 0
        topology = tpu_topologies.parse(flags.topology, flags.num_slices)
        setup = compile_setup.set_up(config, topology, flags.step)
        setup.check()
    except (ValueError, RuntimeError) as error:
        print(f"sentence-t5 compile: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    report, hlo = compile_step(setup)
    report = {"gin_files": flags.gin_file} | report
    if flags.json:
        _write(flags.json, json.dumps(report, indent=1) + "\n")
    if flags.hlo:
        _write(flags.hlo, hlo)
    print(compile_report.text(report))
    return 0 if report["fits"] else _DOES_NOT_FIT


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
