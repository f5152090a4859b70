"""Tiles that the main kernels share: [C, RP, W], tokens of a chunk by ranks by columns, flattened to M = C * RP rows
for matrix products.

What depends on the token or the rank alone is loaded as [C, 1, W] or [1, RP, W] and broadcast. The state dimension is
kept in two halves, lo (n) and hi (N/2 + n), the partners of a rotation, so that rotating and un-rotating are
element-wise between two tiles of one layout. Columns are cut into tiles of at most 64: NT of width NW in a half of
the state dimension, PT of width PW in P; the tuples below have an item for each.
"""

import triton
import triton.language as tl

from ..blocks import _INTERPRETED, dot, narrow


@triton.jit
def pin(x):
    """x itself, computed once and here.

    Without it Triton repeats the whole chain that made x for every layout it needs, and changes the layout of each
    loaded tile as soon as it is there, which lets no two loads overlap. So a kernel issues all its loads, pins them,
    and pins what it computes as the left operand of a product.
    """
    if _INTERPRETED:
        return x
    if x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    elif x.dtype.primitive_bitwidth == 32:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return x


@triton.jit
def pin_all(xs):
    pinned = ()
    for i in tl.static_range(len(xs)):
        pinned = pinned + (pin(xs[i]),)
    return pinned


@triton.jit
def power2(x):
    """2^x; results below the smallest normal number are 0."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) within a few ulp, in two special-function instructions."""
    e = power2(-1.4426950408889634 * x)
    if _INTERPRETED:
        return 1.0 / (1.0 + e)
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def flat(x):
    """[C, RP, W] -> [C * RP, W]"""
    return tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))


@triton.jit
def tall(x, RP: tl.constexpr):
    """[C * RP, W] -> [C, RP, W]"""
    return tl.reshape(x, (x.shape[0] // RP, RP, x.shape[1]))


@triton.jit
def left(x, dtype: tl.constexpr):
    """[C, RP, W] in fp32 as the left operand of a matrix product."""
    return pin(flat(narrow(x, dtype)))


@triton.jit
def right(x, dtype: tl.constexpr):
    """[C, RP, W] in fp32 as the right operand of a matrix product: in shared memory, whatever made it."""
    return flat(narrow(x, dtype))


@triton.jit
def columns(i, W: tl.constexpr):
    """Column numbers of tile i, [1, 1, W]."""
    return i * W + tl.arange(0, W)[None, None, :]


@triton.jit
def load(X, at, mask):
    return tl.load(X + at, mask=mask, other=0.0)


@triton.jit
def put(X, at, x, mask):
    tl.store(X + at, narrow(x, X.dtype.element_ty), mask=mask)


@triton.jit
def load_turn(Cos, Sin, at, n, inside, A: tl.constexpr):
    """cos and sin of the angles of each token, [C, 1, NW]; `at` numbers the rows of [H * T, A], and columns from A on
    are not rotated."""
    mask = inside & (n < A)
    return tl.load(Cos + at * A + n, mask=mask, other=1.0), load(Sin, at * A + n, mask)


@triton.jit
def load_halves(
    X, Bias, token, r, n, ok, h, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Both halves of X and of its bias, four tiles [C, RP, NW]."""
    at = ((token * R + r) * G + h // (H // G)) * N + n
    bias = tl.broadcast_to((h * R + r) * N + n, at.shape)
    mask = ok & (n < N // 2)
    return load(X, at, mask), load(X, at + N // 2, mask), load(Bias, bias, mask), load(Bias, bias + N // 2, mask)


@triton.jit
def rotated(halves, turn):
    """(X + Bias) rotated, both halves in fp32."""
    lo = halves[0].to(tl.float32) + halves[2].to(tl.float32)
    hi = halves[1].to(tl.float32) + halves[3].to(tl.float32)
    cos = turn[0].to(tl.float32)
    sin = turn[1].to(tl.float32)
    return lo * cos - hi * sin, lo * sin + hi * cos


@triton.jit
def cross(lo, hi, halves):
    """Gradient of the angles, [C, 1, NW], from that of X + Bias, which the rotation does not change."""
    x_lo = halves[0].to(tl.float32) + halves[2].to(tl.float32)
    x_hi = halves[1].to(tl.float32) + halves[3].to(tl.float32)
    return tl.sum(hi * x_lo - lo * x_hi, axis=1, keep_dims=True)


@triton.jit
def load_by_token(X, token, p, inside, h, H: tl.constexpr, P: tl.constexpr):
    """[C, 1, PW] of X [T, H, P]"""
    return load(X, (token * H + h) * P + p, inside & (p < P))


@triton.jit
def load_by_rank(X, r, p, h, R: tl.constexpr, P: tl.constexpr):
    """[1, RP, PW] of X [H, R, P]"""
    return load(X, (h * R + r) * P + p, (r < R) & (p < P))


@triton.jit
def load_by_row(X, r, p, ok, h, R: tl.constexpr, P: tl.constexpr):
    """The same as a tile [C, RP, PW]: in the layout of what it multiplies, for some more loads that hit the cache."""
    return load(X, tl.broadcast_to((h * R + r) * P + p, (ok.shape[0], ok.shape[1], p.shape[2])), ok & (p < P))


@triton.jit
def load_values(V, Phi, token, r, p, inside, h, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """V [C, 1, PW] and MIMO_V [C, RP, PW]; the values are their product."""
    return load_by_token(V, token, p, inside, h, H, P), load_by_row(Phi, r, p, inside & (r < R), h, R, P)


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
        parts = parts + (load_by_row(Psi, r, p, ok, h, R, P),)
    if Stored is None and Z is not None:
        parts = parts + (load_by_token(Z, token, p, inside, h, H, P), load_by_row(Zeta, r, p, ok, h, R, P))
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
def load_states(States, task, NT: tl.constexpr, NW: tl.constexpr, PT: tl.constexpr, PW: tl.constexpr):
    """Tiles [PW, NW] of one state [2, NH, PP], stored with P contiguous: lo and hi of every (i, u), i slowest."""
    tiles = ()
    NH: tl.constexpr = NT * NW
    PP: tl.constexpr = PT * PW
    for i in tl.static_range(NT):
        for u in tl.static_range(PT):
            at = States + task * (2 * NH * PP)
            at += (u * PW + tl.arange(0, PW))[:, None] + (i * NW + tl.arange(0, NW))[None, :] * PP
            tiles = tiles + (tl.load(at), tl.load(at + NH * PP))
    return tiles


@triton.jit
def by_state(x, states, u, M: tl.constexpr, NT: tl.constexpr, PT: tl.constexpr, PW: tl.constexpr):
    """Rows x (lo and hi of every i) times the state, columns of tile u: [M, PW]."""
    y = tl.zeros((M, PW), tl.float32)
    for i in tl.static_range(NT):
        y = dot(x[2 * i], tl.trans(states[2 * (i * PT + u)]), y)
        y = dot(x[2 * i + 1], tl.trans(states[2 * (i * PT + u) + 1]), y)
    return y


@triton.jit
def by_state_transposed(x, states, i, half, M: tl.constexpr, PT: tl.constexpr, NW: tl.constexpr):
    """Rows x (of every u) times the transposed state, columns of half a tile i: [M, NW]."""
    y = tl.zeros((M, NW), tl.float32)
    for u in tl.static_range(PT):
        y = dot(x[u], states[2 * (i * PT + u) + half], y)
    return y


@triton.jit
def products(a, b, M: tl.constexpr):
    """[M, M]: the sum of a[i] b[i]^T."""
    y = tl.zeros((M, M), tl.float32)
    for i in tl.static_range(len(a)):
        y = dot(a[i], tl.trans(b[i]), y)
    return y


@triton.jit
def by_column(x, RP: tl.constexpr):
    """[rows, C] -> [rows, C * RP]: what depends on a column's token alone, worked out once for all of its ranks."""
    x = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], RP))
    return tl.reshape(x, (x.shape[0], x.shape[1] * RP))


@triton.jit
def store_by_rank(Part, x, i, real: tl.constexpr, R: tl.constexpr, width, dtype: tl.constexpr):
    """Sum x [C, RP, W] over its tokens and store it as [R, width]; W is tile i of columns of which `real` are real.

    The sum is a matrix product with ones where a row has the rank of a column, cheaper than shuffles. The ones are
    laid out by rank: with them by row, ptxas 12.8 reads an unset register for the address of their second slice.
    """
    RP: tl.constexpr = x.shape[1]
    RE: tl.constexpr = RP if RP > 16 else 16
    r, column = tl.arange(0, RE), tl.arange(0, x.shape[2]) + i * x.shape[2]
    rank = tl.arange(0, x.shape[0] * RP) % RP
    picks = tl.where(r[:, None] == rank[None, :], 1.0, 0.0).to(dtype)
    total = dot(tl.trans(left(x, dtype)), tl.trans(picks))
    tl.store(Part + r[None, :] * width + column[:, None], total, mask=(r < R)[None, :] & (column < real)[:, None])


@triton.jit
def per_token(x, C: tl.constexpr, RP: tl.constexpr):
    """Sum over the ranks of one number a row: [C * RP] -> [C]."""
    return tl.sum(tl.reshape(x, (C, RP)), axis=1)
