"""Mamba-3 MIMO training in Megatron-LM and MindSpeed with a Triton backward.

Importing this package imports neither Megatron nor Triton; the public names below load on first use.
"""

from importlib import import_module

from .version import __version__

_HOME = {
    "mamba3_mimo": ".ops.api",
    "Mamba3Config": ".config",
    "enable": ".patches",
    "revert": ".patches",
}

__all__ = ["Mamba3Config", "__version__", "enable", "mamba3_mimo", "revert"]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
