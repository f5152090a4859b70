"""How tokens are cut into chunks: one table for dense and packed input, so that kernels need one code path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..types import Inputs


@dataclass(frozen=True)
class Chunks:
    """Chunks of at most C tokens; none crosses the end of a sequence.

    table: int32 [count, 4], a row per chunk: its first token in the flattened [B * S] tokens, the tokens from
        there to the end of the sequence (0 in a row that is not in use), the tokens of the sequence before it,
        and its batch index.
    bounds: int32 [sequences + 1], the first chunk of each sequence.
    spare: whether the table may have rows that are not in use.
    """

    table: Tensor
    bounds: Tensor
    spare: bool

    @property
    def count(self) -> int:
        return self.table.shape[0]

    @property
    def sequences(self) -> int:
        return self.bounds.shape[0] - 1

    def new(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A buffer with a row per chunk for a kernel that walks the sequences, and so skips rows not in use."""
        return (torch.zeros if self.spare else torch.empty)(like.shape, dtype=dtype, device=like.device)

    def last_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where each sequence ends: its last chunk and the token in it, int64, and whether it has any token."""
        used = self.bounds[1:] > self.bounds[:-1]
        chunk = torch.where(used, self.bounds[1:] - 1, 0).long()
        return chunk, torch.where(used, self.table[chunk, 1] - 1, 0).long(), used


def cut(x: Inputs, C: int) -> Chunks:
    """The chunks of a call's tokens. Needs no device synchronisation."""
    B, S = x.Q.shape[:2]
    if x.cu_seqlens is None:
        return _dense(B, S, C, x.Q.device)
    return _packed(x.cu_seqlens, S, C)


@lru_cache(maxsize=64)
def _dense(B: int, S: int, C: int, device: torch.device) -> Chunks:
    per = -(-S // C)
    done = torch.arange(per).mul_(C).repeat(B)
    batch = torch.arange(B).repeat_interleave(per)
    table = torch.stack((batch * S + done, S - done, done, batch), dim=1)
    if not per:  # a launch needs a task
        table = torch.zeros(1, 4)
    bounds = torch.arange(B + 1) * per
    return Chunks(table.to(device, torch.int32), bounds.to(device, torch.int32), spare=not per)


def _packed(cu: Tensor, S: int, C: int) -> Chunks:
    # The number of chunks is only known on the device; this bound is known here, and its excess rows stay unused.
    slots = S // C + cu.shape[0] - 1
    cu = cu.long()
    lengths = cu.diff()
    bounds = torch.cat((cu.new_zeros(1), torch.div(lengths + C - 1, C, rounding_mode="floor").cumsum(0)))
    slot = torch.arange(slots, device=cu.device)
    sequence = (torch.searchsorted(bounds, slot, right=True) - 1).clamp_max(cu.shape[0] - 2)
    done = (slot - bounds[sequence]) * C
    reach = torch.where(slot < bounds[-1], lengths[sequence] - done, 0)
    table = torch.stack((torch.where(reach > 0, cu[sequence] + done, 0), reach, done, torch.zeros_like(done)), dim=1)
    return Chunks(table.int(), bounds.int(), spare=True)
