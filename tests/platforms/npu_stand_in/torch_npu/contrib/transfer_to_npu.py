"""Stands in for torch_npu's redirection as its releases do it: what torch.npu publishes takes the place of
torch.cuda's, and "cuda" means the NPU wherever a device is named. Here that is the CPU."""

import functools

import torch

import torch_npu

torch_npu.calls.append(("redirected",))


def _device(given):
    return "cpu" if isinstance(given, int) or "cuda" in str(given) else given


def _moved(function):
    @functools.wraps(function)
    def moved(*arguments, **keywords):
        if keywords.get("device") is not None:
            keywords["device"] = _device(keywords["device"])
        return function(*arguments, **keywords)

    return moved


for name in torch_npu.PUBLIC:
    setattr(torch.cuda, name, getattr(torch_npu.npu, name))
torch.cuda.random.get_rng_state = torch_npu.npu.get_rng_state
for name in ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros"):
    setattr(torch, name, _moved(getattr(torch, name)))
torch.Tensor.cuda = lambda self, *_, **__: self
torch.nn.Module.cuda = lambda self, *_, **__: self
