"""Stage `outputs` as a fused kernel for Ascend 950; run in the environment of the Ascend compiler:

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


def text(C: int, R: int, N: int, P: int) -> str:
    """The kernel for chunks of C tokens (a multiple of 16) of R ranks; N and P are multiples of 16."""
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
    return Template(Path(__file__).with_name("fused_outputs_a5.mlir").read_text()).substitute(sizes)


def examined(shape: cases.Shape) -> a5.Row:
    """The kernel at the sizes of an official shape."""
    R = next_power_of_2(shape.R)
    source = text(min(TOKENS, ROWS // R), R, shape.N, shape.P)
    return a5.examined(shape.name, toolchain.Lowered("fused outputs", source, OPTIONS), a5.compiler("1.2.0"))


def table(rows: list[a5.Row]) -> str:
    head = ["fused outputs", *(row.shape.rpartition("_C")[0] for row in rows)]
    lines = [[name, *(str(row.used.get(m, row.error)) for row in rows)] for m, name in report.MEMORIES.items()]
    cores = ["vector cores at work", *("1" if row.one_core or row.error else "2" for row in rows)]
    return report.table(head, [*lines, cores])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this Markdown file")
    given = parser.parse_args()
    compile_check.own_temporary_folder()
    found = table([examined(shape) for shape in cases.official_shapes()])
    print(found)
    if given.write:
        report.write(given.write, "a5-fused", found, by="tests/offline/fused_a5.py")


if __name__ == "__main__":
    main()
