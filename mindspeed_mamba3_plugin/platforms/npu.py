"""Ascend NPUs through torch_npu. Never run on a chip: docs/ascend.md says what each call was checked against.

megatron-core names CUDA in places that no option reaches. `activate` hands those names to torch_npu's own redirection
and adds what that leaves out, for this process only; where MindSpeed's adaptor has run, everything is done already.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib.util import find_spec
from typing import Any

import torch

NAME = "npu"
COLLECTIVE_BACKEND = "hccl"


def device() -> torch.device:
    return torch.device("npu", torch.npu.current_device())


def synchronize() -> None:
    torch.npu.synchronize()


def peak_memory() -> int:
    """Bytes of this process's tensors on the device at their highest so far."""
    return torch.npu.max_memory_allocated()


def missing() -> str | None:
    """Why no NPU can be used in this process, with the remedy; None when one can. A torch_npu that cannot be loaded
    stops `import torch` itself unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set before."""
    if find_spec("torch_npu") is None:
        return (
            "torch_npu is not installed: install the release made for this PyTorch, "
            f"pip install torch_npu=={torch.__version__.partition('+')[0]}, and CANN"
        )
    try:
        import torch_npu  # noqa: F401  registers torch.npu
    except Exception as error:  # ImportError without CANN's libraries, RuntimeError on a wrong pair of versions
        return (
            f"torch_npu cannot be loaded ({error}): install CANN, run 'source <CANN>/set_env.sh' in this shell, and "
            f"check that torch_npu was made for PyTorch {torch.__version__}"
        )
    if not torch.npu.is_available():
        return (
            "torch_npu sees no NPU: check 'npu-smi info', that ASCEND_RT_VISIBLE_DEVICES does not hide it, and in a "
            "container that /dev/davinci* and the driver are passed into it"
        )
    return None


def activate(deterministic: bool = True) -> None:
    """Take the NPU of this rank and let megatron-core run on it; with `deterministic`, only algorithms that give the
    same bits every time, collectives included.

    Raises:
        RuntimeError: no NPU can be used here; the message names the remedy.
    """
    if (why := missing()) is not None:
        raise RuntimeError(f"platforms.npu.activate: {why}")
    torch.npu.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.npu.init()  # megatron's random states are set at once only on a device that is in use
    if deterministic:
        # HCCL reads it when its first communicator is made.
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
    torch.use_deterministic_algorithms(deterministic)
    if "mindspeed.megatron_adaptor" not in sys.modules:
        _redirect_cuda()


def _redirect_cuda() -> None:
    """torch.cuda's functions, device names, streams, random states and NCCL become torch.npu's and HCCL."""
    import torch._dynamo
    import torch_npu.contrib.transfer_to_npu  # noqa: F401  redirects on import

    # Releases of torch_npu leave this one out; megatron's tensor-parallel random states are set through it.
    torch.cuda.default_generators = torch.npu.default_generators
    # megatron-core compiles small functions when it is imported; compiling for an NPU needs another package.
    torch._dynamo.config.disable = True
    if not hasattr(torch.Tensor.type, "__wrapped__"):
        torch.Tensor.type = _with_cuda_names(torch.Tensor.type)


def _with_cuda_names(original: Any) -> Any:
    """Tensor.type for optimizers that sort parameters by names such as 'torch.cuda.FloatTensor'."""

    @functools.wraps(original)
    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.npu.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_of
