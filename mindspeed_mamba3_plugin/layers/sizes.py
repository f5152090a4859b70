"""The sizes of one mixer, and how the rows of its packed input projection are laid out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import ConfigError, Mamba3Config, flag


@dataclass(frozen=True)
class MixerSizes:
    """Sizes of a whole mixer, or of one tensor-parallel rank's share of it."""

    hidden: int  # width of the model
    heads: int  # H
    groups: int  # G, groups of heads that share B and C
    rank: int  # R, MIMO rank
    state: int  # N
    head_dim: int  # P
    angles: int  # rotation angles per token, shared by all heads

    @classmethod
    def from_config(cls, config: Any, hidden: int, settings: Mamba3Config) -> MixerSizes:
        """Read the sizes that Megatron's --mamba-* flags and the plugin's settings give.

        Raises:
            ConfigError: sizes that do not fit together, naming the flags.
        """
        head_dim, heads = config.mamba_head_dim, getattr(config, "mamba_num_heads", None)
        if heads is None:
            inner = settings.mamba3_expand * hidden
            if head_dim < 1 or inner % head_dim:
                raise ConfigError(
                    f"--mamba-head-dim {head_dim}: must divide the inner width, which is {flag('mamba3_expand')} "
                    f"{settings.mamba3_expand} x --hidden-size {hidden} = {inner}; or give --mamba-num-heads"
                )
            heads = inner // head_dim
        settings.check_model(
            state_dim=config.mamba_state_dim,
            head_dim=head_dim,
            num_heads=heads,
            num_groups=config.mamba_num_groups,
        )
        return cls(
            hidden=hidden,
            heads=heads,
            groups=config.mamba_num_groups,
            rank=settings.mamba3_mimo_rank,
            state=config.mamba_state_dim,
            head_dim=head_dim,
            angles=config.mamba_state_dim // settings.rotary_dim_divisor,
        )

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def in_proj_parts(self) -> dict[str, int]:
        """Rows of each part of the packed projection, in order. B and C are laid out (g r n): groups shard."""
        bc = self.groups * self.rank * self.state
        return {
            "z": self.inner,
            "x": self.inner,
            "B": bc,
            "C": bc,
            "dd_dt": self.heads,
            "dd_A": self.heads,
            "trap": self.heads,
        }

    @property
    def in_proj_rows(self) -> int:
        return sum(self.in_proj_parts.values())

    def local(self, tp: int) -> MixerSizes:
        """The share of one of `tp` tensor-parallel ranks.

        Raises:
            ConfigError: heads or groups that `tp` does not divide.
        """
        for name, count in (("heads", self.heads), ("groups", self.groups)):
            if count % tp:
                raise ConfigError(
                    f"--tensor-model-parallel-size {tp}: must divide the number of Mamba {name}, which is {count} "
                    f"(--mamba-num-{name})"
                )
        return replace(self, heads=self.heads // tp, groups=self.groups // tp)

    def rank_rows(self, tp: int, tp_rank: int) -> Tensor:
        """Indices of the whole packed projection's rows that `tp_rank` holds, in its order; int64."""
        rows, start = [], 0
        for size in self.in_proj_parts.values():
            share = size // tp
            rows.append(torch.arange(share) + (start + tp_rank * share))
            start += size
        return torch.cat(rows)
