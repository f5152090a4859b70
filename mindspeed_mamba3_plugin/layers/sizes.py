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
    bc_sharded: bool = True  # False: B and C have a projection of their own, replicated over tensor-parallel ranks

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
        return {
            "z": self.inner,
            "x": self.inner,
            **(self.bc_parts if self.bc_sharded else {}),
            "dd_dt": self.heads,
            "dd_A": self.heads,
            "trap": self.heads,
        }

    @property
    def bc_parts(self) -> dict[str, int]:
        """Rows of B and of C."""
        return dict.fromkeys(("B", "C"), self.groups * self.rank * self.state)

    @property
    def in_proj_rows(self) -> int:
        return sum(self.in_proj_parts.values())

    def local(self, tp: int, cp: int = 1) -> MixerSizes:
        """The share of one of `tp` tensor-parallel ranks. Groups that `tp` does not divide are all on every rank.

        Raises:
            ConfigError: heads that `tp` context-parallel ranks of `cp` each do not divide.
        """
        for ranks, given in (
            (tp, f"--tensor-model-parallel-size {tp}"),
            (tp * cp, f"--tensor-model-parallel-size {tp} x --context-parallel-size {cp} = {tp * cp}"),
        ):
            if self.heads % ranks:
                raise ConfigError(
                    f"{given}: must divide the number of Mamba heads, which is {self.heads} (--mamba-num-heads)"
                )
        if self.groups % tp:
            return replace(self, heads=self.heads // tp, bc_sharded=False)
        return replace(self, heads=self.heads // tp, groups=self.groups // tp)

    def groups_of(self, ranks: int, index: int) -> list[int]:
        """Groups whose B and C are read by the heads of rank `index` of `ranks`: each by the same number of
        consecutive heads, so that a group is named again for each head where no larger number fits."""
        mine, per_group = self.heads // ranks, self.heads // self.groups
        step = mine if per_group % mine == 0 else per_group if mine % per_group == 0 else 1
        return [head // per_group for head in range(index * mine, (index + 1) * mine, step)]

    def rank_rows(self, tp: int, tp_rank: int) -> Tensor:
        """Indices of the whole packed projection's rows that `tp_rank` holds, in its order; int64."""
        held, rows, start = self.local(tp).in_proj_parts, [], 0
        for name, size in self.in_proj_parts.items():
            if name in held:
                rows.append(torch.arange(held[name]) + (start + tp_rank * held[name]))
            start += size
        return torch.cat(rows)

    def bc_rows(self) -> slice:
        """The rows of B and C in the whole packed projection."""
        return slice(2 * self.inner, 2 * self.inner + sum(self.bc_parts.values()))
