"""Run in the environment of the Ascend compiler: compiles for Ascend 950 the fused kernel, the same without its
request to leave the split alone, and some of the operator's; prints what their planned HIVM shows, as JSON."""

import json
from dataclasses import asdict
from pathlib import Path

from mindspeed_mamba3_plugin.offline import a5, cases, compile_check, toolchain

OPTIONS = {"multibuffer": False, "enable_auto_bind_sub_block": False, "disable_auto_inject_block_sync": True}

compile_check.own_temporary_folder()
path = a5.compiler("1.2.0")
text = Path(__file__).with_name("fused_scores_a5.mlir").read_text()
alone = ", hivm.disable_auto_tile_and_bind_subblock"
assert alone in text
fused, guarded = (
    a5.examined("", toolchain.Lowered(name, source, OPTIONS), path)
    for name, source in (("fused", text), ("guarded", text.replace(alone, "")))
)
compiled = toolchain.compile_lowered(toolchain.Lowered("fused", text, OPTIONS), a5.ASCEND_950, path)
(shape,) = (s for s in cases.official_shapes() if s.name == "N128_P64_R4_C16")
rows = {
    row.kernel: asdict(row) for row in a5.rows([shape], "1.2.0") if row.kernel in ("_outer_kernel", "_values_kernel")
}
print(json.dumps({"fused": asdict(fused), "guarded": asdict(guarded), "hivm": compiled.hivm, **rows}))
