/* cuBLAS and NCCL: handles that nobody looks into, and products and collectives counted as kernels. Plain types
   instead of their headers: only what is written or returned matters. */
#include "null_gpu.h"
#include <string.h>

static int product(const char *name) {
  null_gpu_use(name);
  null_gpu_count_kernel(name, 0, NULL);
  return 0;
}

static int give(void **handle) {
  *handle = (void *)0x55;
  return 0;
}

static int set(int *to, int value) {
  *to = value;
  return 0;
}

int cublasCreate_v2(void **handle) { return give(handle); }
int cublasGetMathMode(void *handle, int *mode) { return set(mode, 0); }
int cublasGetPointerMode_v2(void *handle, int *mode) { return set(mode, 0); }
int cublasGemmEx(void) { return product("cublasGemmEx"); }
int cublasSgemm_v2(void) { return product("cublasSgemm"); }
int cublasGemmStridedBatchedEx(void) { return product("cublasGemmStridedBatchedEx"); }
int cublasSgemmStridedBatched(void) { return product("cublasSgemmStridedBatched"); }

size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtCreate(void **handle) { return give(handle); }
int cublasLtMatmul(void) { return product("cublasLtMatmul"); }
int cublasLtMatmulDescCreate(void **handle) { return give(handle); }
int cublasLtMatmulPreferenceCreate(void **handle) { return give(handle); }
int cublasLtMatrixLayoutCreate(void **handle) { return give(handle); }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int requested, void *results, int *returned) {
  memset(results, 0, 96); /* one algorithm, without a workspace */
  return set(returned, 1) ;
}

int ncclGetVersion(int *version) { return set(version, 22907); }
int ncclGetUniqueId(void *id) {
  memset(id, 1, 128);
  return 0;
}
int ncclCommInitRankConfig(void **communicator) { return give(communicator); }
int ncclCommInitRank(void **communicator) { return give(communicator); }
int ncclCommInitRankScalable(void **communicator) { return give(communicator); }
int ncclCommSplit(void *from, int color, int key, void **communicator) { return give(communicator); }
int ncclCommGetAsyncError(void *communicator, int *error) { return set(error, 0); }
const char *ncclGetErrorString(int error) { return "an error of the null device's NCCL"; }
const char *ncclGetLastError(void *communicator) { return ""; }
int ncclCommCount(void *communicator, int *count) { return set(count, 1); }
int ncclCommUserRank(void *communicator, int *rank) { return set(rank, 0); }
int ncclAllReduce(void) { return product("ncclAllReduce"); }
int ncclAllGather(void) { return product("ncclAllGather"); }
int ncclReduceScatter(void) { return product("ncclReduceScatter"); }
int ncclBroadcast(void) { return product("ncclBroadcast"); }
int ncclReduce(void) { return product("ncclReduce"); }
int ncclSend(void) { return product("ncclSend"); }
int ncclRecv(void) { return product("ncclRecv"); }
int ncclAlltoAll(void) { return product("ncclAlltoAll"); }
