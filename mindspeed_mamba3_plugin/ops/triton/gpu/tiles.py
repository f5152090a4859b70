"""Tiles that the main kernels share: [C, RP, W], tokens of a chunk by ranks by columns, flattened to M = C * RP rows
for matrix products.

To the compiler a tile has four dimensions, [C / L, L, RP, W]: L tokens of fewer than four ranks make a group of four
rows, and every tile of a chunk of 64 rows then has the layout that four ranks have, in which a thread holds whole
groups and a change to or from a product's layout stays within a warp. What depends on the token or the rank alone has
a 1 in the other dimensions and is broadcast. The state dimension is kept in two halves, lo (n) and hi (N/2 + n), the
partners of a rotation, so that rotating and un-rotating are element-wise between two tiles of one layout. Columns are
cut into tiles of at most 64: NT of width NW in a half of the state dimension, PT of width PW in P; the tuples below
have an item for each.
"""

import triton
import triton.language as tl

from ..blocks import _INTERPRETED, dot, narrow, signed_tanh


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
    elif x.dtype.primitive_bitwidth == 64:
        x = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=x.dtype, is_pure=False, pack=1)
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
def anew(token, h, ANEW: tl.constexpr):
    """Tokens and head, with ANEW as numbers that the compiler has not seen: what was worked out from them, addresses
    above all, is then worked out again where it is needed next, and takes no registers until then."""
    if ANEW:
        token, h = pin(token), pin(h)
    return token, h


@triton.jit
def power2(x):
    """2^x; results below the smallest normal number are 0."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """1 / x within an ulp; a result below the smallest normal number is 0."""
    if _INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) within a few ulp, in two special-function instructions."""
    return reciprocal(1.0 + power2(-1.4426950408889634 * x))


@triton.jit
def tanh(x):
    """tanh with a relative error of a few ulp."""
    e = power2(-2.8853900817779268 * tl.abs(x))
    return signed_tanh(x, (1.0 - e) * reciprocal(1.0 + e))


@triton.jit
def flat(x):
    """A tile as the rows of a matrix, [C * RP, W]."""
    return tl.reshape(x, (x.shape[0] * x.shape[1] * x.shape[2], x.shape[3]))


@triton.jit
def tall(x, RP: tl.constexpr):
    """[C * RP, W] as a tile."""
    L: tl.constexpr = 4 // RP if RP < 4 else 1
    return tl.reshape(x, (x.shape[0] // (RP * L), L, RP, x.shape[1]))


@triton.jit
def token_and_rank(C: tl.constexpr, RP: tl.constexpr):
    """Numbers of a tile's tokens, [C / L, L, 1, 1], and of its ranks, [1, 1, RP, 1]."""
    L: tl.constexpr = 4 // RP if RP < 4 else 1
    c = tl.arange(0, C // L)[:, None, None, None] * L + tl.arange(0, L)[None, :, None, None]
    return c, tl.arange(0, RP)[None, None, :, None]


@triton.jit
def place(table, T, H: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Where a program works: its chunk and head h, the chunk's first token and number of tokens, where the head's row
    of an [., H, T] array begins and what is from one such row set to the next; of its tile the tokens, the ranks, and
    whether a token is inside."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(table + 4 * chunk).to(tl.int64)
    reach = tl.load(table + 4 * chunk + 1)
    c, r = token_and_rank(C, RP)
    return chunk, h, start, reach, h.to(tl.int64) * T, tl.cast(T, tl.int64) * H, start + c, r, c < reach


@triton.jit
def rest(x, high):
    """What rounding fp32 x to `high` left, rounded likewise."""
    return narrow(x - high.to(tl.float32), high.dtype)


@triton.jit
def put_in_two(To, x):
    """An fp32 number as it is rounded and what that left, one after the other: for sums of which much may cancel."""
    high = narrow(x, To.dtype.element_ty)
    tl.store(To, high)
    tl.store(To + 1, rest(x, high))


@triton.jit
def left(x, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """[C, RP, W] in fp32 as the left operand of a matrix product."""
    high = narrow(x, dtype)
    operand = (pin(flat(high)),)
    if SPLIT:
        operand = operand + (pin(flat(rest(x, high))),)
    return operand


@triton.jit
def left_matrix(x, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """A matrix in fp32 as a left operand."""
    high = narrow(x, dtype)
    operand = (pin(high),)
    if SPLIT:
        operand = operand + (pin(rest(x, high)),)
    return operand


@triton.jit
def right(x, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """[C, RP, W] in fp32 as the right operand of a matrix product: in shared memory, whatever made it."""
    high = narrow(x, dtype)
    operand = (flat(high),)
    if SPLIT:
        operand = operand + (flat(rest(x, high)),)
    return operand


@triton.jit
def transposed(operand):
    turned = ()
    for i in tl.static_range(len(operand)):
        turned = turned + (tl.trans(operand[i]),)
    return turned


@triton.jit
def whole(operand):
    """An operand as one matrix in fp32."""
    x = operand[0].to(tl.float32)
    if len(operand) == 2:
        x += operand[1].to(tl.float32)
    return x


@triton.jit
def multiply(a, b, acc=None):
    """acc + a b in fp32. The product of two low parts is less than what rounding left of both."""
    for i in tl.static_range(len(a)):
        for j in tl.static_range(len(b)):
            if i + j < 2:
                acc = dot(a[i], b[j], acc)
    return acc


@triton.jit
def side_by_side(a, b):
    """Two tiles of width W as one matrix, [C * RP, 2 W]."""
    x = tl.permute(tl.join(a, b), (0, 1, 2, 4, 3))
    return tl.reshape(x, (a.shape[0] * a.shape[1] * a.shape[2], 2 * a.shape[3]))


@triton.jit
def apart(x, RP: tl.constexpr):
    """[C * RP, 2 W] as two tiles."""
    L: tl.constexpr = 4 // RP if RP < 4 else 1
    x = tl.reshape(x, (x.shape[0] // (RP * L), L, RP, 2, x.shape[1] // 2))
    return tl.split(tl.permute(x, (0, 1, 2, 4, 3)))


@triton.jit
def left_halves(halves, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """Both halves in fp32 as one left operand."""
    lo, hi = narrow(halves[0], dtype), narrow(halves[1], dtype)
    operand = (pin(side_by_side(lo, hi)),)
    if SPLIT:
        operand = operand + (pin(side_by_side(rest(halves[0], lo), rest(halves[1], hi))),)
    return operand


@triton.jit
def right_halves(halves, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """Both halves in fp32 as one right operand."""
    lo, hi = narrow(halves[0], dtype), narrow(halves[1], dtype)
    operand = (side_by_side(lo, hi),)
    if SPLIT:
        operand = operand + (side_by_side(rest(halves[0], lo), rest(halves[1], hi)),)
    return operand


@triton.jit
def columns(i, W: tl.constexpr):
    """Column numbers of tile i, [1, 1, W]."""
    return i * W + tl.arange(0, W)[None, None, None, :]


@triton.jit
def addresses(X, at):
    """X + at. The columns of a small tile are declared contiguous only as far as a row for every group still has
    something for each of 128 threads: Triton then gives all tiles one layout, and changes none of them."""
    to = X + at
    if len(to.shape) == 4:
        EACH: tl.constexpr = to.shape[0] * to.shape[3] // 128
        if to.shape[0] > 1 and to.shape[3] > 1 and EACH < 8:
            to = tl.max_contiguous(to, [1, 1, 1, EACH if EACH > 1 else 1])
    return to


@triton.jit
def load(X, at, mask):
    return tl.load(addresses(X, at), mask=mask, other=0.0)


@triton.jit
def put(X, at, x, mask):
    tl.store(addresses(X, at), narrow(x, X.dtype.element_ty), mask=mask)


@triton.jit
def rotated(halves, turn):
    """(X + Bias) rotated, both halves in fp32."""
    lo = halves[0].to(tl.float32) + halves[2].to(tl.float32)
    hi = halves[1].to(tl.float32) + halves[3].to(tl.float32)
    cos = turn[0].to(tl.float32)
    sin = turn[1].to(tl.float32)
    return lo * cos - hi * sin, lo * sin + hi * cos


@triton.jit
def cross(lo, hi, halves, turn, dtype: tl.constexpr):
    """Gradient of the angles, [C, 1, NW], from that of the rotated X + Bias.

    X is rounded as in the products: what two tokens of a chunk owe each other then cancels where both are turned.
    """
    x_lo, x_hi = rotated(halves, turn)
    return over_ranks(hi * narrow(x_lo, dtype).to(tl.float32) - lo * narrow(x_hi, dtype).to(tl.float32))


@triton.jit
def by_state(x, states, u, M: tl.constexpr, NT: tl.constexpr, PT: tl.constexpr, PW: tl.constexpr):
    """Rows x (both halves of every i) times the state, columns of tile u: [M, PW]."""
    y = tl.zeros((M, PW), tl.float32)
    for i in tl.static_range(NT):
        y = multiply(x[i], transposed(states[i * PT + u]), y)
    return y


@triton.jit
def by_state_transposed(x, states, i, M: tl.constexpr, PT: tl.constexpr, NW: tl.constexpr):
    """Rows x (of every u) times the transposed state, columns of both halves of tile i: [M, 2 NW]."""
    y = tl.zeros((M, 2 * NW), tl.float32)
    for u in tl.static_range(PT):
        y = multiply(x[u], states[i * PT + u], y)
    return y


@triton.jit
def products(a, b, M: tl.constexpr):
    """[M, M]: the sum of a[i] b[i]^T."""
    y = tl.zeros((M, M), tl.float32)
    for i in tl.static_range(len(a)):
        y = multiply(a[i], transposed(b[i]), y)
    return y


@triton.jit
def by_column(x, RP: tl.constexpr):
    """[rows, C] -> [rows, C * RP]: what depends on a column's token alone, worked out once for all of its ranks."""
    x = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], RP))
    return tl.reshape(x, (x.shape[0], x.shape[1] * RP))


@triton.jit
def store_by_rank(
    Part, xs, step, i, real: tl.constexpr, R: tl.constexpr, width, dtype: tl.constexpr, SPLIT: tl.constexpr
):
    """Sum one or two tiles [C, RP, W] over their tokens and store each as [R, width], `step` apart; W is tile i of
    columns of which `real` are real.

    The sum is a matrix product with ones where a row has the rank of a column, cheaper than shuffles. The ones are
    laid out by rank: with them by row, ptxas 12.8 reads an unset register for the address of their second slice.
    """
    RP: tl.constexpr = xs[0].shape[2]
    W: tl.constexpr = xs[0].shape[3]
    M: tl.constexpr = xs[0].shape[0] * xs[0].shape[1] * RP
    RE: tl.constexpr = RP if RP > 16 else 16
    if len(xs) == 2:
        x = left_halves(xs, dtype, SPLIT)
    else:
        x = left(xs[0], dtype, SPLIT)
    r, column = tl.arange(0, RE), tl.arange(0, len(xs) * W)
    rank = tl.arange(0, M) % RP
    picks = tl.where(r[:, None] == rank[None, :], 1.0, 0.0).to(dtype)
    total = multiply(transposed(x), (tl.trans(picks),))
    step, column = column // W * step, column % W + i * W
    at = tl.max_contiguous(Part + r[None, :] * width + (step + column)[:, None], [4, 1])
    tl.store(at, narrow(total, Part.dtype.element_ty), mask=(r < R)[None, :] & (column < real)[:, None])


@triton.jit
def per_token(x, C: tl.constexpr, RP: tl.constexpr):
    """Sum over the ranks of one number a row: [C * RP] -> [C]."""
    return tl.sum(tl.reshape(x, (C, RP)), axis=1) if RP > 1 else x


@triton.jit
def put_pair_per_token(To, a, b, stride, reach, C: tl.constexpr, RP: tl.constexpr):
    """Sum two numbers a row, [C * RP], over the ranks and store them `stride` apart: both at once, since every change
    of layout is a barrier or two."""
    x = tl.join(a, b)
    if RP > 1:
        x = tl.sum(tl.reshape(x, (C, RP, 2)), axis=1)
    token = tl.arange(0, C)[:, None]
    put(To, token + tl.arange(0, 2)[None, :] * stride, x, token < reach)


@triton.jit
def over_ranks(x):
    """Sum of a tile over the ranks."""
    return tl.sum(x, axis=2, keep_dims=True) if x.shape[2] > 1 else x
