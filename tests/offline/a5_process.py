"""Run in the environment of the Ascend compiler: compiles for Ascend 950 the fused kernels at some shapes and, once
without its request to leave the split alone, products, and some of the plain ones; prints what their HIVM shows."""

import json
from dataclasses import asdict

import fused_a5

from mindspeed_mamba3_plugin.offline import a5, cases, compile_check, toolchain

ALONE = ", hivm.disable_auto_tile_and_bind_subblock"

compile_check.own_temporary_folder()
path = a5.compiler("1.2.0")
shapes = {s.name: s for s in cases.official_shapes()}
chosen = [
    shapes[n] for n in ("N128_P64_R4_C16", "N16_P64_R4_C8", "N256_P64_R4_C8", "N128_P64_R8_C8", "N128_P64_R1_C64")
]
text = fused_a5.text("products", 32, 4, 128, 64)
assert ALONE in text
guarded = toolchain.Lowered("guarded", text.replace(ALONE, ""), fused_a5.OPTIONS)
compiled = toolchain.compile_lowered(toolchain.Lowered("fused", text, fused_a5.OPTIONS), a5.ASCEND_950, path)
kernels = ("_scores_kernel", "_values_kernel")
found = {
    "fused": {s: {c.name: asdict(fused_a5.examined(s, c)) for c in chosen} for s in fused_a5.STAGES},
    "guarded": asdict(a5.examined("", guarded, path)),
    "hivm": compiled.hivm,
    "plain": {row.kernel: asdict(row) for row in a5.rows(chosen[:1], "1.2.0") if row.kernel in kernels},
}
print(json.dumps(found))
