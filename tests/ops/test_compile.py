"""The operator under torch.compile: one graph, any length, the results of eager mode."""

from dataclasses import replace

import pytest
import torch
from cases import DEVICE, make
from test_api import call, leaves

from mindspeed_mamba3_plugin.ops import registered
from mindspeed_mamba3_plugin.ops.types import TENSOR_ARGS, Inputs


def arguments(x: Inputs, kernel: str) -> tuple:
    return *x.tensors, *x.options.values(), kernel, kernel


def compiled(**options):
    def loss(x: Inputs, kernel: str):
        out = call(replace(x, V=x.V * 2), forward_kernel=kernel, backward_kernel=kernel)
        return out.square().sum(), out

    return torch.compile(loss, fullgraph=True, **options), loss


def check_lengths(backend: str, kernel: str, **options) -> None:
    ours, eager = compiled(backend=backend, dynamic=True)
    for S in (20, 36):
        a, b = (leaves(make(S=S, device=DEVICE, **options)) for _ in range(2))
        got, expected = ours(a, kernel), eager(b, kernel)
        assert torch.equal(got[1], expected[1])
        got[0].backward()
        expected[0].backward()
        for name, s, t in zip(TENSOR_ARGS, a.tensors, b.tensors, strict=True):
            if s is not None:
                torch.testing.assert_close(s.grad, t.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("reference", {}),
        ("triton", {"norm": True}),
        ("triton", {"reduce": False, "z": False, "d": False}),
    ],
)
def test_two_lengths_in_one_graph(kernel, options):
    check_lengths("aot_eager", kernel, **options)


@pytest.mark.gpu
def test_inductor_on_a_gpu():
    check_lengths("inductor", "triton", norm=True, dtype=torch.bfloat16)


def test_packed_input_in_one_graph():
    ours, eager = compiled(backend="aot_eager")
    x = make(S=36, cu_seqlens=[0, 20, 36], device=DEVICE)
    assert torch.equal(ours(x, "triton")[1], eager(x, "triton")[1])


@pytest.mark.parametrize("kernel", ["reference", "triton"])
@pytest.mark.parametrize("options", [{"norm": True}, {"z": False, "d": False, "S": 20}, {"cu_seqlens": [0, 20, 36]}])
def test_the_registered_op_keeps_its_promises(kernel, options):
    """Schema, fake implementation, autograd registration, and tracing with symbolic sizes."""
    torch.library.opcheck(registered.forward, arguments(leaves(make(**options, device=DEVICE)), kernel))


def test_the_state_in_one_graph_without_gradients():
    x = make(return_state=True, device=DEVICE)
    with torch.no_grad():
        ours = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
        for a, b in zip(ours, call(x), strict=True):
            assert torch.equal(a, b)


def test_a_loss_on_the_state_is_refused_when_compiled():
    x = leaves(make(return_state=True, device=DEVICE))
    out, _angle, ssm, _k, _v = torch.compile(call, backend="aot_eager")(x)
    out.sum().backward(retain_graph=True)
    assert x.V.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="loss on the returned state"):
        (out.sum() + ssm.sum()).backward()


def test_a_second_derivative_is_refused_when_compiled():
    x = leaves(make(S=20, device=DEVICE))
    (first,) = torch.autograd.grad(torch.compile(call, backend="aot_eager")(x).square().sum(), x.V, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|does not require grad"):
        first.sum().backward()


def test_a_broken_argument_is_named_when_compiled():
    x = make(device=DEVICE)
    with pytest.raises(ValueError, match="chunk_size is 4"):
        torch.compile(call, backend="aot_eager")(replace(x, chunk_size=4))
