"""Fit the scale of the cost model's constants to times that were measured on a chip."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from . import cases
from .cost import FITS, Constants, Work, estimate

# The three groups of constants that are scaled; one stage bound by each tells them apart.
_RATES = {"memory": ("hbm", "memory"), "vector": ("load", "load_short"), "mixed": ()}
_TIMES = {"memory": (), "vector": ("vector_call", "transfer_call", "row", "unaligned_row"), "mixed": ("mixed_call",)}
GROUPS = tuple(_RATES)
SUGGESTED = ("scores", "rotate_bwd", "products")
_LIMIT = math.log(16)  # a scale beyond 1/16 to 16 is no calibration
_PULL = 1e-4  # towards what was fitted before, for a group that no measured stage depends on
_START, _STEP, _ROUNDS = math.log(2), 1e-4, 30


@dataclass(frozen=True)
class Measurement:
    """Times of stages of one shape, as a profiler gives them for one launch each."""

    shape: str
    dtype: str
    ms: dict[str, float]


def read(path: Path) -> Measurement:
    """A file of the form {"shape": "N128_P64_R4_C16", "dtype": "bf16", "measured_ms": {"scores": 0.56, ...}}.

    Raises:
        ValueError: naming the field, what was given and what is allowed.
    """
    try:
        given = json.loads(path.read_text())
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from e
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: not JSON: {e}") from e
    wanted = {"shape", "dtype", "measured_ms"}
    if not isinstance(given, dict) or set(given) != wanted:
        found = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise ValueError(f"{path}: has {found}, must be an object with {sorted(wanted)}")
    shapes = [s.name for s in cases.official_shapes()]
    if given["shape"] not in shapes:
        raise ValueError(f"{path}: shape is {given['shape']!r}, allowed are {', '.join(shapes)}")
    if given["dtype"] not in cases.DTYPES:
        raise ValueError(f"{path}: dtype is {given['dtype']!r}, allowed are {', '.join(cases.DTYPES)}")
    times = given["measured_ms"]
    if not isinstance(times, dict) or len(times) < len(GROUPS):
        raise ValueError(
            f"{path}: measured_ms is {times!r}, must name the ms of at least {len(GROUPS)} stages, "
            f"such as {', '.join(SUGGESTED)}"
        )
    for name, ms in times.items():
        if isinstance(ms, bool) or not isinstance(ms, int | float) or not (math.isfinite(ms) and ms > 0):
            raise ValueError(f"{path}: measured_ms of {name} is {ms!r}, must be a positive number of ms")
    return Measurement(given["shape"], given["dtype"], {name: float(ms) for name, ms in times.items()})


def scaled(c: Constants, scales: dict[str, float]) -> Constants:
    """The constants with every group taking `scales` times as long."""
    changed = {n: getattr(c, n) / s for g, s in scales.items() for n in _RATES[g]}
    changed |= {n: getattr(c, n) * s for g, s in scales.items() for n in _TIMES[g]}
    return replace(c, **changed)


def fit(works: dict[str, Work], ms: dict[str, float], c: Constants) -> dict[str, float]:
    """The scale of each group that brings the estimates nearest to the measured times, in the mean square of logs.

    Raises:
        ValueError: a measured stage that is not among `works`.
    """
    if unknown := sorted(set(ms) - set(works)):
        raise ValueError(f"measured_ms names {', '.join(unknown)}, the stages are {', '.join(sorted(works))}")

    def misses(point: np.ndarray) -> np.ndarray:
        now = scaled(c, dict(zip(GROUPS, np.exp(point), strict=True)))
        return np.array([math.log(estimate(works[n], now).ns / 1e6 / t) for n, t in ms.items()] + list(_PULL * point))

    # Gauss-Newton on logs from several places, since which unit is the busiest depends on the scales.
    starts = product((-_START, 0.0, _START), repeat=len(GROUPS))
    best = min((_descend(misses, np.array(s)) for s in starts), key=lambda point: _size(misses(point)))
    return dict(zip(GROUPS, map(float, np.exp(best)), strict=True))


def _size(misses: np.ndarray) -> float:
    return float(misses @ misses)


def _descend(misses: Callable[[np.ndarray], np.ndarray], point: np.ndarray) -> np.ndarray:
    for _ in range(_ROUNDS):
        now = misses(point)
        slopes = np.stack([(misses(point + d) - now) / _STEP for d in _STEP * np.eye(len(point))], axis=1)
        step = np.linalg.lstsq(slopes, -now, rcond=None)[0]
        tries = [np.clip(point + step * part, -_LIMIT, _LIMIT) for part in (1, 0.5, 0.2, 0.05)]
        nearest = min(tries, key=lambda p: _size(misses(p)))
        if _size(misses(nearest)) >= _size(now):
            break
        point = nearest
    return point


def calibrated(
    works: dict[str, Work], measured: Measurement
) -> tuple[dict[str, Constants], dict[str, dict[str, float]]]:
    """Every fit with its constants scaled to the measurement, and the scales."""
    scales = {name: fit(works, measured.ms, c) for name, c in FITS.items()}
    return {name: scaled(c, scales[name]) for name, c in FITS.items()}, scales
