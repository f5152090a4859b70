"""Context parallelism: each rank holds a part of the sequence outside the scan, and a part of the heads inside it.

The scan needs a sequence from its start, so the ranks change places as in Megatron's own Mamba mixer: one exchange
before the scan, one after it. What passes per token and layer is about 3 H P + 2 G R N numbers over the ranks, once.
Passing states between the ranks would send less, but the operator takes no initial state and has no gradient for one;
and the parts of a sequence are dealt out from both ends to balance attention, which makes two joints per rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def heads_for_tokens(parts: Sequence[Tensor], order: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Give every rank the whole sequence of its share of each part.

    Args:
        parts: [s / ranks, b, ranks, width], what is meant for each rank, for this rank's tokens.
        order: `sequence_order` of the ranks.

    Returns:
        [s, b, width] for each part, the tokens in their order.
    """
    received = _Exchange.apply(torch.cat(parts, dim=-1).movedim(2, 0), group)
    return list(received.flatten(0, 1)[order].split([part.shape[-1] for part in parts], dim=-1))


def tokens_for_heads(y: Tensor, order: Tensor, group: ProcessGroup) -> Tensor:
    """The way back: this rank's share [s, b, width] -> this rank's tokens [s / ranks, b, ranks * width]."""
    ranks = group.size()
    received = _Exchange.apply(y[order.argsort()].unflatten(0, (ranks, -1)), group)
    return received.movedim(0, 2).flatten(2)


def sequence_order(tokens: int, ranks: int, bounds: Tensor | None, device: torch.device) -> Tensor:
    """Where the ranks' tokens, one rank after the other, go: index of each token of the sequence in that row; int64.

    Each sequence is cut into 2 * ranks pieces, of which rank r holds pieces r and 2 * ranks - 1 - r.

    Raises:
        ValueError: a sequence whose length is no multiple of 2 * ranks.
    """
    bounds = [0, tokens] if bounds is None else bounds.tolist()
    held: list[list[Tensor]] = [[] for _ in range(ranks)]
    for start, end in itertools.pairwise(bounds):
        if (end - start) % (2 * ranks):
            raise ValueError(
                f"a sequence of {end - start} tokens: with --context-parallel-size {ranks} its length, padding "
                f"included, must be a multiple of {2 * ranks}"
            )
        pieces = torch.arange(start, end).chunk(2 * ranks) if end > start else ()
        for r in range(ranks if pieces else 0):
            held[r] += [pieces[r], pieces[-1 - r]]
    return torch.cat([piece for rank in held for piece in rank]).argsort().to(device)


class _Exchange(torch.autograd.Function):
    """[ranks, ...], entry r meant for rank r -> [ranks, ...], entry r from rank r."""

    @staticmethod
    def forward(ctx, y: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(y, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(y: Tensor, group: ProcessGroup) -> Tensor:
    y = y.contiguous()
    received = torch.empty_like(y)
    dist.all_to_all_single(received, y, group=group)
    return received
