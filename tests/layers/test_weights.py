from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_mamba3_plugin.config import ConfigError
from mindspeed_mamba3_plugin.layers.sizes import MixerSizes
from mindspeed_mamba3_plugin.layers.weights import from_upstream, shard, to_upstream

SIZES = MixerSizes(hidden=5, heads=4, groups=2, rank=3, state=4, head_dim=2, angles=1)


def upstream_state(norm: bool = True) -> dict[str, torch.Tensor]:
    n = SIZES
    rows = 2 * 8 + 2 * 24 + 3 * 4 + 1
    shapes = {
        "in_proj.weight": (rows, 5), "dt_bias": (4,), "B_bias": (4, 3, 4), "C_bias": (4, 3, 4),
        "B_norm.weight": (4,), "C_norm.weight": (4,), "mimo_x": (4, 3, 2), "mimo_z": (4, 3, 2), "mimo_o": (4, 3, 2),
        "D": (4,), "out_proj.weight": (5, n.inner), **({"norm.weight": (8,)} if norm else {}),
    }  # fmt: skip
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


@pytest.mark.parametrize("norm", [False, True])
def test_round_trip(norm):
    state = upstream_state(norm)
    ours = from_upstream(state, SIZES)
    back = to_upstream({**ours, "in_proj._extra_state": None}, SIZES)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_rows_of_b_and_c_are_regrouped():
    state = upstream_state()
    ours = from_upstream(state, SIZES)["in_proj.weight"]
    theirs = state["in_proj.weight"]
    assert torch.equal(ours[:16], theirs[:16]) and torch.equal(ours[64:], theirs[64:76])
    for start in (16, 40):
        for g in range(2):
            for r in range(3):
                for n in range(4):
                    assert torch.equal(ours[start + (g * 3 + r) * 4 + n], theirs[start + (r * 2 + g) * 4 + n])


def test_shards_hold_whole_heads_and_groups():
    ours = from_upstream(upstream_state(), SIZES)
    first, second = (shard(ours, SIZES, 2, rank) for rank in (0, 1))
    parts = list(SIZES.in_proj_parts.values())
    whole = ours["in_proj.weight"].split(parts)
    for tp_rank, local in enumerate((first, second)):
        for part, mine in zip(whole, local["in_proj.weight"].split([p // 2 for p in parts]), strict=True):
            assert torch.equal(mine, part.chunk(2)[tp_rank])
    for name in ("dt_bias", "mimo_x", "norm_weight"):
        assert torch.equal(torch.cat([first[name], second[name]]), ours[name])
    assert torch.equal(torch.cat([first["out_proj.weight"], second["out_proj.weight"]], 1), ours["out_proj.weight"])
    for name in ("angle_proj", "B_norm.weight", "C_norm.weight"):
        assert torch.equal(first[name], ours[name]) and torch.equal(second[name], ours[name])


def test_groups_that_do_not_shard_are_a_projection_of_their_own():
    ours = from_upstream(upstream_state(), SIZES)
    whole = dict(
        zip(SIZES.in_proj_parts, ours["in_proj.weight"].split(list(SIZES.in_proj_parts.values())), strict=True)
    )
    for rank in range(4):
        local = shard(ours, SIZES, 4, rank)
        assert torch.equal(local["bc_proj"], torch.cat([whole["B"], whole["C"]]))
        mine = [whole[name].chunk(4)[rank] for name in ("z", "x", "dd_dt", "dd_A", "trap")]
        assert torch.equal(local["in_proj.weight"], torch.cat(mine))


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "read"),
    [
        (4, 2, 2, [[0], [1]]),
        (4, 2, 1, [[0, 1]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (6, 3, 2, [[0, 0, 1], [1, 2, 2]]),
        (6, 1, 3, [[0], [0], [0]]),
    ],
)
def test_groups_that_the_heads_of_a_rank_read(heads, groups, ranks, read):
    sizes = replace(SIZES, heads=heads, groups=groups)
    assert [sizes.groups_of(ranks, i) for i in range(ranks)] == read


def test_states_that_do_not_fit_are_refused():
    state = upstream_state()
    with pytest.raises(ValueError, match="state dict lacks mimo_x"):
        from_upstream({k: v for k, v in state.items() if k != "mimo_x"}, SIZES)
    with pytest.raises(ValueError, match=r"unknown conv1d\.weight; expected are B_bias"):
        from_upstream({**state, "conv1d.weight": state["D"]}, SIZES)
    with pytest.raises(ValueError, match=r"D has shape \(3,\): must be \(4,\)"):
        from_upstream({**state, "D": torch.ones(3)}, SIZES)
    with pytest.raises(ValueError, match=r"in_proj.weight has shape \(77, 5\): must be \(76, 5\)"):
        to_upstream({**from_upstream(state, SIZES), "in_proj.weight": state["in_proj.weight"]}, SIZES)
    with pytest.raises(ConfigError, match=r"--tensor-model-parallel-size 3: must divide .* Mamba heads.*4"):
        SIZES.local(3)
