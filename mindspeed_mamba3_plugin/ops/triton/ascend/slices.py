"""Tiles cut and put together in UB, which triton-ascend can: one transfer then brings what would take two."""

import triton.language as tl

from ..plan import Plan

try:  # from triton-ascend 3.2.1 on
    from triton.language.extra.cann.extension import extract_slice, insert_slice
except ImportError:  # 3.2.0 has them in the language; elsewhere no tile is cut
    extract_slice = getattr(tl, "extract_slice", None)
    insert_slice = getattr(tl, "insert_slice", None)


def can_cut(plan: Plan) -> bool:
    """Whether a kernel of this plan may call them."""
    return plan.cut_tiles and extract_slice is not None and insert_slice is not None
