// Scores of one rank of a chunk, mixed and multiplied with v, as one fused kernel for Ascend 950: 32 rows of q against
// 128 of k, N = 128, P = 64. It is what triton-ascend 3.2.1 and later make of al.scope, al.fixpipe with ROW_SPLIT,
// al.sub_vec_id, al.copy and al.sync_block_set / wait; written by hand, since its release 3.2.0 does not have them.
// The cube core hands each vector core half of the scores' rows in its own memory, both scale and narrow theirs and put
// them into L1, and the cube core multiplies on: nothing between the products goes through global memory.
module attributes {hacc.target = #hacc.target<"Ascend950PR_9589">, hivm.disable_auto_tile_and_bind_subblock} {
  func.func @fused_scores(%arg0: memref<?xi8>, %arg1: memref<?xi8>, %q: memref<?xbf16> {tt.divisibility = 16 : i32, tt.tensor_kind = 0 : i32}, %k: memref<?xbf16> {tt.divisibility = 16 : i32, tt.tensor_kind = 0 : i32}, %v: memref<?xbf16> {tt.divisibility = 16 : i32, tt.tensor_kind = 0 : i32}, %mixing: memref<?xf32> {tt.divisibility = 16 : i32, tt.tensor_kind = 0 : i32}, %out: memref<?xf32> {tt.divisibility = 16 : i32, tt.tensor_kind = 1 : i32}, %tasks: i32 {tt.divisibility = 16 : i32}, %programs: i32, %p1: i32, %p2: i32, %pid: i32, %pid1: i32, %pid2: i32) attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c4096_i64 = arith.constant 4096 : i64
    %c16384_i64 = arith.constant 16384 : i64
    %c8192_i64 = arith.constant 8192 : i64
    %c2048_i64 = arith.constant 2048 : i64
    %zero = arith.constant 0.000000e+00 : f32
    %l1 = memref.alloc() : memref<8x2x16x16xbf16, #hivm.address_space<cbuf>>
    %ub = memref.alloc() : memref<16x128xf32, #hivm.address_space<ub>>
    scope.scope : () -> () {
      hivm.hir.sync_block_set[<VECTOR>, <PIPE_V>, <PIPE_FIX>] flag = 4
      %sub = hivm.hir.get_sub_block_idx -> i64
      %subi = arith.index_cast %sub : i64 to index
      scf.for %i = %pid to %tasks step %programs : i32 {
        %task = arith.extsi %i : i32 to i64
        %a = arith.muli %task, %c4096_i64 : i64
        %b = arith.muli %sub, %c2048_i64 : i64
        %c = arith.addi %a, %b : i64
        %offset = arith.index_cast %c : i64 to index
        %gm = memref.reinterpret_cast %mixing to offset: [%offset], sizes: [16, 128], strides: [128, 1] : memref<?xf32> to memref<16x128xf32, strided<[128, 1], offset: ?>>
        %buf = memref.alloc() : memref<16x128xf32>
        memref.copy %gm, %buf : memref<16x128xf32, strided<[128, 1], offset: ?>> to memref<16x128xf32>
        %mix = bufferization.to_tensor %buf restrict writable : memref<16x128xf32>
        hivm.hir.sync_block_wait[<VECTOR>, <PIPE_FIX>, <PIPE_V>] flag = 1
        %cast = memref.memory_space_cast %ub : memref<16x128xf32, #hivm.address_space<ub>> to memref<16x128xf32>
        %scores = bufferization.to_tensor %cast restrict writable : memref<16x128xf32>
        %mixed = arith.mulf %scores, %mix : tensor<16x128xf32>
        %narrow = arith.truncf %mixed : tensor<16x128xf32> to tensor<16x128xbf16>
        %blocks = tensor.expand_shape %narrow [[0], [1, 2]] output_shape [16, 8, 16] : tensor<16x128xbf16> into tensor<16x8x16xbf16>
        %empty = tensor.empty() : tensor<8x16x16xbf16>
        %nz = linalg.transpose ins(%blocks : tensor<16x8x16xbf16>) outs(%empty : tensor<8x16x16xbf16>) permutation = [1, 0, 2]
        hivm.hir.sync_block_set[<VECTOR>, <PIPE_V>, <PIPE_FIX>] flag = 4
        hivm.hir.sync_block_wait[<VECTOR>, <PIPE_M>, <PIPE_MTE3>] flag = 6
        %nzub = bufferization.to_memref %nz : memref<8x16x16xbf16, #hivm.address_space<ub>>
        %half = memref.subview %l1[0, %subi, 0, 0] [8, 1, 16, 16] [1, 1, 1, 1] : memref<8x2x16x16xbf16, #hivm.address_space<cbuf>> to memref<8x16x16xbf16, strided<[512, 16, 1], offset: ?>, #hivm.address_space<cbuf>>
        hivm.hir.copy ins(%nzub : memref<8x16x16xbf16, #hivm.address_space<ub>>) outs(%half : memref<8x16x16xbf16, strided<[512, 16, 1], offset: ?>, #hivm.address_space<cbuf>>)
        hivm.hir.sync_block_set[<VECTOR>, <PIPE_MTE3>, <PIPE_MTE1>] flag = 2
      }
      hivm.hir.sync_block_wait[<VECTOR>, <PIPE_M>, <PIPE_MTE3>] flag = 6
      scope.return
    } {hivm.tcore_type = #hivm.tcore_type<VECTOR>}
    scope.scope : () -> () {
      hivm.hir.sync_block_set[<CUBE>, <PIPE_M>, <PIPE_MTE3>] flag = 6
      %e0 = tensor.empty() : tensor<32x128xf32>
      %z0 = linalg.fill ins(%zero : f32) outs(%e0 : tensor<32x128xf32>) -> tensor<32x128xf32>
      %e1 = tensor.empty() : tensor<32x64xf32>
      %z1 = linalg.fill ins(%zero : f32) outs(%e1 : tensor<32x64xf32>) -> tensor<32x64xf32>
      scf.for %i = %pid to %tasks step %programs : i32 {
        %task = arith.extsi %i : i32 to i64
        %qo = arith.muli %task, %c4096_i64 : i64
        %qoff = arith.index_cast %qo : i64 to index
        %ko = arith.muli %task, %c16384_i64 : i64
        %koff = arith.index_cast %ko : i64 to index
        %vo = arith.muli %task, %c8192_i64 : i64
        %voff = arith.index_cast %vo : i64 to index
        %oo = arith.muli %task, %c2048_i64 : i64
        %ooff = arith.index_cast %oo : i64 to index
        %qg = memref.reinterpret_cast %q to offset: [%qoff], sizes: [32, 128], strides: [128, 1] : memref<?xbf16> to memref<32x128xbf16, strided<[128, 1], offset: ?>>
        %qb = memref.alloc() : memref<32x128xbf16>
        memref.copy %qg, %qb : memref<32x128xbf16, strided<[128, 1], offset: ?>> to memref<32x128xbf16>
        %qt = bufferization.to_tensor %qb restrict writable : memref<32x128xbf16>
        %kg = memref.reinterpret_cast %k to offset: [%koff], sizes: [128, 128], strides: [128, 1] : memref<?xbf16> to memref<128x128xbf16, strided<[128, 1], offset: ?>>
        %kb = memref.alloc() : memref<128x128xbf16>
        memref.copy %kg, %kb : memref<128x128xbf16, strided<[128, 1], offset: ?>> to memref<128x128xbf16>
        %kt = bufferization.to_tensor %kb restrict writable : memref<128x128xbf16>
        %vg = memref.reinterpret_cast %v to offset: [%voff], sizes: [128, 64], strides: [64, 1] : memref<?xbf16> to memref<128x64xbf16, strided<[64, 1], offset: ?>>
        %vb = memref.alloc() : memref<128x64xbf16>
        memref.copy %vg, %vb : memref<128x64xbf16, strided<[64, 1], offset: ?>> to memref<128x64xbf16>
        %vt = bufferization.to_tensor %vb restrict writable : memref<128x64xbf16>
        %te = tensor.empty() : tensor<128x128xbf16>
        %ktt = linalg.transpose ins(%kt : tensor<128x128xbf16>) outs(%te : tensor<128x128xbf16>) permutation = [1, 0]
        %s = linalg.matmul {input_precison = "ieee"} ins(%qt, %ktt : tensor<32x128xbf16>, tensor<128x128xbf16>) outs(%z0 : tensor<32x128xf32>) -> tensor<32x128xf32>
        hivm.hir.sync_block_wait[<CUBE>, <PIPE_V>, <PIPE_FIX>] flag = 4
        hivm.hir.fixpipe {dma_mode = #hivm.dma_mode<nz2nd>, dual_dst_mode = #hivm.fixpipe_dual_dst_mode<ROW_SPLIT>} ins(%s : tensor<32x128xf32>) outs(%ub : memref<16x128xf32, #hivm.address_space<ub>>)
        hivm.hir.sync_block_set[<CUBE>, <PIPE_FIX>, <PIPE_V>] flag = 1
        hivm.hir.sync_block_wait[<CUBE>, <PIPE_MTE3>, <PIPE_MTE1>] flag = 2
        %nd = hivm.hir.convert_layout %l1 output_shape [32, 128] {dstLayout = #hivm.data_layout<ND>, srcLayout = #hivm.data_layout<ND>} : (memref<8x2x16x16xbf16, #hivm.address_space<cbuf>>) -> memref<32x128xbf16, #hivm.address_space<cbuf>>
        %ndc = memref.memory_space_cast %nd : memref<32x128xbf16, #hivm.address_space<cbuf>> to memref<32x128xbf16>
        %probs = bufferization.to_tensor %ndc restrict writable : memref<32x128xbf16>
        %o = linalg.matmul {input_precison = "ieee"} ins(%probs, %vt : tensor<32x128xbf16>, tensor<128x64xbf16>) outs(%z1 : tensor<32x64xf32>) -> tensor<32x64xf32>
        %og = memref.reinterpret_cast %out to offset: [%ooff], sizes: [32, 64], strides: [64, 1] : memref<?xf32> to memref<32x64xf32, strided<[64, 1], offset: ?>>
        bufferization.materialize_in_destination %o in writable %og : (tensor<32x64xf32>, memref<32x64xf32, strided<[64, 1], offset: ?>>) -> ()
        hivm.hir.sync_block_set[<CUBE>, <PIPE_M>, <PIPE_MTE3>] flag = 6
      }
      hivm.hir.sync_block_wait[<CUBE>, <PIPE_V>, <PIPE_FIX>] flag = 4
      scope.return
    } {hivm.tcore_type = #hivm.tcore_type<CUBE>}
    return
  }
}
