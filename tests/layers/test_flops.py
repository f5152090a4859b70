"""The formula against torch's own count of the matrix products that the reference runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mamba3_plugin.layers.flops import layer_flops


@pytest.mark.parametrize(
    "settings",
    [{}, {"mamba3_mimo_rank": 4, "mamba_num_groups": 3, "mamba3_rope_fraction": 1.0}, {"mamba3_chunk_size": 16}],
)
def test_formula_equals_counted_products(make_mixer, monkeypatch, settings):
    from building import HIDDEN

    from mindspeed_mamba3_plugin.layers import mamba3_mixer
    from mindspeed_mamba3_plugin.ops import reference
    from mindspeed_mamba3_plugin.ops.checks import checked
    from mindspeed_mamba3_plugin.ops.types import Inputs

    def differentiable_by_autograd(*, forward_kernel, backward_kernel, **kwargs):
        """The reference without the operator's autograd.Function, whose backward computes the forward again."""
        kwargs["fuse_norm"] = kwargs.pop("fuse_pregate_headwise_rms_norm")
        kwargs["norm_eps"] = kwargs.pop("outproj_norm_eps")
        return reference.chunk_form(checked(Inputs(**kwargs, return_state=False)))[0]

    monkeypatch.setattr(mamba3_mixer, "mamba3_mimo", differentiable_by_autograd)
    mixer = make_mixer(**settings)
    tokens = 32
    hidden = torch.randn(tokens, 1, HIDDEN, dtype=torch.float64, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out, _ = mixer(hidden)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    flops = layer_flops(mixer.sizes, mixer.settings.chunk_size)
    assert forward.get_total_flops() == tokens * flops.forward
    assert backward.get_total_flops() == tokens * flops.backward
    assert flops.total == flops.forward + flops.backward
