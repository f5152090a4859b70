"""The formulas of docs/kernels.md, written out for one chunk after the other, against automatic differentiation."""

import math

import pytest
import torch
from cases import exact, gradient_errors, make
from torch import Tensor

from mindspeed_mamba3_plugin.ops import reference
from mindspeed_mamba3_plugin.ops.types import Gradients, Inputs

C = 8


def rotated(x: Tensor, theta: Tensor) -> Tensor:
    half, A = x.shape[-1] // 2, theta.shape[-1]
    lo, hi, cos, sin = x[..., :A], x[..., half : half + A], torch.cos(theta), torch.sin(theta)
    y = x.clone()
    y[..., :A], y[..., half : half + A] = lo * cos - hi * sin, lo * sin + hi * cos
    return y


def one_head(x: Inputs, h: int, g: Tensor) -> tuple[Tensor, dict[str, Tensor], float]:
    """Output [S, P] and gradients of a head that is a group of its own, and how far the angle gradients at the starts
    of the chunks are from what the entering states say."""
    _, S, _, _, _, N, P = x.sizes
    A, half, sig = x.Angles.shape[-1], N // 2, torch.sigmoid
    a, dt, trap, Z, V, D = x.ADT[0, h], x.DT[0, h], x.Trap[0, h], x.Z[0, :, h], x.V[0, :, h], x.D[h]
    weight = x.outproj_norm_weight[h]
    phi, zeta, psi = (m[h][:, None] for m in (x.MIMO_V, x.MIMO_Z, x.MIMO_Out))  # [R, 1, P]

    theta = math.pi * torch.cumsum(torch.tanh(x.Angles[0, :, h]) * dt[:, None], 0)
    q, k = (
        rotated(y[0, :, :, h].transpose(0, 1) + b[h][:, None], theta) for y, b in ((x.Q, x.Q_bias), (x.K, x.K_bias))
    )  # [R, S, N]
    v = V * phi
    gamma, beta = dt * sig(trap), dt * sig(-trap)
    s = gamma + torch.cat((beta[1:], beta.new_zeros(1)))

    below = torch.ones(C, C, dtype=torch.bool).tril(-1)
    chunks = [slice(c, c + C) for c in range(0, S, C)]
    decays, mixing, carry_in, to_end, whole, entering = [], [], [], [], [], []
    state, O = torch.zeros(N, P, dtype=a.dtype), torch.empty_like(v)
    for c in chunks:
        sums = torch.tensor([[a[c][u + 1 : t + 1].sum() for u in range(C)] for t in range(C)], dtype=a.dtype)
        decays.append(torch.where(below, sums.exp(), 0))
        mixing.append(decays[-1] * s[c] + torch.diag(gamma[c]))
        carry_in.append(a[c].cumsum(0).exp())
        to_end.append(sums[-1].exp())
        whole.append(a[c].sum().exp())
        entering.append(state)
        scores = torch.einsum("rtn,sun->rtsu", q[:, c], k[:, c])
        O[:, c] = torch.einsum("tu,rtsu,sup->rtp", mixing[-1], scores, v[:, c]) + D * v[:, c]
        O[:, c] += carry_in[-1][:, None] * (q[:, c] @ state)
        state = whole[-1] * state + torch.einsum("t,rtn,rtp->np", s[c] * to_end[-1], k[:, c], v[:, c])

    rstd = (O.square().mean(-1, keepdim=True) + x.norm_eps) ** -0.5
    y, inner = O * rstd * weight, Z * zeta
    silu = inner * sig(inner)
    out = (psi * y * silu).sum(0)

    dinner = g * psi * y * sig(inner) * (1 + inner * (1 - sig(inner)))
    dy, unit = g * psi * silu, O * rstd
    scaled = dy * weight
    dO = rstd * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))

    dq, dk, dv, dstate = (
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        torch.zeros(N, P, dtype=a.dtype),
    )
    da, ds, dgamma, dturn = (torch.zeros(*size, dtype=a.dtype) for size in ((S,), (S,), (S,), (len(chunks), A)))
    for i, c in reversed(list(enumerate(chunks))):
        scores = torch.einsum("rtn,sun->rtsu", q[:, c], k[:, c])
        W = torch.einsum("rtp,sup->rtsu", dO[:, c], v[:, c])
        carry_out = s[c] * to_end[i]
        from_state = k[:, c] @ dstate
        dq[:, c] = torch.einsum("tu,rtsu,sun->rtn", mixing[i], W, k[:, c])
        dq[:, c] += carry_in[i][:, None] * (dO[:, c] @ entering[i].T)
        dk[:, c] = torch.einsum("tu,rtsu,rtn->sun", mixing[i], W, q[:, c])
        dk[:, c] += carry_out[:, None] * (v[:, c] @ dstate.T)
        dv[:, c] = torch.einsum("tu,rtsu,rtp->sup", mixing[i], scores, dO[:, c])
        dv[:, c] += carry_out[:, None] * from_state + D * dO[:, c]
        dmixing = (scores * W).sum((0, 2))
        E = (dO[:, c] * carry_in[i][:, None] * (q[:, c] @ entering[i])).sum((0, 2))
        L = carry_out * (v[:, c] * from_state).sum((0, 2))
        pairs = mixing[i] * dmixing
        da[c] = torch.stack([pairs[w:, :w].sum() + E[w:].sum() + L[:w].sum() for w in range(C)])
        da[c] += whole[i] * (entering[i] * dstate).sum()
        ds[c] = (decays[i] * dmixing).sum(0) + to_end[i] * (v[:, c] * from_state).sum((0, 2))
        dgamma[c] = dmixing.diagonal() + ds[c]
        dstate = whole[i] * dstate + torch.einsum("t,rtn,rtp->np", carry_in[i], q[:, c], dO[:, c])
        lo, hi = slice(A), slice(half, half + A)
        dturn[i] = (entering[i][hi] * dstate[lo] - entering[i][lo] * dstate[hi]).sum(1)

    dbeta = torch.cat((ds.new_zeros(1), ds[:-1]))
    own = sum(
        (d[..., half : half + A] * z[..., :A] - d[..., :A] * z[..., half : half + A]).sum(0)
        for d, z in ((dq, q), (dk, k))
    )
    dtheta, tanh = own.flip(0).cumsum(0).flip(0), torch.tanh(x.Angles[0, :, h])
    dQ, dK = rotated(dq, -theta), rotated(dk, -theta)
    grads = {
        "dq": dQ.transpose(0, 1), "dk": dK.transpose(0, 1), "dv": (dv * phi).sum(0), "dadt": da,
        "ddt": dgamma * sig(trap) + dbeta * sig(-trap) + math.pi * (dtheta * tanh).sum(1),
        "dtrap": (dgamma - dbeta) * dt * sig(trap) * sig(-trap), "dq_bias": dQ.sum(1), "dk_bias": dK.sum(1),
        "dmimo_v": (dv * V).sum(1), "dmimo_z": (dinner * Z).sum(1), "dmimo_out": (g * y * silu).sum(1),
        "dangles": math.pi * dtheta * dt[:, None] * (1 - tanh**2), "dd": (dO * v).sum(),
        "dz": (dinner * zeta).sum(0), "dnorm_weight": (dy * unit).sum((0, 1)),
    }  # fmt: skip
    return out, grads, float((dturn - dtheta[::C]).norm() / dtheta.norm())


@pytest.mark.parametrize("divisor", [2, 4])
def test_formulas_of_the_document(divisor):
    x = exact(make(1, 24, 2, 2, R=3, N=8, P=5, divisor=divisor, chunk_size=C, norm=True, seed=3))
    wanted = reference.step_form(x)[0]
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outs, grads, turns = zip(*(one_head(x, h, g[0, :, h]) for h in range(2)), strict=True)
    assert max(turns) < 1e-12
    assert (torch.stack(outs, 1)[None] - wanted).norm() < 1e-12 * wanted.norm()
    by_token = {"dq": 2, "dk": 2, "dv": 1, "dz": 1, "dangles": 1}  # axis of the head
    whole = {n: torch.stack([one[n] for one in grads], by_token.get(n, 0)) for n in grads[0]}
    batched = {n: t[None] if n in by_token or n in ("dadt", "ddt", "dtrap") else t for n, t in whole.items()}
    assert max(gradient_errors(Gradients(**batched), reference.backward(x, g)).values()) < 1e-12
