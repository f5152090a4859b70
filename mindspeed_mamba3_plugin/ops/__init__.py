"""The Mamba-3 MIMO operator: what is computed. Knows nothing of Megatron."""

MIN_CHUNK_SIZE = 8  # tokens; what upstream's operator takes
