"""Calls of an implementation: on the tensors' device, without autocast, with errors planted where asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from . import registry
from .types import GRADIENT_NAMES, Gradients, Inputs, State

_planted: dict[str, float] = {}


def forward(x: Inputs, kernel: str) -> tuple[Tensor, State | None]:
    """The forward of the resolved implementation `kernel` on checked inputs."""
    with surroundings(x.Q.device):
        return registry.load(kernel).forward(x)


def backward(x: Inputs, grad_out: Tensor, kernel: str) -> Gradients:
    """The backward of the resolved implementation `kernel` on checked inputs."""
    with surroundings(x.Q.device):
        grads = registry.load(kernel).backward(x, grad_out.contiguous())
    return _plant(grads) if _planted else grads


@contextmanager
def surroundings(device: torch.device) -> Iterator[None]:
    """Triton launches on the current device, whatever the tensors say; and the implementations choose the dtype of
    every product themselves."""
    with torch.autocast(device.type, enabled=False):
        if device.type == "cpu":
            yield
        else:
            with getattr(torch, device.type).device(device):
                yield


@contextmanager
def planted(factors: dict[str, float]) -> Iterator[None]:
    """Scale named gradients of every backward inside the context, e.g. {"dk": 1.01}.

    A comparison that does not notice this is broken: it is how the loss-curve comparison proves itself.

    Raises:
        ValueError: a name that is no gradient.
    """
    if unknown := sorted(set(factors) - set(GRADIENT_NAMES)):
        raise ValueError(f"no gradient named {unknown[0]!r}: allowed are {', '.join(GRADIENT_NAMES)}")
    before = dict(_planted)
    _planted.update(factors)
    try:
        yield
    finally:
        _planted.clear()
        _planted.update(before)


def _plant(grads: Gradients) -> Gradients:
    return grads._replace(**{n: getattr(grads, n) * f for n, f in _planted.items() if getattr(grads, n) is not None})
