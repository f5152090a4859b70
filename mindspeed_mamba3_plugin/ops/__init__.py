"""The Mamba-3 MIMO operator: what is computed. Knows nothing of Megatron."""
