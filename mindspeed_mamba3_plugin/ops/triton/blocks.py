"""Device functions shared by the kernels."""

import os

import triton
import triton.language as tl

# The interpreter multiplies the raw bits of bf16 operands, without an error: there they are widened first.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a, b, acc=None):
    """a @ b in fp32; fp32 operands are multiplied exactly (no TF32)."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if acc is None:  # older compilers do not take None for acc
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), right for any x: exp grows to inf, of which the inverse is 0."""
    return opened(-x)


@triton.jit
def opened(minus_x):
    """sigmoid(x) from -x."""
    # Not with 1 for 2: the Ascend compiler makes a division of every product with 1 / y.
    return 2.0 / (2.0 + tl.exp(minus_x + 0.6931471805599453))


@triton.jit
def tanh(x):
    """tanh with a relative error of a few ulp, right for any x: exp grows to inf, of which the inverse is 0."""
    y = x * x
    return tl.where(y < 0.0625, _tanh_near_0(x, y), 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))


@triton.jit
def signed_tanh(x, far):
    """tanh(x) from tanh(|x|) by way of an exponential, which near 0 has none of its bits."""
    return tl.where(tl.abs(x) < 0.25, _tanh_near_0(x, x * x), tl.where(x >= 0, far, -far))


@triton.jit
def _tanh_near_0(x, y):
    """tanh(x) for |x| < 1/4, y = x x."""
    return x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 + y * (-1382 / 155925))))))


@triton.jit
def wrap(u):
    """u - 2 round(u / 2): an angle in half turns, brought into [-1, 1]. Exact in fp32."""
    return u - 2.0 * tl.floor(0.5 * u + 0.5)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 x in `dtype`, rounded to nearest even (the interpreter cuts bf16 off)."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def first_row(task, t, C: tl.constexpr, CS: tl.constexpr, RP: tl.constexpr):
    """The row of rank 0 and token t, the first of a tile inside a part of CS tokens; a rank further is CS rows on."""
    return (task * C + t // CS * CS) * RP + t % CS
