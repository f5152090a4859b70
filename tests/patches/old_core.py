"""megatron-core 0.12 imports mamba_ssm and TransformerEngine for MambaMixer and its spec: empty modules for the
tests, which build neither."""

from __future__ import annotations

import sys

from mindspeed_mamba3_plugin.platforms import cpu


def stand_in() -> None:
    try:
        import megatron.core
    except ImportError:
        return
    if not megatron.core.__version__.startswith("0.12."):
        return
    for name in (
        "mamba_ssm.ops.triton.selective_state_update",
        "mamba_ssm.ops.triton.layernorm_gated",
        "mamba_ssm.ops.triton.ssd_combined",
        "causal_conv1d",
    ):
        path = name.split(".")
        for end in range(1, len(path) + 1):
            module = ".".join(path[:end])
            sys.modules.setdefault(module, cpu._Empty(module))
    cpu._import_extensions()
