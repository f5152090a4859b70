"""The look at machine code; that kernels compile is for the script itself, which needs minutes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
pytest.importorskip("triton")
from check_gpu_compile import unset_reads

# As cuobjdump prints it. A product's left operand is in registers: only the second descriptor of four is read.
SOUND = """
        /*0390*/                   UMOV UR47, 0x40000040 ;                 /* 0x40000040002f7882 */
        /*7d40*/                   USGXT.U32 UR46, UR63, 0xe ;             /* 0x0000000e */
        /*7d60*/                   HGMMA.64x64x16.F32.BF16 R88, R140, gdesc[UR44], RZ, !UPT ;
        /*7d70*/                   UIADD3 UR42, UP1, UR46, 0x2, URZ ;      /* 0x00000002 */
        /*7d90*/                   UIADD3.X UR43, UR47, 0x40000040, URZ, UP1, !UPT ;
        /*7da0*/                   UIADD3.64 UR6, UR42, 0x2, URZ ;
        /*7db0*/              @!P2 HGMMA.64x64x16.F32.BF16 R88, R176, gdesc[UR4], R88, gsb0 ;
"""


def test_sound_code_passes():
    assert unset_reads(SOUND) == []


@pytest.mark.parametrize("removed", ["UMOV UR47", "USGXT.U32 UR46", "UIADD3.X UR43"])
def test_a_register_that_nothing_sets_is_found(removed):
    lines = [line for line in SOUND.splitlines() if removed not in line]
    assert len(lines) == len(SOUND.splitlines()) - 1
    assert unset_reads("\n".join(lines))


def test_a_left_operand_in_shared_memory_needs_its_descriptor():
    found = unset_reads(SOUND.replace("R88, R140, gdesc[UR44]", "R88, gdesc[UR44]"))
    assert len(found) == 1 and found[0].startswith("7d60: HGMMA")
