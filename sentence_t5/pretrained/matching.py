"""Which tensors of a checkpoint become which parameters; the report says so.

    source names ── ignore ──► match by name and shape ◄── allow_missing ── our names

Nothing is silent. A parameter without a tensor is an error unless a pattern allows it;
a tensor without a parameter is one unless a pattern ignores it; a pattern that matches
nothing is one, because it is misspelt. Each parameter is read on its own, and each
device reads its own part.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from sentence_t5 import encoder as encoder_lib
from sentence_t5.pretrained import name_tables, tensors
from sentence_t5.pretrained import source as source_lib
from sentence_t5.t5 import config as t5_config

PyTree = Any
_LISTED = 30
_SHAPELESS_FIELDS = ("head_dim", "relpos_max_distance", "layer_norm_epsilon")


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of every name.

    Attributes:
        path: the checkpoint.
        family: its format.
        loaded: parameter -> shape, read from the checkpoint.
        initialised: parameter -> shape, missing in the checkpoint and allowed to be.
        ignored: name in the checkpoint -> shape, left out by a pattern.
        never_needed: other things in the checkpoint that no encoder reads.
        differences: settings without weights that the checkpoint's own config gives
            other values than the model's.
    """

    path: str
    family: str
    loaded: Mapping[str, tensors.Shape]
    initialised: Mapping[str, tensors.Shape]
    ignored: Mapping[str, tensors.Shape]
    never_needed: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        def count(shapes):
            return sum(int(np.prod(shape)) for shape in shapes.values())

        lines = [f"{self.family} checkpoint {self.path}"]
        for title in ("loaded", "initialised", "ignored"):
            shapes = getattr(self, title)
            lines.append(f"  {title}: {len(shapes)} arrays, {count(shapes):,} values")
            shown = shapes if title != "loaded" else {}
            lines += [f"    {k} {_text(v)}" for k, v in sorted(shown.items())]
        if self.never_needed:
            lines.append(f"  not needed: {', '.join(self.never_needed)}")
        lines += [f"  differs: {line}" for line in self.differences]
        return "\n".join(lines)


def restore(
    source: source_lib.Source,
    abstract_params: PyTree,
    config: encoder_lib.EncoderConfig,
    *,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    rng: jax.Array | None = None,
) -> tuple[PyTree, Report]:
    """Reads a checkpoint's weights into a model's parameters.

    Args:
        source: the opened checkpoint.
        abstract_params: nested dict of arrays or ``jax.ShapeDtypeStruct``. Where a leaf
            has a sharding, each device's part is read straight into place; a leaf
            without one becomes a numpy array.
        config: the model's, for initialising what is missing.
        allow_missing: regular expressions over our parameter names, as a whole
            (``projection/.*``): parameters that may be missing in the checkpoint.
        ignore: regular expressions over the checkpoint's names, written as ours for
            layers unrolled (``decoder/.*``): tensors to leave out.
        rng: key for what is initialised; key 0 by default.

    Returns:
        Parameters like ``abstract_params``, float32, and the report.

    Raises:
        ValueError: a name is missing or left over, shapes differ, or a pattern matches
            nothing; every case is listed.
    """
    wanted = flax.traverse_util.flatten_dict(abstract_params, sep="/")
    found, report = match(
        source, wanted, config, allow_missing=allow_missing, ignore=ignore
    )
    missing = [name for name in wanted if name not in found]
    params = dict(initialise(missing, wanted, config, rng)) if missing else {}
    # The largest first: what is held twice for a moment then adds little at the peak.
    for name in sorted(found, key=lambda name: -found[name].size):
        params[name] = _read(found[name], wanted[name])
    tree = flax.traverse_util.unflatten_dict({k: params[k] for k in wanted}, sep="/")
    return tree, report


def match(
    source: source_lib.Source,
    wanted: Mapping[str, Any],
    config: encoder_lib.EncoderConfig,
    *,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> tuple[dict[str, tensors.Tensor], Report]:
    """Pairs parameters with tensors and lists everything that doesn't pair.

    Args:
        source: the opened checkpoint.
        wanted: name -> anything with a shape, for every parameter.
        config: the model's.
        allow_missing: as in ``restore``.
        ignore: as in ``restore``.

    Returns:
        Parameter -> float32 tensor, nothing read yet and without what is to be
        initialised; and the report.

    Raises:
        ValueError: as in ``restore``.
    """
    available = {**source.tensors, **source.foreign}
    problems = _idle_patterns("allow_missing", allow_missing, wanted)
    problems += _idle_patterns("ignore", ignore, available)
    ignored = {k: t.shape for k, t in available.items() if matches(k, ignore)}
    left = {k: t for k, t in available.items() if k not in ignored}
    shapes = {name: tuple(leaf.shape) for name, leaf in wanted.items()}
    parts: dict[str, tensors.Tensor] = {}
    for name, shape in shapes.items():
        # A stacked parameter is read as a whole or drawn as a whole.
        part, wrong, partly = _take(left, name, shape, config.t5)
        if part is not None:
            parts[name] = part
        elif partly or not matches(name, allow_missing):
            problems += wrong
    problems += [f"left over: {n} {_text(t.shape)}" for n, t in sorted(left.items())]
    if problems:
        raise ValueError(_complaint(source, problems))
    return parts, Report(
        path=source.path,
        family=source.family,
        loaded={name: shapes[name] for name in parts},
        initialised={k: shape for k, shape in shapes.items() if k not in parts},
        ignored=ignored,
        never_needed=source.never_needed,
        differences=_differences(source, config.t5),
    )


def _take(
    left: dict[str, tensors.Tensor],
    name: str,
    shape: tensors.Shape,
    t5: t5_config.T5Config,
) -> tuple[tensors.Tensor | None, list[str], bool]:
    """Takes a parameter's tensors out of ``left``.

    Args:
        left: tensors not used yet, by name.
        name: of the parameter.
        shape: of the parameter.
        t5: says how many layers a stacked parameter has.

    Returns:
        The parameter as float32, None if it can't be had; what is wrong then; and
        whether at least a part of it was there.
    """
    depth = t5.num_layers if name.startswith("encoder/") else t5.num_decoder_layers
    names = name_tables.stacked_parts(name, depth)
    part_shape = shape if names is None else shape[1:]
    stacked, names = names is not None, names or [name]
    found = {n: left.pop(n) for n in names if n in left}
    wrong = [f"missing: {n} {_text(part_shape)}" for n in names if n not in found] + [
        f"shape: {n} is {_text(tensor.shape)}, the model has {_text(part_shape)}"
        for n, tensor in found.items()
        if tensor.shape != part_shape
    ]
    if wrong:
        return None, wrong, bool(found)
    floats = [tensor.astype(np.float32) for tensor in found.values()]
    return tensors.stack(floats) if stacked else floats[0], [], True


def _differences(source: source_lib.Source, t5: t5_config.T5Config) -> tuple[str, ...]:
    """Names what would change the numbers without changing a shape."""
    if source.config is None:
        return ()
    return tuple(
        f"T5Config.{field} is {theirs} in the checkpoint, {ours} in the model"
        for field in _SHAPELESS_FIELDS
        if (theirs := getattr(source.config.t5, field)) != (ours := getattr(t5, field))
    )


def _complaint(source: source_lib.Source, problems: list[str]) -> str:
    more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
    hints = []
    if any(p.startswith("missing") for p in problems):
        hints.append("Let a parameter start fresh with allow_missing.")
    if any(p.startswith("left over") for p in problems):
        hints.append("Leave a tensor out with ignore.")
    if any(p.startswith("shape") for p in problems):
        hints.append("Use the size the checkpoint has.")
    return (
        f"The {source.family} checkpoint {source.path} does not fit the model:\n  "
        + "\n  ".join(problems[:_LISTED] + more)
        + "".join(f"\n{hint}" for hint in hints)
    )


def check_patterns(what: str, patterns: Sequence[str]) -> None:
    """Checks that patterns are a list of regular expressions.

    Args:
        what: the name of the argument that has them, for the message.
        patterns: what was given.

    Raises:
        ValueError: they aren't.
    """
    if isinstance(patterns, str):
        raise ValueError(
            f"{what}: got the text {patterns!r}, expected a list of patterns."
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{what} pattern {pattern!r} is no regular expression ({error}); write "
                "'decoder/.*' for all names that begin with decoder/."
            ) from error


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Says whether one of the patterns is for a parameter or tensor."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _idle_patterns(
    what: str, patterns: Sequence[str], names: Mapping[str, Any]
) -> list[str]:
    check_patterns(what, patterns)
    idle = [p for p in patterns if not any(re.fullmatch(p, name) for name in names)]
    whose = "parameter" if what == "allow_missing" else "name in the checkpoint"
    return [f"{what} pattern {p!r} matches no {whose}" for p in idle]


def _text(shape: tensors.Shape) -> str:
    return "[" + " ".join(map(str, shape)) + "]"


def _read(part: tensors.Tensor, leaf: Any) -> np.ndarray | jax.Array:
    """Reads a parameter, each device's part by itself if it has a sharding."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return part.read()
    return jax.make_array_from_callback(part.shape, sharding, part.read)


def initialise(
    names: Sequence[str],
    wanted: Mapping[str, Any],
    config: encoder_lib.EncoderConfig,
    rng: jax.Array | None = None,
) -> dict[str, jax.Array | np.ndarray]:
    """Draws parameters as the model does, and only these.

    Args:
        names: of the parameters.
        wanted: name -> leaf, whose sharding is used if it has one.
        config: the model's.
        rng: key; key 0 by default.

    Returns:
        The arrays by name, in their shardings, in numpy without one.
    """
    rng = jax.random.key(0) if rng is None else rng
    shardings = {name: getattr(wanted[name], "sharding", None) for name in names}

    def init(rng):
        variables = encoder_lib.SentenceEncoder(config).init(
            rng, jnp.ones((1, 1), jnp.int32)
        )
        params = flax.traverse_util.flatten_dict(
            flax.linen.meta.unbox(variables["params"]), sep="/"
        )
        return {name: params[name] for name in names}

    # The compiler drops what is not returned.
    made = jax.jit(init, out_shardings=shardings)(rng)
    return {
        name: value if shardings[name] is not None else np.asarray(value)
        for name, value in made.items()
    }
