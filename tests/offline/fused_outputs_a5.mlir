// Stage `outputs` as one fused kernel for Ascend 950, in the form that triton-ascend 3.2.1 and later make of al.scope,
// al.fixpipe with ROW_SPLIT, al.sub_vec_id, al.copy and al.sync_block_set / wait; written by hand, since its release 3.2.0
// does not have them. fused_a5.py fills in the sizes.
//
// For each rank of a chunk the cube core hands each vector core half of the rows of the scores q k^T in its own memory;
// both multiply theirs by mixing, narrow them and put them into L1; meanwhile the cube core multiplies q by the state,
// and then the mixed scores by v. Nothing between the products goes through global memory.
//
// Flags: 1 the scores are in UB, 2 the operand is in L1, 4 UB may be overwritten, 6 L1 may be overwritten.
module attributes {hacc.target = #hacc.target<"Ascend950PR_9589">, hivm.disable_auto_tile_and_bind_subblock} {
  func.func @fused_outputs(%locks: memref<?xi8>, %workspace: memref<?xi8>,
      %q: memref<?xbf16> {tt.divisibility = 16 : i32, tt.tensor_kind = 0 : i32},
      %k: memref<?xbf16> {tt.divisibility = 16 : i32, tt.tensor_kind = 0 : i32},
      %v: memref<?xbf16> {tt.divisibility = 16 : i32, tt.tensor_kind = 0 : i32},
      %states: memref<?xbf16> {tt.divisibility = 16 : i32, tt.tensor_kind = 0 : i32},
      %mixing: memref<?xf32> {tt.divisibility = 16 : i32, tt.tensor_kind = 0 : i32},
      %inside: memref<?xf32> {tt.divisibility = 16 : i32, tt.tensor_kind = 1 : i32},
      %carried: memref<?xf32> {tt.divisibility = 16 : i32, tt.tensor_kind = 1 : i32},
      %tasks: i32 {tt.divisibility = 16 : i32}, %programs: i32, %programs1: i32, %programs2: i32,
      %program: i32, %program1: i32, %program2: i32)
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local",
                  parallel_mode = "simd"} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %ranks = arith.constant $R : i32
    %zero = arith.constant 0.000000e+00 : f32
    %l1 = memref.alloc() : memref<${M1}x${C1}x16x16xbf16, #hivm.address_space<cbuf>>
    %ub = memref.alloc() : memref<${H}x${M}xf32, #hivm.address_space<ub>>
    scope.scope : () -> () {
      hivm.hir.sync_block_set[<VECTOR>, <PIPE_V>, <PIPE_FIX>] flag = 4
      %sub = hivm.hir.get_sub_block_idx -> i64
      %half = arith.index_cast %sub : i64 to index
      %step = arith.constant $STEP : index
      %at = arith.muli %half, %step : index
      scf.for %i = %program to %tasks step %programs : i32 {
        %task = arith.extsi %i : i32 to i64
        %size = arith.constant $CM : i64
        %rows = arith.constant $HM : i64
        %a = arith.muli %task, %size : i64
        %b = arith.muli %sub, %rows : i64
        %c = arith.addi %a, %b : i64
        %offset = arith.index_cast %c : i64 to index
        %from = memref.reinterpret_cast %mixing to offset: [%offset], sizes: [$H, $M], strides: [$M, 1] : memref<?xf32> to memref<${H}x${M}xf32, strided<[$M, 1], offset: ?>>
        %buffer = memref.alloc() : memref<${H}x${M}xf32>
        memref.copy %from, %buffer : memref<${H}x${M}xf32, strided<[$M, 1], offset: ?>> to memref<${H}x${M}xf32>
        %mix = bufferization.to_tensor %buffer restrict writable : memref<${H}x${M}xf32>
        scf.for %r = %c0 to %ranks step %c1 : i32 {
          hivm.hir.sync_block_wait[<VECTOR>, <PIPE_FIX>, <PIPE_V>] flag = 1
          %there = memref.memory_space_cast %ub : memref<${H}x${M}xf32, #hivm.address_space<ub>> to memref<${H}x${M}xf32>
          %scores = bufferization.to_tensor %there restrict writable : memref<${H}x${M}xf32>
          %mixed = arith.mulf %scores, %mix : tensor<${H}x${M}xf32>
          %narrow = arith.truncf %mixed : tensor<${H}x${M}xf32> to tensor<${H}x${M}xbf16>
          %blocks = tensor.expand_shape %narrow [[0], [1, 2]] output_shape [$H, $M1, 16] : tensor<${H}x${M}xbf16> into tensor<${H}x${M1}x16xbf16>
          %empty = tensor.empty() : tensor<${M1}x${H}x16xbf16>
          %fractal = linalg.transpose ins(%blocks : tensor<${H}x${M1}x16xbf16>) outs(%empty : tensor<${M1}x${H}x16xbf16>) permutation = [1, 0, 2]
          hivm.hir.sync_block_set[<VECTOR>, <PIPE_V>, <PIPE_FIX>] flag = 4
          hivm.hir.sync_block_wait[<VECTOR>, <PIPE_M>, <PIPE_MTE3>] flag = 6
          %own = bufferization.to_memref %fractal : memref<${M1}x${H}x16xbf16, #hivm.address_space<ub>>
          %whole = memref.collapse_shape %l1 [[0], [1, 2], [3]] : memref<${M1}x${C1}x16x16xbf16, #hivm.address_space<cbuf>> into memref<${M1}x${C}x16xbf16, #hivm.address_space<cbuf>>
          %place = memref.subview %whole[0, %at, 0] [$M1, $H, 16] [1, 1, 1] : memref<${M1}x${C}x16xbf16, #hivm.address_space<cbuf>> to memref<${M1}x${H}x16xbf16, strided<[$C16, 16, 1], offset: ?>, #hivm.address_space<cbuf>>
          hivm.hir.copy ins(%own : memref<${M1}x${H}x16xbf16, #hivm.address_space<ub>>) outs(%place : memref<${M1}x${H}x16xbf16, strided<[$C16, 16, 1], offset: ?>, #hivm.address_space<cbuf>>)
          hivm.hir.sync_block_set[<VECTOR>, <PIPE_MTE3>, <PIPE_MTE1>] flag = 2
        }
      }
      hivm.hir.sync_block_wait[<VECTOR>, <PIPE_M>, <PIPE_MTE3>] flag = 6
      scope.return
    } {hivm.tcore_type = #hivm.tcore_type<VECTOR>}
    scope.scope : () -> () {
      hivm.hir.sync_block_set[<CUBE>, <PIPE_M>, <PIPE_MTE3>] flag = 6
      %e0 = tensor.empty() : tensor<${C}x${M}xf32>
      %z0 = linalg.fill ins(%zero : f32) outs(%e0 : tensor<${C}x${M}xf32>) -> tensor<${C}x${M}xf32>
      %e1 = tensor.empty() : tensor<${C}x${P}xf32>
      %z1 = linalg.fill ins(%zero : f32) outs(%e1 : tensor<${C}x${P}xf32>) -> tensor<${C}x${P}xf32>
      scf.for %i = %program to %tasks step %programs : i32 {
        %task = arith.extsi %i : i32 to i64
        %mn = arith.constant $MN : i64
        %mp = arith.constant $MP : i64
        %np = arith.constant $NP : i64
        %ko = arith.muli %task, %mn : i64
        %vo = arith.muli %task, %mp : i64
        %so = arith.muli %task, %np : i64
        %koff = arith.index_cast %ko : i64 to index
        %voff = arith.index_cast %vo : i64 to index
        %soff = arith.index_cast %so : i64 to index
        %kg = memref.reinterpret_cast %k to offset: [%koff], sizes: [$M, $N], strides: [$N, 1] : memref<?xbf16> to memref<${M}x${N}xbf16, strided<[$N, 1], offset: ?>>
        %kb = memref.alloc() : memref<${M}x${N}xbf16>
        memref.copy %kg, %kb : memref<${M}x${N}xbf16, strided<[$N, 1], offset: ?>> to memref<${M}x${N}xbf16>
        %keys = bufferization.to_tensor %kb restrict writable : memref<${M}x${N}xbf16>
        %te = tensor.empty() : tensor<${N}x${M}xbf16>
        %turned = linalg.transpose ins(%keys : tensor<${M}x${N}xbf16>) outs(%te : tensor<${N}x${M}xbf16>) permutation = [1, 0]
        %vg = memref.reinterpret_cast %v to offset: [%voff], sizes: [$M, $P], strides: [$P, 1] : memref<?xbf16> to memref<${M}x${P}xbf16, strided<[$P, 1], offset: ?>>
        %vb = memref.alloc() : memref<${M}x${P}xbf16>
        memref.copy %vg, %vb : memref<${M}x${P}xbf16, strided<[$P, 1], offset: ?>> to memref<${M}x${P}xbf16>
        %values = bufferization.to_tensor %vb restrict writable : memref<${M}x${P}xbf16>
        %sg = memref.reinterpret_cast %states to offset: [%soff], sizes: [$N, $P], strides: [$P, 1] : memref<?xbf16> to memref<${N}x${P}xbf16, strided<[$P, 1], offset: ?>>
        %sb = memref.alloc() : memref<${N}x${P}xbf16>
        memref.copy %sg, %sb : memref<${N}x${P}xbf16, strided<[$P, 1], offset: ?>> to memref<${N}x${P}xbf16>
        %state = bufferization.to_tensor %sb restrict writable : memref<${N}x${P}xbf16>
        scf.for %r = %c0 to %ranks step %c1 : i32 {
          %rank = arith.extsi %r : i32 to i64
          %cn = arith.constant $CN : i64
          %cp = arith.constant $CP : i64
          %qr = arith.muli %rank, %cn : i64
          %qo = arith.addi %ko, %qr : i64
          %qoff = arith.index_cast %qo : i64 to index
          %orr = arith.muli %rank, %cp : i64
          %oo = arith.addi %vo, %orr : i64
          %ooff = arith.index_cast %oo : i64 to index
          %qg = memref.reinterpret_cast %q to offset: [%qoff], sizes: [$C, $N], strides: [$N, 1] : memref<?xbf16> to memref<${C}x${N}xbf16, strided<[$N, 1], offset: ?>>
          %qb = memref.alloc() : memref<${C}x${N}xbf16>
          memref.copy %qg, %qb : memref<${C}x${N}xbf16, strided<[$N, 1], offset: ?>> to memref<${C}x${N}xbf16>
          %query = bufferization.to_tensor %qb restrict writable : memref<${C}x${N}xbf16>
          %s = linalg.matmul {input_precison = "ieee"} ins(%query, %turned : tensor<${C}x${N}xbf16>, tensor<${N}x${M}xbf16>) outs(%z0 : tensor<${C}x${M}xf32>) -> tensor<${C}x${M}xf32>
          hivm.hir.sync_block_wait[<CUBE>, <PIPE_V>, <PIPE_FIX>] flag = 4
          hivm.hir.fixpipe {dma_mode = #hivm.dma_mode<nz2nd>, dual_dst_mode = #hivm.fixpipe_dual_dst_mode<ROW_SPLIT>} ins(%s : tensor<${C}x${M}xf32>) outs(%ub : memref<${H}x${M}xf32, #hivm.address_space<ub>>)
          hivm.hir.sync_block_set[<CUBE>, <PIPE_FIX>, <PIPE_V>] flag = 1
          %x = linalg.matmul {input_precison = "ieee"} ins(%query, %state : tensor<${C}x${N}xbf16>, tensor<${N}x${P}xbf16>) outs(%z1 : tensor<${C}x${P}xf32>) -> tensor<${C}x${P}xf32>
          %xg = memref.reinterpret_cast %carried to offset: [%ooff], sizes: [$C, $P], strides: [$P, 1] : memref<?xf32> to memref<${C}x${P}xf32, strided<[$P, 1], offset: ?>>
          bufferization.materialize_in_destination %x in writable %xg : (tensor<${C}x${P}xf32>, memref<${C}x${P}xf32, strided<[$P, 1], offset: ?>>) -> ()
          hivm.hir.sync_block_wait[<CUBE>, <PIPE_MTE3>, <PIPE_MTE1>] flag = 2
          %plain = hivm.hir.convert_layout %l1 output_shape [$C, $M] {dstLayout = #hivm.data_layout<ND>, srcLayout = #hivm.data_layout<ND>} : (memref<${M1}x${C1}x16x16xbf16, #hivm.address_space<cbuf>>) -> memref<${C}x${M}xbf16, #hivm.address_space<cbuf>>
          %here = memref.memory_space_cast %plain : memref<${C}x${M}xbf16, #hivm.address_space<cbuf>> to memref<${C}x${M}xbf16>
          %mixed = bufferization.to_tensor %here restrict writable : memref<${C}x${M}xbf16>
          %o = linalg.matmul {input_precison = "ieee"} ins(%mixed, %values : tensor<${C}x${M}xbf16>, tensor<${M}x${P}xbf16>) outs(%z1 : tensor<${C}x${P}xf32>) -> tensor<${C}x${P}xf32>
          %og = memref.reinterpret_cast %inside to offset: [%ooff], sizes: [$C, $P], strides: [$P, 1] : memref<?xf32> to memref<${C}x${P}xf32, strided<[$P, 1], offset: ?>>
          bufferization.materialize_in_destination %o in writable %og : (tensor<${C}x${P}xf32>, memref<${C}x${P}xf32, strided<[$P, 1], offset: ?>>) -> ()
          hivm.hir.sync_block_set[<CUBE>, <PIPE_M>, <PIPE_MTE3>] flag = 6
        }
      }
      hivm.hir.sync_block_wait[<CUBE>, <PIPE_V>, <PIPE_FIX>] flag = 4
      scope.return
    } {hivm.tcore_type = #hivm.tcore_type<CUBE>}
    return
  }
}
