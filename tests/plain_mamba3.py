"""The Mamba-3 MIMO module of state-spaces/mamba in plain torch, with its parameter names and layouts.

Written as one attention-like product over the whole sequence, without chunks and without the plugin's operator:
    O_t = sum_{u <= t} w(t, u) (q_t . k_u) v_u + D v_t
    w(t, u) = exp(sum of A dt over u < j <= t) * (gamma_u + beta_{u + 1}) for u < t,   w(t, t) = gamma_t
with gamma = dt sigmoid(trap) and beta = dt sigmoid(-trap).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_mamba3_plugin.layers.sizes import MixerSizes


def plain_mamba3(
    w: dict[str, Tensor], u: Tensor, n: MixerSizes, *, a_activation: str, a_floor: float, eps: float = 1e-5
) -> Tensor:
    """u [batch, length, hidden] -> [batch, length, hidden], with the weights of upstream's state dict."""
    b, length, _ = u.shape
    G, R, N, H, P = n.groups, n.rank, n.state, n.heads, n.head_dim
    z, x, B, C, dd_dt, dd_A, trap, angle = torch.split(
        u @ w["in_proj.weight"].T, [H * P, H * P, R * G * N, R * G * N, H, H, H, n.angles], dim=-1
    )
    z, x = z.reshape(b, length, H, P), x.reshape(b, length, H, P)

    def rms(y: Tensor) -> Tensor:
        return y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + eps)

    def per_head(y: Tensor, norm: Tensor, bias: Tensor) -> Tensor:
        y = rms(y.reshape(b, length, R, G, N)) * norm
        return y.repeat_interleave(H // G, dim=3).permute(0, 3, 1, 2, 4) + bias[:, None]  # [b, H, length, R, N]

    k = per_head(B, w["B_norm.weight"], w["B_bias"])
    q = per_head(C, w["C_norm.weight"], w["C_bias"])

    dt = torch.log1p(torch.exp(dd_dt + w["dt_bias"])).transpose(1, 2)  # [b, H, length]
    if a_activation == "heavy_tail":
        a = torch.maximum(dd_A, torch.zeros_like(dd_A)) + 1 / (1 + torch.maximum(-dd_A, torch.zeros_like(dd_A)))
    else:
        a = torch.log1p(torch.exp(dd_A))
    a = -torch.maximum(a, torch.full_like(a, a_floor)).transpose(1, 2)
    share = torch.sigmoid(trap).transpose(1, 2)
    gamma, beta = dt * share, dt * (1 - share)

    # Element n of the state is the real part and element N/2 + n the imaginary part of what is rotated.
    theta = torch.cumsum(torch.tanh(angle)[:, None] * dt[..., None] * math.pi, dim=2)
    theta = F.pad(theta, (0, N // 2 - n.angles))[:, :, :, None]
    turn = torch.polar(torch.ones_like(theta), theta)

    def rotate(y: Tensor) -> Tensor:
        y = torch.complex(y[..., : N // 2].contiguous(), y[..., N // 2 :].contiguous()) * turn
        return torch.cat([y.real, y.imag], dim=-1)

    v = x.transpose(1, 2)[:, :, :, None] * w["mimo_x"][:, None]  # [b, H, length, R, P]
    scores = torch.einsum("bhtrn,bhuqn->bhtruq", rotate(q), rotate(k))
    total = torch.cumsum(a * dt, dim=-1)
    past = torch.ones(length, length, dtype=torch.bool).tril(-1)
    decay = torch.exp((total[..., :, None] - total[..., None, :]).masked_fill(~past, -torch.inf))
    following = F.pad(beta[..., 1:], (0, 1))
    weight = decay * (gamma + following)[..., None, :] + torch.diag_embed(gamma)
    o = torch.einsum("bhtruq,bhtu,bhuqp->bhtrp", scores, weight, v)
    o = o + w["D"][:, None, None, None] * v

    if "norm.weight" in w:
        o = rms(o) * w["norm.weight"].reshape(H, 1, 1, P)
    gate = z.transpose(1, 2)[:, :, :, None] * w["mimo_z"][:, None]
    o = o * gate * torch.sigmoid(gate)
    y = torch.einsum("bhtrp,hrp->bthp", o, w["mimo_o"])
    return y.reshape(b, length, H * P) @ w["out_proj.weight"].T
