"""megatron-core's optimizers: checkpoints of a model whose parameters are partly fp32 and partly bf16.

They are written for models of one dtype. Kept fp32 among bf16 (`keep_in_fp32`), a parameter would be saved under the
name of another, or the save would fail where their shapes differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from itertools import chain
from typing import Any

from ..config import Mamba3Config
from .engine import Patch

_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_FLOAT16 = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"


@lru_cache
def patches(settings: Mamba3Config, requires: str) -> tuple[Patch, ...]:
    """The changes to the optimizers, in order."""
    common = dict(flag="mamba3_params_dtype", value="fp32", requires=requires)
    return (
        Patch(
            f"{_DISTRIBUTED}._build_optimizer_group_ranges",
            "the distributed optimizer looks for its fp32 parameters where it puts them: before the others",
            wrapper=fp32_first_wrapper,
            parameters=("cls", "param_groups", "gbuf_ranges"),
            **common,
        ),
        Patch(
            f"{_DISTRIBUTED}._set_main_param_and_optimizer_states",
            "a checkpoint can be loaded into parameters that are their own fp32 copies",
            wrapper=set_states_wrapper,
            parameters=("self", "model_param", "tensors"),
            **common,
        ),
        Patch(
            f"{_DISTRIBUTED}.sharded_state_dict",
            "a checkpoint can be loaded with torch's own Adam, where there is neither TransformerEngine nor Apex",
            wrapper=states_first_wrapper,
            parameters=("self", "model_sharded_state_dict", "is_loading", "sharding_type", "metadata"),
            older=(("self", "model_sharded_state_dict", "is_loading", "sharding_type"),),
            **common,
        ),
        Patch(
            f"{_FLOAT16}.sharded_state_dict",
            "the plain mixed-precision optimizer names the state of fp32 parameters too",
            wrapper=mixed_state_wrapper,
            parameters=("self", "model_sharded_state_dict", "is_loading", "metadata"),
            older=(("self", "model_sharded_state_dict", "is_loading"),),
            **common,
        ),
    )


def fp32_first_wrapper(original: Callable) -> Callable:
    """_build_optimizer_group_ranges with each group's parameters, and their positions, in the order in which
    _build_model_and_main_param_groups hands them to the inner optimizer."""

    @wraps(original)
    def _build_optimizer_group_ranges(cls, param_groups, gbuf_ranges):
        import torch

        positions, ranges = original(cls, param_groups, gbuf_ranges)
        for group, found in enumerate(ranges):
            found["params"].sort(key=lambda p: p.dtype != torch.float32)
            positions.update({p: (group, i) for i, p in enumerate(found["params"])})
        return positions, ranges

    return _build_optimizer_group_ranges


def set_states_wrapper(original: Callable) -> Callable:
    """_set_main_param_and_optimizer_states without autograd, for it writes into views of parameters; and with torch's
    own Adam, whose state has a `step` of its own that is saved elsewhere."""

    @wraps(original)
    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        import torch

        if not self.config.use_precision_aware_optimizer:
            group, position = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][position]]
            if "step" in state:  # load_state_dict gave all parameters the same tensor, which each would count up
                state["step"] = state["step"].clone()
                tensors = {**tensors, "step": state["step"]}
        with torch.no_grad():
            return original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


def states_first_wrapper(original: Callable) -> Callable:
    """sharded_state_dict that makes the states to load into before it reads their common step, not after."""

    @wraps(original)
    def sharded_state_dict(self, model_sharded_state_dict, is_loading=False, *args, **kwargs) -> Any:
        from megatron.core.optimizer import distrib_optimizer

        missing = is_loading and not distrib_optimizer.HAVE_APEX_OR_TE and not self.optimizer.state
        if missing and hasattr(self, "_init_optimizer_states_with_dummy_values"):
            self._init_optimizer_states_with_dummy_values()
        return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    return sharded_state_dict


def mixed_state_wrapper(original: Callable) -> Callable:
    """sharded_state_dict whose numbering covers all parameters; the original numbers the half-precision ones only."""

    @wraps(original)
    def sharded_state_dict(self, model_sharded_state_dict, is_loading=False, *args, **kwargs) -> Any:
        if self.is_stub_optimizer or not any(self.fp32_from_fp32_groups):
            return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)
        from megatron.core.dist_checkpointing.optimizer import (
            get_param_id_to_sharded_param_map,
            make_sharded_optimizer_tensor,
            optim_state_to_sharding_state,
        )

        if is_loading:
            self.init_state_fn(self.optimizer, self.config)
        main = [p for group in self.optimizer.param_groups for p in group["params"]]
        number = {id(p): i for i, p in enumerate(main)}
        model_of = {
            id(m): p for p, m in zip(chain(*self.float16_groups), chain(*self.fp32_from_float16_groups), strict=True)
        }
        sharded = get_param_id_to_sharded_param_map(model_sharded_state_dict, [model_of.get(id(p), p) for p in main])
        state = self.state_dict()
        state["fp32_from_fp16_params"] = [
            [
                make_sharded_optimizer_tensor(sharded[number[id(p)]], p, prefix="optimizer.state.fp32_param")
                for p in group
            ]
            for group in self.fp32_from_float16_groups
        ]
        step = self._extract_common_per_param_step(state["optimizer"])
        optim_state_to_sharding_state(state["optimizer"], sharded, exclude_keys="step")
        if step:
            state["optimizer"]["state"]["common_step"] = step
        return state

    return sharded_state_dict
