"""The plugin's settings: one frozen dataclass, from which the flags, the YAML keys and the TransformerConfig
attributes are all derived (same names, dashes in flags, underscores elsewhere)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from .ops import MIN_CHUNK_SIZE, registry


def _setting(default: Any, help: str, choices: tuple | None = None, type: type | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "type": type})


class ConfigError(ValueError):
    """A setting has a value that cannot work; the message names the flag, the value and what is allowed."""


@dataclass(frozen=True)
class Mamba3Config:
    """Settings of the Mamba-3 MIMO mixer. Every field is a flag: `mamba3_mimo_rank` is `--mamba3-mimo-rank`.

    Raises:
        ConfigError: on construction, when a value is outside what its flag allows.
    """

    use_mamba3_mixer: bool = _setting(
        False, "put the Mamba-3 MIMO mixer into the 'M' slot of the hybrid stack (master switch)"
    )
    mamba3_mimo_rank: int = _setting(4, "MIMO rank R", type=int)
    mamba3_chunk_size: int | None = _setting(
        None, "tokens per chunk of the scan (default: 64 // rank, at least 8)", type=int
    )
    mamba3_expand: int = _setting(2, "inner width as a multiple of the hidden size", type=int)
    mamba3_rope_fraction: float = _setting(0.5, "share of the state dimension that is rotated", (0.5, 1.0), float)
    mamba3_outproj_norm: bool = _setting(
        False, "head-wise RMSNorm of the scan output before the gate (fused into the kernels)"
    )
    mamba3_forward_kernel: str = _setting(
        "auto", "implementation of the operator's forward", registry.KERNEL_NAMES, str
    )
    mamba3_backward_kernel: str = _setting(
        "auto", "implementation of the operator's backward (bwd_fwd, bwd_bwd)", registry.KERNEL_NAMES, str
    )
    mamba3_params_dtype: str = _setting(
        "fp32", "dtype of dt_bias, D, B/C biases and mimo_* under mixed precision", ("fp32", "bf16"), str
    )
    mamba3_a_activation: str = _setting(
        "heavy_tail",
        "activation of the decay: heavy_tail (state-spaces/mamba main since June 2026) or softplus "
        "(its releases up to 2.3.2.post1)",
        ("heavy_tail", "softplus"),
        str,
    )
    mamba3_recompute: bool = _setting(False, "recompute the mixer's activations in the backward")
    mamba3_a_floor: float = _setting(1e-4, "smallest |A| of the decay", type=float)
    mamba3_dt_min: float = _setting(1e-3, "smallest step size drawn when dt_bias is initialised", type=float)
    mamba3_dt_max: float = _setting(1e-1, "largest step size drawn when dt_bias is initialised", type=float)
    mamba3_dt_init_floor: float = _setting(1e-4, "floor of the step size drawn for dt_bias", type=float)

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_type(f, getattr(self, f.name))
            _check_choice(f, getattr(self, f.name))
        self._require("mamba3_mimo_rank", self.mamba3_mimo_rank >= 1, "an integer of at least 1")
        self._require("mamba3_expand", self.mamba3_expand >= 1, "an integer of at least 1")
        self._require(
            "mamba3_chunk_size",
            self.mamba3_chunk_size is None or self.mamba3_chunk_size >= MIN_CHUNK_SIZE,
            f"an integer of at least {MIN_CHUNK_SIZE}",
        )
        self._require("mamba3_a_floor", self.mamba3_a_floor > 0, "a number above 0")
        self._require("mamba3_dt_min", self.mamba3_dt_min > 0, "a number above 0")
        self._require("mamba3_dt_max", self.mamba3_dt_max >= self.mamba3_dt_min, f"at least {flag('mamba3_dt_min')}")
        self._require("mamba3_dt_init_floor", self.mamba3_dt_init_floor > 0, "a number above 0")

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk: the flag, or 64 // rank (at least 8) when it is not given."""
        return self.mamba3_chunk_size or max(MIN_CHUNK_SIZE, 64 // self.mamba3_mimo_rank)

    @property
    def rotary_dim_divisor(self) -> int:
        """N / divisor angles per token: 4 when half of the state dimension is rotated, 2 when all of it is."""
        return int(2 / self.mamba3_rope_fraction)

    def check_model(self, *, state_dim: int, head_dim: int, num_heads: int, num_groups: int) -> None:
        """Check the settings against the sizes that Megatron's own --mamba-* flags give.

        Raises:
            ConfigError: a size that the operator does not take, naming both parties.
        """
        if state_dim < 2 or state_dim % self.rotary_dim_divisor:
            raise ConfigError(
                f"--mamba-state-dim {state_dim}: must be a positive multiple of {self.rotary_dim_divisor} "
                f"(with {flag('mamba3_rope_fraction')} {self.mamba3_rope_fraction})"
            )
        if head_dim < 1:
            raise ConfigError(f"--mamba-head-dim {head_dim}: must be at least 1")
        if num_groups < 1 or num_heads % num_groups:
            raise ConfigError(
                f"--mamba-num-groups {num_groups}: must divide the number of Mamba heads, which is {num_heads}"
            )

    def check_environment(self) -> None:
        """Check that the chosen kernels are installed here.

        Raises:
            ConfigError: naming the flag, the kernel and what is missing.
        """
        for name in ("mamba3_forward_kernel", "mamba3_backward_kernel"):
            value = getattr(self, name)
            if (why := registry.missing(value)) is not None:
                usable = [k for k in registry.KERNEL_NAMES if registry.missing(k) is None]
                raise ConfigError(f"{flag(name)} {value}: {why}; usable here: {', '.join(usable)}")

    @classmethod
    def from_object(cls, source: Any) -> Mamba3Config:
        """Read the settings that `source` (a Namespace, a TransformerConfig) has as attributes; absent ones keep
        their defaults."""
        return cls(**{f.name: getattr(source, f.name) for f in fields(cls) if hasattr(source, f.name)})

    @classmethod
    def from_mapping(cls, source: Mapping[str, Any]) -> Mamba3Config:
        """Read the settings from a mapping such as a YAML section.

        Raises:
            ConfigError: a key that is no setting.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(source) - known):
            raise ConfigError(f"unknown setting {unknown[0]!r}: allowed are {', '.join(sorted(known))}")
        return cls(**source)

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{flag(name)} {getattr(self, name)}: must be {allowed}")


def flag(name: str) -> str:
    """The command-line spelling of a setting: mamba3_mimo_rank -> --mamba3-mimo-rank."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add one flag per setting to `parser`, in a group of their own. Adding twice is harmless."""
    taken = parser._option_string_actions
    if flag("use_mamba3_mixer") in taken:
        return parser
    group = parser.add_argument_group("Mamba-3 MIMO (mindspeed_mamba3_plugin)")
    for f in fields(Mamba3Config):
        if isinstance(f.default, bool):
            group.add_argument(flag(f.name), action="store_true", default=f.default, help=f.metadata["help"])
        else:
            group.add_argument(
                flag(f.name),
                type=f.metadata["type"],
                default=f.default,
                choices=f.metadata["choices"],
                help=f"{f.metadata['help']} (default: %(default)s)" if f.default is not None else f.metadata["help"],
            )
    return parser


def _check_type(f: Field, value: Any) -> None:
    wanted = bool if isinstance(f.default, bool) else f.metadata["type"]
    if value is None and f.default is None:
        return
    ok = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if wanted is float:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok:
        raise ConfigError(f"{flag(f.name)} {value!r}: must be of type {wanted.__name__}, not {type(value).__name__}")


def _check_choice(f: Field, value: Any) -> None:
    choices = f.metadata["choices"]
    if choices is not None and value not in choices:
        raise ConfigError(f"{flag(f.name)} {value}: must be one of {', '.join(map(str, choices))}")


assert all(f.default is not MISSING for f in fields(Mamba3Config)), "every setting needs a default"
