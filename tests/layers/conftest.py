"""A builder of mixers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def make_mixer(megatron) -> Callable:
    """make_mixer(**attributes of the TransformerConfig) -> Mamba3Mixer with small sizes, on the CPU."""
    from building import build_mixer, process_groups

    def make(seed: int = 0, layer_number: int = 1, **settings):
        torch.manual_seed(seed)
        return build_mixer(pg_collection=process_groups(), layer_number=layer_number, **settings)

    return make
