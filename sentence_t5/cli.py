"""``sentence-t5 <verb> ...`` runs ``python -m sentence_t5.<verb> ...``.

A verb is a module with ``main(argv)``. None is imported before it is asked for, so that
``--help`` answers at once.
"""

import gc
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

# Verb -> what it does, one line. The module has the verb's name, or one given below.
VERBS = {
    "train": "train a sentence encoder as gin files say",
    "evaluate": "score a trained model: STS, retrieval, transfer, geometry",
    "mine": "find hard negatives for training pairs, by a trained model",
    "encode": "turn a file of texts, one a line, into vectors",
    "compile": "compile for a TPU slice without one: memory, traffic, speed",
    "config": "check gin files and flags, print each value and its origin",
    "import": "make a model folder out of somebody else's checkpoint",
    "average": "make one model of several checkpoints of a run",
    "export": "write a model for sentence-transformers, StableHLO or ONNX",
    "inspect": "say what a checkpoint of any format holds",
}
# `import` is no name for a module, and `inspect` is one of Python's own.
MODULES = {"import": "import_weights", "inspect": "inspect_weights"}
_USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb.

    Args:
        argv: the verb and its arguments; the process's by default.

    Returns:
        The exit code: the verb's own, or 2 for an unknown verb.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else _USAGE_ERROR
    if argv[0] == "--version":
        from sentence_t5 import __version__

        print(__version__)
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        print(f"sentence-t5: there is no verb {verb}.{_nearest(verb)}", file=sys.stderr)
        print(_usage(), file=sys.stderr)
        return _USAGE_ERROR
    return _load(MODULES.get(verb, verb)).main(rest) or 0


def _load(module: str) -> ModuleType:
    """Imports a verb's module.

    Hundreds of thousands of objects come to stay, none of them garbage: looking for
    some again and again takes a fifth of the time that a run needs to start.
    """
    name = f"sentence_t5.{module}"
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _usage() -> str:
    lines = ["usage: sentence-t5 <verb> [flags]; sentence-t5 <verb> --help", ""]
    width = max(map(len, VERBS))
    return "\n".join(lines + [f"  {v:{width}}  {text}" for v, text in VERBS.items()])


def _nearest(verb: str) -> str:
    import difflib

    close = difflib.get_close_matches(verb, VERBS, n=1)
    return f" Did you mean {close[0]}?" if close else ""


if __name__ == "__main__":
    sys.exit(main())
