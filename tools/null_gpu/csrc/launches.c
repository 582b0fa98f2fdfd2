/* Kernels of compiled libraries: they register themselves by name when a library is loaded. */
#include "null_gpu.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_KERNELS (1 << 17)

struct kernel {
  const void *stub; /* the host function that stands for the kernel */
  const char *name;
  uint64_t hash;
};

static struct kernel kernels[MAX_KERNELS];
static int num_kernels;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static struct kernel *find(const void *stub) {
  unsigned i = ((uintptr_t)stub >> 4) % MAX_KERNELS;
  while (kernels[i].stub && kernels[i].stub != stub) i = (i + 1) % MAX_KERNELS;
  return &kernels[i];
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[64];
  return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                       int constant, int global) {}

void __cudaRegisterFunction(void **handle, const char *stub, char *device, const char *name, int limit, void *tid,
                            void *bid, void *block, void *grid, int *size) {
  pthread_mutex_lock(&mutex);
  if (++num_kernels >= MAX_KERNELS) {
    fprintf(stderr, "null GPU: more than %d kernels\n", MAX_KERNELS);
    abort();
  }
  *find(stub) = (struct kernel){stub, name, 0};
  pthread_mutex_unlock(&mutex);
}

static int launch(const void *stub, cudaStream_t stream) {
  null_gpu_use("a launch");
  struct kernel *kernel = find(stub);
  if (!kernel->name) {
    null_gpu_count_kernel("unknown kernel", 0, stream);
    return cudaSuccess;
  }
  if (!kernel->hash) kernel->hash = null_gpu_hash(kernel->name);
  null_gpu_count_kernel(kernel->name, kernel->hash, stream);
  return cudaSuccess;
}

/* The arguments of kernel<<<grid, block, shared, stream>>>, between its two halves. */
static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void **)stream = configuration.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
  *kernel = (cudaKernel_t)stub;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return launch(kernel, stream);
}

cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  return launch(stub, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *stub, void **arguments) {
  return launch(stub, config->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
  return launch(stub, stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *to, const void *stub) {
  const struct model *model = &null_gpu_settings()->model;
  memset(to, 0, sizeof *to);
  to->maxThreadsPerBlock = 1024;
  to->binaryVersion = to->ptxVersion = 10 * model->major + model->minor;
  to->numRegs = 64;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *stub, int block_size,
                                                                   size_t shared, unsigned flags) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *stub, int block_size,
                                                          size_t shared) {
  *blocks = 2;
  return cudaSuccess;
}
