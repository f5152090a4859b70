"""What the main kernels load: tiles of the inputs and of states. They come first in a kernel (see `tiles.pin`)."""

import triton
import triton.language as tl

from ..blocks import narrow
from .tiles import addresses, columns, load, rest, sigmoid


@triton.jit
def load_turn(Cos, Sin, at, n, inside, A: tl.constexpr):
    """cos and sin of the angles of each token, [C, 1, NW]; `at` numbers the rows of [H * T, A], and columns from A on
    are not rotated."""
    mask = inside & (n < A)
    return tl.load(addresses(Cos, at * A + n), mask=mask, other=1.0), load(Sin, at * A + n, mask)


@triton.jit
def load_rows(X, token, r, n, ok, h, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Both halves of X, [C, RP, NW]."""
    at = ((token * R + r) * G + h // (H // G)) * N + n
    real = n < N // 2
    return load(X, at, ok & real), load(X, at + N // 2, ok & real)


@triton.jit
def load_bias(Bias, token, r, n, h, R: tl.constexpr, N: tl.constexpr):
    """Both halves of a bias of Q or K, by row: see `load_by_row`."""
    at = tl.broadcast_to((h * R + r) * N + n, (token.shape[0], 1, r.shape[2], n.shape[3]))
    real = (r < R) & (n < N // 2)
    return load(Bias, at, real), load(Bias, at + N // 2, real)


@triton.jit
def load_halves(
    X, Bias, token, r, n, ok, h, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Both halves of X, [C, RP, NW], and of its bias, by row."""
    bias_lo, bias_hi = load_bias(Bias, token, r, n, h, R, N)
    lo, hi = load_rows(X, token, r, n, ok, h, H, G, R, N)
    return lo, hi, bias_lo, bias_hi


@triton.jit
def load_queries_and_keys(
    Q, K, Q_bias, K_bias, Cos, Sin, head, token, r, inside, h, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    N: tl.constexpr, A: tl.constexpr, NT: tl.constexpr, NW: tl.constexpr,
):  # fmt: skip
    """Angles, queries and keys of a chunk, for every tile of columns: what `load_turn` and `load_halves` give."""
    turns, q_halves, k_halves = (), (), ()
    for i in tl.static_range(NT):
        n = columns(i, NW)
        turns = turns + (load_turn(Cos, Sin, head + token, n, inside, A),)
        k_halves = k_halves + (load_halves(K, K_bias, token, r, n, inside & (r < R), h, H, G, R, N),)
        q_halves = q_halves + (load_halves(Q, Q_bias, token, r, n, inside & (r < R), h, H, G, R, N),)
    return turns, q_halves, k_halves


@triton.jit
def load_by_token(X, token, p, inside, h, H: tl.constexpr, P: tl.constexpr):
    """[C, 1, PW] of X [T, H, P]"""
    return load(X, (token * H + h) * P + p, inside & (p < P))


@triton.jit
def load_by_rank(X, r, p, h, R: tl.constexpr, P: tl.constexpr):
    """[1, RP, PW] of X [H, R, P]"""
    return load(X, (h * R + r) * P + p, (r < R) & (p < P))


@triton.jit
def load_by_row(X, token, r, p, h, R: tl.constexpr, P: tl.constexpr):
    """The same for every group of tokens, [C / L, 1, RP, PW]: in the layout of what it multiplies, for some more
    loads that hit the cache."""
    at = tl.broadcast_to((h * R + r) * P + p, (token.shape[0], 1, r.shape[2], p.shape[3]))
    return load(X, at, (r < R) & (p < P))


@triton.jit
def load_values(V, Phi, token, r, p, inside, h, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """V [C, 1, PW] and MIMO_V, by row; the values are their product."""
    return load_by_token(V, token, p, inside, h, H, P), load_by_row(Phi, token, r, p, h, R, P)


@triton.jit
def load_out_gradient(
    dO, token, r, p, inside, h, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, REDUCED: tl.constexpr
):
    """Gradient of the operator's output: [C, 1, PW], or [C, RP, PW] where the output is not reduced."""
    if REDUCED:
        g = load_by_token(dO, token, p, inside, h, H, P)
    else:
        g = load(dO, ((token * R + r) * H + h) * P + p, inside & (r < R) & (p < P))
    return g


@triton.jit
def load_core_parts(
    dO, Psi, Z, Zeta, Stored, token, r, p, inside, h, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """What the gradient of O (the scan's own output) is made of: the output's gradient, then MIMO_Out, then Z and
    MIMO_Z, as far as they are given. With a norm it needs O, and was stored by `bwd_fwd`."""
    ok = inside & (r < R)
    if Stored is not None:
        whole = load(Stored, ((token * H + h) * R + r) * P + p, ok & (p < P))
    else:
        whole = load_out_gradient(dO, token, r, p, inside, h, H, R, P, Psi is not None)
    parts = (whole,)
    if Stored is None and Psi is not None:
        parts = parts + (load_by_row(Psi, token, r, p, h, R, P),)
    if Stored is None and Z is not None:
        parts = parts + (load_by_token(Z, token, p, inside, h, H, P), load_by_row(Zeta, token, r, p, h, R, P))
    return parts


@triton.jit
def core_gradient(parts):
    """Gradient of O in fp32, [C, RP, PW]."""
    count: tl.constexpr = len(parts)
    g = parts[0].to(tl.float32)
    if count % 2 == 0:
        g *= parts[1].to(tl.float32)
    if count > 2:
        gate = parts[count - 2].to(tl.float32) * parts[count - 1].to(tl.float32)
        g *= gate * sigmoid(gate)
    return g


@triton.jit
def load_state(
    States, task, i, u, dtype: tl.constexpr, SPLIT: tl.constexpr, NT: tl.constexpr, NW: tl.constexpr,
    PT: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """Tile (i, u) [PW, 2 NW] of one state [2, NH, PP], stored with P contiguous, as an operand."""
    NH: tl.constexpr = NT * NW
    PP: tl.constexpr = PT * PW
    n = tl.arange(0, 2 * NW)
    at = States + task * (2 * NH * PP)
    at += (u * PW + tl.arange(0, PW))[:, None] + (n // NW * NH + i * NW + n % NW)[None, :] * PP
    tile = tl.load(at)
    if SPLIT:
        high = narrow(tile, dtype)
        operand = (high, rest(tile, high))
    else:
        operand = (tile,)
    return operand


@triton.jit
def load_states(
    States, task, dtype: tl.constexpr, SPLIT: tl.constexpr, NT: tl.constexpr, NW: tl.constexpr, PT: tl.constexpr,
    PW: tl.constexpr,
):  # fmt: skip
    """Every tile (i, u) of a state, i slowest."""
    tiles = ()
    for i in tl.static_range(NT):
        for u in tl.static_range(PT):
            tiles = tiles + (load_state(States, task, i, u, dtype, SPLIT, NT, NW, PT, PW),)
    return tiles
