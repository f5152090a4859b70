"""Tiles that the main kernels share: [C, RP, W], tokens of a block by ranks by columns, flattened to C * RP rows for
matrix products.

What depends on the token or the rank alone is loaded as [C, 1, W] or [1, RP, W] and broadcast. The state dimension is
kept in two halves, lo (n) and hi (N/2 + n), the partners of a rotation, so that rotating and un-rotating are
element-wise between two tiles of one layout. States are kept as [N/2, P] for each half.
"""

import triton
import triton.language as tl

from ..blocks import _INTERPRETED, dot, narrow, sigmoid


@triton.jit
def pin(x):
    """x itself, computed once: without this Triton repeats the whole chain that made x for every layout it needs.

    Loads after a pin wait for it, so a kernel issues its large loads first.
    """
    if _INTERPRETED or x.dtype.primitive_bitwidth != 16:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def flat(x):
    """[C, RP, W] -> [C * RP, W]"""
    return tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))


@triton.jit
def tall(x, RP: tl.constexpr):
    """[C * RP, W] -> [C, RP, W]"""
    return tl.reshape(x, (x.shape[0] // RP, RP, x.shape[1]))


@triton.jit
def operand(x, dtype: tl.constexpr):
    """[C, RP, W] in fp32 as rows of a matrix product."""
    return pin(flat(narrow(x, dtype)))


@triton.jit
def load(X, at, mask):
    return tl.load(X + at, mask=mask, other=0.0)


@triton.jit
def load_rotated(
    X, Bias, cos, sin, token, r, n, ok, h, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """The halves of X + Bias, rotated, as rows of a matrix product."""
    at = ((token * R + r) * G + h // (H // G)) * N + n
    mask = ok & (n < N // 2)
    by_rank = (r < R) & (n < N // 2)
    bias = (h * R + r) * N + n
    lo = load(X, at, mask).to(tl.float32) + load(Bias, bias, by_rank).to(tl.float32)
    hi = load(X, at + N // 2, mask).to(tl.float32) + load(Bias, bias + N // 2, by_rank).to(tl.float32)
    return operand(lo * cos - hi * sin, dtype), operand(lo * sin + hi * cos, dtype)


@triton.jit
def load_turn(Cos, Sin, token, n, inside, A: tl.constexpr):
    """cos and sin of each token's angles, [C, 1, NH]; columns from A on are not rotated."""
    mask = inside & (n < A)
    cos = tl.load(Cos + token * A + n, mask=mask, other=1.0).to(tl.float32)
    return cos, tl.load(Sin + token * A + n, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_by_token(X, token, p, inside, h, H: tl.constexpr, P: tl.constexpr):
    """[C, 1, PP] of X [T, H, P]"""
    return load(X, (token * H + h) * P + p, inside & (p < P)).to(tl.float32)


@triton.jit
def load_by_rank(X, r, p, h, R: tl.constexpr, P: tl.constexpr):
    """[1, RP, PP] of X [H, R, P]"""
    return load(X, (h * R + r) * P + p, (r < R) & (p < P)).to(tl.float32)


@triton.jit
def load_core_gradient(
    dO, Psi, Z, Zeta, Stored, token, r, p, inside, h, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Gradient of O (the scan's own output) [C, RP, PP]. With a norm it needs O, and was stored by `bwd_fwd`."""
    if Stored is not None:
        return load(Stored, ((token * H + h) * R + r) * P + p, inside & (r < R) & (p < P)).to(tl.float32)
    if Psi is not None:
        g = load_by_token(dO, token, p, inside, h, H, P) * load_by_rank(Psi, r, p, h, R, P)
    else:
        g = load(dO, ((token * R + r) * H + h) * P + p, inside & (r < R) & (p < P)).to(tl.float32)
    if Z is not None:
        gate = load_by_token(Z, token, p, inside, h, H, P) * load_by_rank(Zeta, r, p, h, R, P)
        g *= gate * sigmoid(gate)
    return g


@triton.jit
def by_rank(x, picks, acc):
    """acc + the sum of x [C, RP, W] over its tokens, transposed: [W, RE]; `picks` [C * RP, RE] is `rank_columns`."""
    return dot(tl.trans(operand(x, picks.dtype)), picks, acc)


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
