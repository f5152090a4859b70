"""The cost model: work read off planned HIVM, and what it costs, against numbers computed by hand."""

from dataclasses import replace

import pytest

from mindspeed_mamba3_plugin.offline import hivm
from mindspeed_mamba3_plugin.offline.cost import FITS, INF, Constants, Work, estimate
from mindspeed_mamba3_plugin.offline.estimate import Stage, verdict
from mindspeed_mamba3_plugin.offline.work import of_launch

CORES = 20, 40  # of the cube and of the vector kind
UB, GM, L1, L0C = (f"#hivm.address_space<{s}>" for s in ("ub", "gm", "cbuf", "cc"))

# 12 tasks for 4 programs, so 3 for the first; each walks INNER times over a tile of 64 rows of 128 bytes.
VECTOR = f"""
  func.func @k(%arg0: i64, %arg3: memref<?xbf16, {GM}>, %arg4: i32, %arg5: i32) attributes {{a = #b<c>}} {{
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %inner = arith.constant INNER : index
    %c0_i64 = arith.constant 0 : i64
    %0 = hivm.hir.pointer_cast(%c0_i64) : memref<64x64xbf16, {UB}>
    %1 = hivm.hir.pointer_cast(%c0_i64) : memref<64x64xf32, {UB}>
    %2 = hivm.hir.get_block_idx -> i64
    %3 = arith.trunci %2 : i64 to i32
    scf.for %arg9 = %3 to %arg4 step %arg5  : i32 {{
      scf.for %arg10 = %c0 to %inner step %c1 {{
        %4 = memref.reinterpret_cast %arg3 to offset: [%c0], sizes: [64, 64], strides: [STRIDE, 1] : memref<?xbf16, {GM}> to memref<64x64xbf16, strided<[STRIDE, 1], offset: ?>, {GM}>
        scf.if %9 {{
          hivm.hir.vbrc ins(%cst : bf16) outs(%0 : memref<64x64xbf16, {UB}>)
        }} {{hivm.unlikely_condition}}
        hivm.hir.load ins(%4 : memref<64x64xbf16, strided<[STRIDE, 1], offset: ?>, {GM}>) outs(%0 : memref<64x64xbf16, {UB}>)
        hivm.hir.vcast ins(%0 : memref<64x64xbf16, {UB}>) outs(%1 : memref<64x64xf32, {UB}>)
        hivm.hir.vexp ins(%1 : memref<64x64xf32, {UB}>) outs(%1 : memref<64x64xf32, {UB}>)
      }}
      hivm.hir.store ins(%0 : memref<64x64xbf16, {UB}>) outs(%4 : memref<64x64xbf16, strided<[STRIDE, 1], offset: ?>, {GM}>)
    }}
    return
  }}
"""  # noqa: E501

# One product of 32 x 128 by 128 x 64 for each of 2 tasks, through the workspace to the vector cores.
MIXED = f"""
  func.func @k_mix_aic(%arg0: i64, %arg2: memref<?xi8, {GM}>, %arg3: memref<?xbf16, {GM}>) attributes {{a = #b<c>}} {{
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c2 = arith.constant 2 : index
    %c32 = arith.constant 32 : index
    %c64 = arith.constant 64 : index
    %c128 = arith.constant 128 : index
    %c0_i64 = arith.constant 0 : i64
    %0 = hivm.hir.pointer_cast(%c0_i64) : memref<8x2x16x16xbf16, {L1}>
    %1 = hivm.hir.pointer_cast(%c0_i64) : memref<4x2x16x16xf32, {L0C}>
    scf.for %arg9 = %c0 to %c2 step %c1 {{
      %2 = memref.reinterpret_cast %arg3 to offset: [%c0], sizes: [32, 128], strides: [128, 1] : memref<?xbf16, {GM}> to memref<32x128xbf16, strided<[128, 1], offset: ?>, {GM}>
      hivm.hir.nd2nz {{dst_continuous}} ins(%2 : memref<32x128xbf16, strided<[128, 1], offset: ?>, {GM}>) outs(%0 : memref<8x2x16x16xbf16, {L1}>) init_out_buffer = false
      hivm.hir.mmadL1 ins(%0, %0, %true, %c32, %c128, %c64 : memref<8x2x16x16xbf16, {L1}>, memref<8x2x16x16xbf16, {L1}>, i1, index, index, index) outs(%1 : memref<4x2x16x16xf32, {L0C}>)
      %view = memref.view %arg2[%c0][] : memref<?xi8, {GM}> to memref<32x64xf32, {GM}>
      hivm.hir.fixpipe {{enable_nz2nd}} ins(%1 : memref<4x2x16x16xf32, {L0C}>) outs(%view : memref<32x64xf32, {GM}>)
    }}
    return
  }}
  func.func @k_mix_aiv(%arg0: i64, %arg2: memref<?xi8, {GM}>) attributes {{a = #b<c>}} {{
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c2 = arith.constant 2 : index
    %c0_i64 = arith.constant 0 : i64
    %0 = hivm.hir.pointer_cast(%c0_i64) : memref<16x64xf32, {UB}>
    %1 = hivm.hir.get_sub_block_idx -> i64
    scf.for %arg9 = %c0 to %c2 step %c1 {{
      hivm.hir.sync_block_wait[<VECTOR>, <PIPE_FIX>, <PIPE_S>] flag = 1
      %view = memref.view %arg2[%c0][] : memref<?xi8, {GM}> to memref<32x64xf32, {GM}>
      %subview = memref.subview %view[%1, 0] [16, 64] [1, 1] : memref<32x64xf32, {GM}> to memref<16x64xf32, strided<[64, 1], offset: ?>, {GM}>
      hivm.hir.load ins(%subview : memref<16x64xf32, strided<[64, 1], offset: ?>, {GM}>) outs(%0 : memref<16x64xf32, {UB}>)
      hivm.hir.vmul ins(%0, %0 : memref<16x64xf32, {UB}>, memref<16x64xf32, {UB}>) outs(%0 : memref<16x64xf32, {UB}>)
    }}
    return
  }}
"""  # noqa: E501


def vector_work(inner: int = 5, stride: int = 1024) -> Work:
    text = VECTOR.replace("INNER", str(inner)).replace("STRIDE", str(stride))
    return of_launch(hivm.read(text, hivm.argument_names([None, 12], (4,))), 4, *CORES)


def test_work_of_a_vector_kernel():
    tile = 64 * 64 * 2
    expected = Work(
        tasks=3, transfers=3 * 6, loaded_short=3 * 5 * tile, vector_calls=3 * 5 * 2,
        vector_cycles=3 * 5 * (64 + 4 * 64), memory_bytes=4 * 3 * 6 * tile,
    )  # fmt: skip
    assert vector_work() == expected


@pytest.mark.parametrize(
    "stride, expected",
    [
        (64, {"loaded_long": 3 * 5 * 8192}),  # one run of 8 KiB
        (1024, {"loaded_short": 3 * 5 * 8192}),  # rows of 128 bytes
    ],
)
def test_rows_are_as_long_as_they_lie_in_memory(stride, expected):
    work = vector_work(stride=stride)
    assert {n: getattr(work, n) for n in ("loaded_long", "loaded_short") if getattr(work, n)} == expected


@pytest.mark.parametrize("width, field", [(32, "rows"), (20, "unaligned_rows")])
def test_short_and_unaligned_rows_cost_as_rows(width, field):
    text = VECTOR.replace("INNER", "5").replace("STRIDE", "1024").replace("64x64x", f"64x{width}x")
    work = of_launch(hivm.read(text, hivm.argument_names([None, 12], (4,))), 4, *CORES)
    assert getattr(work, field) == 3 * 5 * 64 and work.loaded_short == work.loaded_long == 0


def test_a_doubled_loop_doubles_what_is_inside_and_nothing_else():
    once, twice = vector_work(inner=5), vector_work(inner=10)
    inside = ("loaded_short", "vector_calls", "vector_cycles")
    assert {n: getattr(twice, n) for n in inside} == {n: 2 * getattr(once, n) for n in inside}
    stored = 3  # outside the loop
    assert twice.transfers - stored == 2 * (once.transfers - stored)
    assert twice.tasks == once.tasks


def test_twice_the_tasks_take_twice_the_time_but_for_the_launch():
    text = VECTOR.replace("INNER", "5").replace("STRIDE", "1024")
    times = [
        [
            estimate(of_launch(hivm.read(text, hivm.argument_names([None, tasks], (4,))), 4, *CORES), c).ns - c.launch
            for c in FITS.values()
        ]
        for tasks in (12, 24)
    ]
    assert times[1] == pytest.approx([2 * t for t in times[0]])


def test_work_of_a_mixed_kernel():
    work = of_launch(hivm.read(MIXED), 20, *CORES)
    exchanged = 32 * 64 * 4 * 2  # out of the cube core, and into its two vector cores
    assert work == Work(
        mixed=True, cube_calls=2 * 2, cube_cycles=2 * 32 * 128 * 64 / 4096, transfers=2, handovers=2,
        loaded_long=2 * 16 * 64 * 4, vector_calls=2, vector_cycles=2 * 16,
        memory_bytes=20 * 2 * (32 * 128 * 2 + exchanged), workspace_bytes=20 * 2 * exchanged,
    )  # fmt: skip


def test_an_unsplit_vector_half_moves_everything_once_per_core():
    text = MIXED.replace("get_sub_block_idx", "get_block_idx")  # both cores do all
    assert (
        of_launch(hivm.read(text), 20, *CORES).workspace_bytes
        == of_launch(hivm.read(MIXED), 20, *CORES).workspace_bytes
    )
    guarded = MIXED.replace("%1 = hivm", "// limit_sub_block_id0\n    %1 = hivm")
    alone = of_launch(hivm.read(guarded), 20, *CORES)
    assert alone.workspace_bytes == 20 * 2 * 32 * 64 * 4 * 1.5


def test_more_programs_than_cores_run_in_rounds():
    one, four = (of_launch(hivm.read(MIXED), programs, *CORES) for programs in (20, 64))
    assert four.cube_calls == 4 * one.cube_calls and four.vector_cycles == 4 * one.vector_cycles
    assert four.memory_bytes == one.memory_bytes / 20 * 64


SIMPLE = Constants(
    vector_call=10, transfer_call=20, mixed_call=100, hbm=1000, memory=2000, load=20, load_short=10, row=8,
    unaligned_row=30, overlap=0.25, launch=1000, task=0,
)  # fmt: skip


def test_the_busiest_unit_and_what_it_does_not_hide():
    work = Work(vector_cycles=1800, vector_calls=100, transfers=10, loaded_long=2000, memory_bytes=1_000_000)
    judged = estimate(work, SIMPLE)  # memory 1000, vector 1000 + 1000, transfers 200 + 100
    assert judged.units == {"memory": 1000, "vector": 2000, "transfers": 300, "cube calls": 0, "cube": 0}
    assert judged.bound == "vector" and judged.ns == 1000 + 2000 + 0.25 * 1300


def test_workspace_costs_no_hbm():
    work = Work(memory_bytes=3_000_000, workspace_bytes=2_500_000)
    assert estimate(work, SIMPLE).units["memory"] == 1500
    assert estimate(replace(work, workspace_bytes=0), SIMPLE).units["memory"] == 3000


def test_cube_calls_cost_more_beside_vector_cores():
    assert estimate(Work(cube_calls=7), SIMPLE).units["cube calls"] == 140
    assert estimate(Work(cube_calls=7, mixed=True), SIMPLE).units["cube calls"] == 700


def test_the_cases_of_constants():
    assert list(FITS) == ["A", "B", "harsh"]
    assert FITS["B"].load == INF and FITS["B"].overlap == 1 and FITS["harsh"].task == 1300
    work = Work(mixed=True, cube_calls=100, vector_calls=1000, memory_bytes=1e8, tasks=10)
    assert estimate(work, FITS["harsh"]).ns > estimate(work, FITS["A"]).ns


def test_a_verdict_is_by_the_resource_that_takes_most_of_the_time():
    shape = "N128_P64_R4_C16"  # 2.323 ms on an A100
    cube = Stage("bwd_fwd", "x", Work(cube_cycles=1.8 * 2.9e6))
    vector = Stage("bwd_fwd", "y", Work(vector_cycles=1.8 * 5e6))
    moves = Stage("bwd_fwd", "z", Work(transfers=1e5))
    assert verdict(shape, "bwd_fwd", [cube], {"A": SIMPLE}).bound == "cube"
    judged = verdict(shape, "bwd_fwd", [cube, vector, moves], {"A": SIMPLE})
    assert judged.bound == "vector" and judged.required == 0.4
    assert judged.ms["A"] == pytest.approx(2.9 + 5 + 2 + 3 * 0.001)
    assert not judged.reaches(0.4) and judged.reaches(0.2)
    assert verdict(shape, "bwd_fwd", [moves], {"A": SIMPLE}).bound == "memory"
