"""Stages `outputs` and `products` as fused kernels for Ascend 950; run in the environment of the Ascend compiler:

PYTHONPATH=. .venv-ascend/bin/python tests/offline/fused_a5.py [--write docs/ascend.md]
"""

import argparse
from pathlib import Path
from string import Template

from mindspeed_mamba3_plugin.offline import a5, cases, compile_check, report, toolchain
from mindspeed_mamba3_plugin.ops.triton.plan import next_power_of_2

OPTIONS = {"multibuffer": False, "enable_auto_bind_sub_block": False, "disable_auto_inject_block_sync": True}
ROWS = 128  # of a chunk, as on a 910B
TOKENS = 64
STAGES = ("outputs", "products")


def text(stage: str, C: int, R: int, N: int, P: int) -> str:
    """The kernel of a stage for chunks of C tokens (a multiple of 16) of R ranks; N and P are multiples of 16."""
    M, half = R * C, C // 2
    sizes = {
        "C": C,
        "R": R,
        "N": N,
        "P": P,
        "M": M,
        "H": half,
        "M1": M // 16,
        "C1": C // 16,
        "C16": C * 16,
        "STEP": half,
    }
    sizes |= {"CM": C * M, "HM": half * M, "MN": M * N, "MP": M * P, "NP": N * P, "CN": C * N, "CP": C * P}
    return Template(Path(__file__).with_name(f"fused_{stage}_a5.mlir").read_text()).substitute(sizes)


def examined(stage: str, shape: cases.Shape) -> a5.Row:
    """The kernel of a stage at the sizes of an official shape."""
    R = next_power_of_2(shape.R)
    source = text(stage, min(TOKENS, ROWS // R), R, shape.N, shape.P)
    return a5.examined(shape.name, toolchain.Lowered(stage, source, OPTIONS), a5.compiler("1.2.0"))


def table(rows: dict[str, list[a5.Row]]) -> str:
    """On-chip bytes by stage and shape."""
    lines = []
    for stage, own in rows.items():
        lines += [
            [f"{stage} {name}", *(str(r.used.get(m, r.error)) for r in own)] for m, name in report.MEMORIES.items()
        ]
        lines.append([f"{stage}, vector cores", *("1" if r.one_core or r.error else "2" for r in own)])
    shapes = [row.shape.rpartition("_C")[0] for row in next(iter(rows.values()))]
    return report.table(["fused", *shapes], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this Markdown file")
    given = parser.parse_args()
    compile_check.own_temporary_folder()
    found = table({stage: [examined(stage, s) for s in cases.official_shapes()] for stage in STAGES})
    print(found)
    if given.write:
        report.write(given.write, "a5-fused", found, by="tests/offline/fused_a5.py")


if __name__ == "__main__":
    main()
