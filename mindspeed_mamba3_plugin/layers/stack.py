"""`--spec mindspeed_mamba3_plugin.layers.stack stack_spec`: Megatron reads a module's attribute, not a function."""

from .specs import hybrid_stack_spec

stack_spec = hybrid_stack_spec()
