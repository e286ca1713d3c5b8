"""``sentence-t5 average``: one model out of several checkpoints of a run.

    sentence-t5 average runs/mean --model_dir=runs/averaged --steps 800 900 1000

Each parameter is the mean of the checkpoints' own, taken in float64 and rounded once.
Parameters are read, averaged and written one after the other, so that no whole model is
held. The folder is one that ``encode``, ``evaluate``, ``export`` and ``import`` take,
and that training can start from (``--initial_checkpoint_path``).
"""

import argparse
import os
import sys
from collections.abc import Sequence

import numpy as np

from sentence_t5 import checkpoint_files, descriptions
from sentence_t5.pretrained import orbax_files, tensors, writing


def average(
    path: str | os.PathLike,
    model_dir: str | os.PathLike,
    steps: Sequence[int] | None = None,
) -> list[int]:
    """Writes a model_dir whose one checkpoint is the mean of several.

    Args:
        path: the run's model_dir, whichever engine trained there.
        model_dir: folder to write; it must hold no checkpoints.
        steps: which checkpoints; all but step 0 by default.

    Returns:
        The steps averaged, ascending. The new checkpoint has the last one's number.

    Raises:
        FileExistsError: ``model_dir`` holds checkpoints.
        FileNotFoundError: the run has no such step.
        ValueError: fewer than two steps, or one that is broken.
    """
    root = checkpoint_files.absolute(model_dir) / checkpoint_files.CHECKPOINTS_DIR
    if checkpoint_files.list_steps(root):
        raise FileExistsError(f"{model_dir} holds checkpoints. Name another folder.")
    description = descriptions.read_description(path)
    run = description.model_dir
    if steps is None:
        steps = [step for step in checkpoint_files.whole_steps(run) if step > 0]
    steps = sorted(set(steps))
    if len(steps) < 2:
        raise ValueError(
            f"steps: got {steps or 'none'} of {run}, expected two or more. Name them; "
            f"there are {checkpoint_files.whole_steps(run)}."
        )
    folders = [checkpoint_files.find_params(run, step)[0] for step in steps]
    opened = [orbax_files.open_tensors(folder) for folder in folders]
    parts = {name: _mean(name, [parts[name] for parts in opened]) for name in opened[0]}
    descriptions.write_description(
        model_dir,
        description.encoder,
        description.tokenizer,
        description.max_length,
        prompts=description.prompts,
        default_prompt=description.default_prompt,
    )
    meta = {"step": steps[-1], "averaged": {"path": str(run), "steps": steps}}
    writing.write_step(model_dir, steps[-1], parts, meta)
    return steps


def _mean(name: str, parts: Sequence[tensors.Tensor]) -> tensors.Tensor:
    """Returns the mean of a parameter's arrays, taken when it is read; float32."""

    def read(index):
        total = np.zeros((), np.float64)
        for part in parts:
            total = total + part.read(index)
        if not np.isfinite(total).all():
            raise ValueError(
                f"{name} has NaN or infinity in one of these checkpoints, expected "
                "numbers: its files are damaged. Leave that step out with --steps."
            )
        return (total / len(parts)).astype(np.float32)

    return tensors.Tensor(parts[0].shape, np.float32, read)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; the process's by default.

    Returns:
        The exit code: 0, or 1 for a user's mistake.
    """
    args = _parse(argv)
    try:
        steps = average(args.run, args.model_dir, args.steps)
    except (OSError, ValueError) as error:
        print(f"average: {error}", file=sys.stderr)
        return 1
    print(f"{args.model_dir}: the mean of steps {', '.join(map(str, steps))}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sentence-t5 average",
        description="Average the weights of several checkpoints of a run.",
    )
    parser.add_argument("run", help="model_dir of the run")
    parser.add_argument("--model_dir", required=True, help="folder to write")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        help="checkpoints; all that the run kept, but step 0, by default",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
