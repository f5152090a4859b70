"""Tiles that the main kernels share: [C, RP, W], tokens of a block by ranks by columns, flattened to C * RP rows for
matrix products.

What depends on the token or the rank alone is loaded as [C, 1, W] or [1, RP, W] and broadcast. The state dimension is
kept in two halves, lo (n) and hi (N/2 + n), the partners of a rotation, so that rotating and un-rotating are
element-wise between two tiles of one layout. States are kept as [N/2, P] for each half.
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
def power2(x):
    """2^x; results below the smallest normal number are 0."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


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
def load(X, at, mask):
    return tl.load(X + at, mask=mask, other=0.0)


@triton.jit
def load_halves(
    X, Bias, token, r, n, ok, h, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The halves of X [C, RP, NH] and of its bias [1, RP, NH]."""
    at = ((token * R + r) * G + h // (H // G)) * N + n
    bias = (h * R + r) * N + n
    real = n < N // 2
    return (
        load(X, at, ok & real), load(X, at + N // 2, ok & real),
        load(Bias, tl.broadcast_to(bias, at.shape), ok & real),
        load(Bias, tl.broadcast_to(bias + N // 2, at.shape), ok & real),
    )  # fmt: skip


@triton.jit
def pin_halves(x):
    return pin(x[0]), pin(x[1]), pin(x[2]), pin(x[3])


@triton.jit
def rotated(halves, cos, sin):
    """(X + Bias) rotated, in fp32."""
    lo = halves[0].to(tl.float32) + halves[2].to(tl.float32)
    hi = halves[1].to(tl.float32) + halves[3].to(tl.float32)
    cos = cos.to(tl.float32)
    sin = sin.to(tl.float32)
    return lo * cos - hi * sin, lo * sin + hi * cos


@triton.jit
def load_turn(Cos, Sin, token, n, inside, A: tl.constexpr):
    """cos and sin of each token's angles, [C, 1, NH]; columns from A on are not rotated."""
    mask = inside & (n < A)
    return tl.load(Cos + token * A + n, mask=mask, other=1.0), load(Sin, token * A + n, mask)


@triton.jit
def load_by_token(X, token, p, inside, h, H: tl.constexpr, P: tl.constexpr):
    """[C, 1, PP] of X [T, H, P]"""
    return load(X, (token * H + h) * P + p, inside & (p < P))


@triton.jit
def load_by_rank(X, r, p, h, R: tl.constexpr, P: tl.constexpr):
    """[1, RP, PP] of X [H, R, P]"""
    return load(X, (h * R + r) * P + p, (r < R) & (p < P))


@triton.jit
def load_by_row(X, r, p, ok, h, R: tl.constexpr, P: tl.constexpr):
    """The same as a tile [C, RP, PP]: in the layout of what it multiplies, for some more loads that hit the cache."""
    return load(X, tl.broadcast_to((h * R + r) * P + p, (ok.shape[0], ok.shape[1], p.shape[2])), ok & (p < P))


@triton.jit
def load_out_gradient(
    dO, token, r, p, inside, h, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    REDUCED: tl.constexpr,
):  # fmt: skip
    """Gradient of the operator's output: [C, 1, PP], or [C, RP, PP] where the output is not reduced."""
    if REDUCED:
        g = load_by_token(dO, token, p, inside, h, H, P)
    else:
        g = load(dO, ((token * R + r) * H + h) * P + p, inside & (r < R) & (p < P))
    return g


@triton.jit
def load_core_parts(
    dO, Psi, Z, Zeta, Stored, token, r, p, inside, h, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """What the gradient of O (the scan's own output) is made of. With a norm it needs O, and was stored by `bwd_fwd`."""
    if Stored is not None:
        whole = load(Stored, ((token * H + h) * R + r) * P + p, inside & (r < R) & (p < P))
    else:
        whole = load_out_gradient(dO, token, r, p, inside, h, H, R, P, Psi is not None)
    psi = load_by_row(Psi, r, p, inside & (r < R), h, R, P) if Stored is None and Psi is not None else None
    z = load_by_token(Z, token, p, inside, h, H, P) if Stored is None and Z is not None else None
    zeta = load_by_row(Zeta, r, p, inside & (r < R), h, R, P) if Stored is None and Z is not None else None
    return whole, psi, z, zeta


@triton.jit
def pin_parts(x):
    psi = pin(x[1]) if x[1] is not None else None
    z = pin(x[2]) if x[2] is not None else None
    zeta = pin(x[3]) if x[3] is not None else None
    return pin(x[0]), psi, z, zeta


@triton.jit
def core_gradient(parts):
    """Gradient of O in fp32, [C, RP, PP]."""
    g = parts[0].to(tl.float32)
    if parts[1] is not None:
        g *= parts[1].to(tl.float32)
    if parts[2] is not None:
        gate = parts[2].to(tl.float32) * parts[3].to(tl.float32)
        g *= gate * sigmoid(gate)
    return g


@triton.jit
def by_rank(x, picks, acc):
    """acc + the sum of x [C, RP, W] over its tokens, transposed: [W, RE]; `picks` [C * RP, RE] is `rank_columns`."""
    return dot(tl.trans(left(x, picks.dtype)), picks, acc)


@triton.jit
def rank_columns(rank, RE: tl.constexpr, dtype: tl.constexpr):
    """[rows, RE] with a one where the column is the row's rank."""
    return tl.where(rank[:, None] == tl.arange(0, RE)[None, :], 1.0, 0.0).to(dtype)


@triton.jit
def store_by_rank(Part, x, column, W: tl.constexpr, R: tl.constexpr, RE: tl.constexpr, width):
    """Store x [columns, RE], `W` columns being real, as [R, width]."""
    r = tl.arange(0, RE)
    tl.store(Part + r[None, :] * width + column[:, None], x, mask=(r < R)[None, :] & (column < W)[:, None])


@triton.jit
def per_token(x, C: tl.constexpr, RP: tl.constexpr):
    """Sum over the ranks of one number a row: [C * RP] -> [C]."""
    return tl.sum(tl.reshape(x, (C, RP)), axis=1)


@triton.jit
def put(X, at, x, mask):
    tl.store(X + at, narrow(x, X.dtype.element_ty), mask=mask)
