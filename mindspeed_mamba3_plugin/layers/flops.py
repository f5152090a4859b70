"""Floating-point operations of a Mamba-3 MIMO layer."""

from __future__ import annotations

from typing import NamedTuple

from .sizes import MixerSizes


class LayerFlops(NamedTuple):
    """FLOPs per token, a multiply-add being two."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def layer_flops(sizes: MixerSizes, chunk_size: int) -> LayerFlops:
    """FLOPs per token of one mixer: its matrix products, as is usual for model FLOPs, without recomputation.

    Projections, multiply-adds per token: hidden x (rows of in_proj + angles + inner).

    Scan, multiply-adds per token and head. A chunk of C tokens has M = C R fused rows (token, rank), and is worth
        scores    Q K^T       M x N x M     per token R M N
        within    scores V    M x M x P     per token R M P
        state     K^T V       N x M x P     per token R N P
        carried   Q S         M x N x P     per token R N P
        mixing    MIMO_Out    R x P         per token R P
    The products within a chunk are whole M x M squares, as matrix units compute them, the masked half included. They
    grow with C while the recurrence they replace does not: `chunk_size` is the one the model is configured with.

    The backward has two products of the same size for each of these. Element-wise work (norms, rotation, gates,
    V * MIMO_V, decays) is not counted.
    """
    n = sizes
    rows = chunk_size * n.rank
    projections = n.hidden * (n.in_proj_rows + n.angles + n.inner)
    scan = n.rank * (rows * (n.state + n.head_dim) + 2 * n.state * n.head_dim + n.head_dim)
    forward = 2 * (projections + n.heads * scan)
    return LayerFlops(forward=forward, backward=2 * forward)
