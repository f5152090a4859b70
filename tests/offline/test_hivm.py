"""Reading planned HIVM: loops, operands, on-chip bytes."""

from mindspeed_mamba3_plugin.offline import hivm

UB = "#hivm.address_space<ub>"
GM = "#hivm.address_space<gm>"
MODULE = f"""
module attributes {{}} {{
  func.func @k_infer_task_type_function() -> i8 attributes {{}} {{
    %c10_i8 = arith.constant 10 : i8
    return %c10_i8 : i8
  }}
  func.func @k_mix_aiv(%arg0: i64, %arg3: memref<?xf32, {GM}>, %arg4: i32, %arg5: i32) attributes {{a = #b<c>}} {{
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c4 = arith.constant 4 : index
    %c128_i64 = arith.constant 128 : i64
    %c256_i64 = arith.constant 256 : i64
    %0 = hivm.hir.pointer_cast(%c128_i64, %c256_i64) : memref<8x4xf32, {UB}>
    %1 = hivm.hir.pointer_cast(%c0_i64) : memref<16xi1, {UB}>
    %2 = hivm.hir.get_sub_block_idx -> i64
    %3 = arith.trunci %2 : i64 to i32
    %cast = memref.cast %0 : memref<8x4xf32, {UB}> to memref<?x?xf32, {UB}>
    scf.for %arg9 = %3 to %arg4 step %arg5  : i32 {{
      hivm.hir.load ins(%arg3 : memref<?xf32, {GM}>) outs(%cast : memref<?x?xf32, {UB}>)
      hivm.hir.set_flag[<PIPE_V>, <PIPE_MTE2>, <EVENT_ID0>]
      scf.for %arg10 = %c0 to %c4 step %c1 {{
        hivm.hir.vexp ins(%0 : memref<8x4xf32, {UB}>) outs(%0 : memref<8x4xf32, {UB}>)
        %7 = memref.load %0[%arg10, %c0] : memref<8x4xf32, {UB}>
      }}
      scf.for %arg11 = %3 to %9 step %arg5  : i32 {{
        hivm.hir.vadd ins(%0, %0 : memref<8x4xf32, {UB}>, memref<8x4xf32, {UB}>) outs(%0 : memref<8x4xf32, {UB}>)
      }}
    }}
    return
  }}
}}
"""


def test_loops_operands_and_bytes():
    (half,) = hivm.read(MODULE, hivm.argument_names([None, 100], (40,)), unknown_trips=64)
    load, exp, add = hivm.executed(half)
    assert (load.name, load.times, exp.name, exp.times, add.times) == ("load", 3, "vexp", 12, 3 * 64)
    assert load.outputs[0].shape == (8, 4) and load.outputs[0].bytes == 128
    assert half.used == {"ub": 256 + 128, "cbuf": 0, "cc": 0}
    assert half.scalar_loops == [4] and half.scalar_accesses == 12
    assert half.split == "1:2" and not half.cube and half.unplaced == 0


def test_an_unplaced_buffer_and_an_unsplit_half_are_seen():
    text = MODULE.replace("hivm.hir.pointer_cast(%c0_i64)", "memref.alloc()").replace(
        "get_sub_block_idx", "get_block_idx"
    )
    (half,) = hivm.read(text)
    assert half.unplaced == 1 and half.split == "both cores do all"


def test_a_half_of_which_one_core_keeps_what_both_did_is_not_split():
    guarded = MODULE.replace(
        "    return\n",
        "    %20 = arith.cmpi eq, %3, %arg4 : i32\n    scf.if %20 {\n    }\n    return\n",
    )
    assert hivm.read(MODULE)[0].split == "1:2"
    assert hivm.read(guarded)[0].split == "both cores do all"
