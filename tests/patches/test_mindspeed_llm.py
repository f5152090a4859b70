"""MindSpeed-LLM's Mamba-3 block on the plugin's operator: the contract on a stub; and, where the environment variable
MINDSPEED_LLM names a checkout of it, the block's real functions and module."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mindspeed_mamba3_plugin.patches import PatchError, mindspeed_llm

from mindspeed_mamba3_plugin.config import Mamba3Config
from mindspeed_mamba3_plugin.ops import api

# The block lays its causal mask [c, c, R, R] out as [c R, c R] without exchanging the middle dimensions: with R above
# 1, tokens see later ones and miss earlier ones. The comparison is with the mask that is meant.
MASK = (
    "mimo_mask_outer[..., :, :, None, None] * mimo_mask_inner",
    "mimo_mask_outer[..., :, None, :, None] * mimo_mask_inner[:, None, :]",
)
REFERENCE = Mamba3Config(mamba3_forward_kernel="reference", mamba3_backward_kernel="reference")
BLOCK = "mindspeed_llm.fsdp2.models.mamba3.mamba3_block"
STUB = f"""
    def apply_angle_dt_reference(angle, dt): pass
    def dacs_segsum_torch(da, chunk_size): pass
    def mamba3_MIMO_chunk_ref({", ".join(mindspeed_llm._CORE.split())}): pass
    class Mamba3:
        def forward(self, u, seq_idx=None, cu_seqlens=None, inference_params=None):
            assert cu_seqlens is None
            return mamba3_MIMO_chunk_ref(*u)
"""


@pytest.fixture(autouse=True)
def back():
    yield
    mindspeed_llm.revert()


@pytest.fixture
def parents(stub):
    path = BLOCK.split(".")
    for end in range(1, len(path)):
        stub(".".join(path[:end]))


def test_the_four_work_together_and_can_be_taken_back(parents, stub, monkeypatch):
    block = stub(BLOCK, STUB.replace("(*u)", "(**u)"))
    originals = dict(vars(block))
    seen = {}
    monkeypatch.setattr(api, "mamba3_mimo", lambda *a, **k: seen.update(args=a, **k) or "out")
    assert len(mindspeed_llm.apply(REFERENCE)) == 4
    assert mindspeed_llm.apply(REFERENCE) == ()
    assert block.apply_angle_dt_reference("angle", "dt") == "angle"
    assert block.dacs_segsum_torch("da", 16) == ("da", None, None)
    u = dict.fromkeys(mindspeed_llm._CORE.split(), None) | {
        "q": "q", "dA_cs": "adt", "angles": "angles", "mimo_o": "o", "chunk_size": 4, "dtype": torch.float32,
        "return_final_state": False, "contract_mimo_out": True,
    }  # fmt: skip
    assert block.Mamba3().forward(u, cu_seqlens="bounds") == ("out", None, None)
    assert seen["args"][0] == "q" and seen["args"][3] == "adt" and seen["args"][11] == "angles"
    assert seen["cu_seqlens"] == "bounds" and seen["forward_kernel"] == "reference"
    block.Mamba3().forward(u)
    assert seen["cu_seqlens"] is None, "the bounds are those of one call"
    mindspeed_llm.revert()
    assert all(vars(block)[name] is value for name, value in originals.items() if callable(value))


def test_another_core_is_refused(parents, stub):
    block = stub(BLOCK, STUB.replace("mamba3_MIMO_chunk_ref(q, ", "mamba3_MIMO_chunk_ref("))
    with pytest.raises(PatchError, match=r"mamba3_MIMO_chunk_ref takes \(k, "):
        mindspeed_llm.apply(REFERENCE)
    assert block.dacs_segsum_torch(1, 2) is None


@pytest.fixture
def real(stub, parents):
    """The real block, without the package around it, of which it needs one function."""
    if "MINDSPEED_LLM" not in os.environ:
        pytest.skip("MINDSPEED_LLM names no checkout of MindSpeed-LLM")
    stub("mindspeed_llm.fsdp2.utils")
    stub("mindspeed_llm.fsdp2.utils.global_vars").get_args = SimpleNamespace
    path = Path(os.environ["MINDSPEED_LLM"], *BLOCK.split(".")).with_suffix(".py")
    module = stub(BLOCK, path.read_text().replace(*MASK))
    yield module
    mindspeed_llm.revert()


def run_real(block, dtype: torch.dtype, inputs: dict[str, torch.Tensor], divisor: int) -> list[torch.Tensor]:
    """Output and gradients of the block's core, called as its own forward does."""
    x = {
        name: value.clone().to(dtype if name in "qkvz" else value.dtype).requires_grad_()
        for name, value in inputs.items()
    }
    angles = block.apply_angle_dt_reference(x["angles"], x["dt"].transpose(-1, -2))
    da, da_rev, _ = block.dacs_segsum_torch(x["adt"], 8)
    out, state, last_k = block.mamba3_MIMO_chunk_ref(
        q=x["q"], k=x["k"], v=x["v"], dA_cs=da, dA_cs_rev=da_rev, dt=x["dt"], trap=x["trap"], q_bias=x["q_bias"],
        k_bias=x["k_bias"], mimo_v=x["mimo_v"], mimo_z=x["mimo_z"], mimo_o=x["mimo_o"], angles=angles, D=x["D"],
        z=x["z"], chunk_size=8, rotary_dim_divisor=divisor, dtype=dtype, return_final_state=True,
    )  # fmt: skip
    out.float().square().sum().backward()
    return [out.detach(), state.detach(), last_k.detach(), *(value.grad for value in x.values())]


@pytest.mark.parametrize("divisor", [2, 4])
def test_equals_the_blocks_own_function(real, divisor):
    b, s, h, g, r, n, p = 2, 24, 4, 2, 2, 8, 8
    gen = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float32)

    dt = torch.nn.functional.softplus(rand(b, h, s) - 1)
    inputs = {
        "q": rand(b, s, r, g, n), "k": rand(b, s, r, g, n), "v": rand(b, s, h, p), "z": rand(b, s, h, p),
        "adt": -dt * rand(b, h, s).abs(), "dt": dt, "trap": rand(b, h, s), "q_bias": rand(h, r, n),
        "k_bias": rand(h, r, n), "mimo_v": rand(h, r, p), "mimo_z": rand(h, r, p), "mimo_o": rand(h, r, p),
        "angles": rand(b, s, h, n // divisor), "D": rand(h),
    }  # fmt: skip
    theirs = run_real(real, torch.float32, inputs, divisor)
    half = run_real(real, torch.bfloat16, inputs, divisor)
    mindspeed_llm.apply(REFERENCE)
    ours = run_real(real, torch.float32, inputs, divisor)
    our_half = run_real(real, torch.bfloat16, inputs, divisor)

    def off(got: torch.Tensor, want: torch.Tensor) -> float:
        return float((got.double() - want.double()).norm() / want.double().norm())

    for a, c in zip(ours, theirs, strict=True):
        assert off(a, c) < 1e-5
    print(f"bf16 output against fp32: theirs {off(half[0], theirs[0]):.1e}, ours {off(our_half[0], theirs[0]):.1e}")
    assert off(our_half[0], theirs[0]) < 0.5 * off(half[0], theirs[0]), "angles and decays in fp32"
