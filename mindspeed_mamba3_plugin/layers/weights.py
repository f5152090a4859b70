"""Weights of state-spaces/mamba's `Mamba3` module (MIMO) to and from those of `Mamba3Mixer`.

The two hold the same numbers. Upstream packs the rows [z, x, B, C, dd_dt, dd_A, trap, angle] with B and C laid out
(r g n); the mixer keeps the angle rows apart as `angle_proj` and lays B and C out (g r n).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, cat

from .sizes import MixerSizes

_SAME = ("dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "B_norm.weight", "C_norm.weight",
         "out_proj.weight")  # fmt: skip
_REPLICATED = ("angle_proj", "B_norm.weight", "C_norm.weight")


def from_upstream(state: Mapping[str, Tensor], sizes: MixerSizes) -> dict[str, Tensor]:
    """The mixer's state dict from upstream's, for one tensor-parallel rank of one (see `shard`).

    Raises:
        ValueError: a weight is missing, unknown, or of another shape than `sizes` gives.
    """
    ours = _shapes(sizes, outproj_norm="norm.weight" in state)
    _check(state, _upstream_shapes(ours, sizes))
    *rows, angle = state["in_proj.weight"].split([*sizes.in_proj_parts.values(), sizes.angles])
    parts = dict(zip(sizes.in_proj_parts, rows, strict=True))
    for name in ("B", "C"):
        parts[name] = parts[name].unflatten(0, (sizes.rank, sizes.groups, sizes.state)).transpose(0, 1).flatten(0, 2)
    result = {name: state[name] for name in _SAME}
    result |= {"in_proj.weight": cat(list(parts.values())), "angle_proj": angle}
    if "norm.weight" in state:
        result["norm_weight"] = state["norm.weight"]
    return result


def to_upstream(state: Mapping[str, Tensor], sizes: MixerSizes) -> dict[str, Tensor]:
    """Upstream's state dict from the whole mixer's (one tensor-parallel rank of one).

    Raises:
        ValueError: a weight is missing, unknown, or of another shape than `sizes` gives.
    """
    state = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    _check(state, _shapes(sizes, outproj_norm="norm_weight" in state))
    parts = dict(
        zip(sizes.in_proj_parts, state["in_proj.weight"].split(list(sizes.in_proj_parts.values())), strict=True)
    )
    for name in ("B", "C"):
        parts[name] = parts[name].unflatten(0, (sizes.groups, sizes.rank, sizes.state)).transpose(0, 1).flatten(0, 2)
    result = {name: state[name] for name in _SAME}
    result["in_proj.weight"] = cat([*parts.values(), state["angle_proj"]])
    if "norm_weight" in state:
        result["norm.weight"] = state["norm_weight"]
    return result


def shard(state: Mapping[str, Tensor], sizes: MixerSizes, tp: int, tp_rank: int) -> dict[str, Tensor]:
    """What rank `tp_rank` of `tp` tensor-parallel ranks holds of the whole mixer's state dict.

    Raises:
        ValueError: a weight is missing, unknown, or of another shape than `sizes` gives.
        ConfigError: `tp` does not divide the heads.
    """
    local = sizes.local(tp)
    _check(state, _shapes(sizes, outproj_norm="norm_weight" in state))
    result = {}
    if not local.bc_sharded:
        result["bc_proj"] = state["in_proj.weight"][sizes.bc_rows()]
    for name, value in state.items():
        if name == "in_proj.weight":
            result[name] = value[sizes.rank_rows(tp, tp_rank).to(value.device)]
        elif name in _REPLICATED:
            result[name] = value
        else:
            result[name] = value.chunk(tp, dim=1 if name == "out_proj.weight" else 0)[tp_rank]
    return result


def _shapes(s: MixerSizes, outproj_norm: bool) -> dict[str, tuple[int, ...]]:
    """Every weight of the mixer."""
    shapes = {
        "in_proj.weight": (s.in_proj_rows, s.hidden), "angle_proj": (s.angles, s.hidden),
        "dt_bias": (s.heads,), "D": (s.heads,), "B_norm.weight": (s.state,), "C_norm.weight": (s.state,),
        "B_bias": (s.heads, s.rank, s.state), "C_bias": (s.heads, s.rank, s.state),
        "mimo_x": (s.heads, s.rank, s.head_dim), "mimo_z": (s.heads, s.rank, s.head_dim),
        "mimo_o": (s.heads, s.rank, s.head_dim), "out_proj.weight": (s.hidden, s.inner),
    }  # fmt: skip
    if outproj_norm:
        shapes["norm_weight"] = (s.inner,)
    return shapes


def _upstream_shapes(ours: dict[str, tuple[int, ...]], s: MixerSizes) -> dict[str, tuple[int, ...]]:
    theirs = {name: shape for name, shape in ours.items() if name not in ("angle_proj", "norm_weight")}
    theirs["in_proj.weight"] = (s.in_proj_rows + s.angles, s.hidden)
    if "norm_weight" in ours:
        theirs["norm.weight"] = ours["norm_weight"]
    return theirs


def _check(state: Mapping[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    if missing := sorted(set(shapes) - set(state)):
        raise ValueError(f"state dict lacks {', '.join(missing)}")
    if unknown := sorted(set(state) - set(shapes)):
        raise ValueError(f"state dict has unknown {', '.join(unknown)}; expected are {', '.join(sorted(shapes))}")
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}: must be {shape} for these sizes")
