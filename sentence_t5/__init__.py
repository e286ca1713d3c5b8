"""Trains and uses T5 sentence encoders in JAX.

`SentenceT5.load(folder).encode(texts)` is the public way to use a trained model. The
names below are loaded when first asked for, so that `import sentence_t5` is quick and
never imports TensorFlow.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_PUBLIC = {
    "EncoderConfig": "encoder",
    "SentenceEncoder": "encoder",
    "SentenceT5": "inference",
    "T5Config": "t5.config",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Loads a public name on first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_PUBLIC[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
