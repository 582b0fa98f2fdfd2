/* libcuda.so.1, the driver: what Triton, vLLM's allocator and PyTorch call directly. Counters and memory are in
   libnullgpu.so, which is preloaded in every process of a rehearsal. */
#include "null_gpu.h"
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE (2UL << 20)
#define MAX_HANDLES (1 << 16)
#define MAX_KERNELS (1 << 12)
#define FIRST_KERNEL 0x100000

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x100 + device); }

CUresult cuInit(unsigned flags) {
  if (null_gpu_settings()->trace) fprintf(stderr, "null GPU: cuInit fixes CUDA_VISIBLE_DEVICES of this process\n");
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = null_gpu_settings()->cuda_version;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  *count = null_gpu_visible();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal < null_gpu_visible() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  snprintf(name, size, "%s", null_gpu_settings()->model.name);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
  *bytes = null_gpu_settings()->memory;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = null_gpu_attribute(attribute);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  memset(uuid, 0, sizeof *uuid);
  uuid->bytes[15] = device + 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  null_gpu_open_context(device, "cuDevicePrimaryCtxRetain");
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = null_gpu_has_context(device);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = context_of(null_gpu_current());
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = null_gpu_current();
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the null device";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result) {
  static void *self;
  if (!self) self = dlopen("libcuda.so.1", RTLD_LAZY);
  char newer[256];
  snprintf(newer, sizeof newer, "%s_v2", name);
  void *found = dlsym(self, newer);
  *function = found ? found : dlsym(self, name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Memory of which addresses and pages are taken apart: vLLM's sleep mode, PyTorch's expandable segments. */

static size_t handles[MAX_HANDLES];
static CUmemGenericAllocationHandle num_handles;

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
  *bytes = PAGE;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
  int protection = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char *start = mmap(NULL, bytes + PAGE, protection, kind, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = ((CUdeviceptr)start + PAGE - 1) & ~(PAGE - 1);
  null_gpu_add_range((void *)*address, bytes, DEVICE_ADDRESSES);
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  null_gpu_remove_range((void *)address);
  munmap((void *)address, bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  null_gpu_count("cuMemCreate");
  if (!null_gpu_reserve(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = ++num_handles;
  handles[*handle % MAX_HANDLES] = bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  null_gpu_count("cuMemRelease");
  null_gpu_release(handles[handle % MAX_HANDLES]);
  handles[handle % MAX_HANDLES] = 0;
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  madvise((void *)address, bytes, MADV_DONTNEED); /* what was there is lost, as on a GPU */
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t *free, size_t *total) {
  int (*get)(size_t *, size_t *) = dlsym(RTLD_DEFAULT, "cudaMemGetInfo");
  return get ? get(free, total) : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuPointerGetAttribute(void *to, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr *)to = pointer;
  else
    *(int *)to = 0;
  return CUDA_SUCCESS;
}

/* Kernels that Triton compiled */

static const char *kernels[MAX_KERNELS];
static int num_kernels;

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)0x200;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  int number = __atomic_fetch_add(&num_kernels, 1, __ATOMIC_RELAXED);
  if (number >= MAX_KERNELS) {
    fprintf(stderr, "null GPU: more than %d kernels of Triton\n", MAX_KERNELS);
    abort();
  }
  char text[256];
  snprintf(text, sizeof text, "triton:%s", name);
  kernels[number] = strdup(text);
  *function = (CUfunction)(uintptr_t)(FIRST_KERNEL + number);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

static CUresult launch(CUfunction function, CUstream stream) {
  uintptr_t number = (uintptr_t)function - FIRST_KERNEL;
  null_gpu_use("a launch");
  null_gpu_count_kernel(number < MAX_KERNELS && kernels[number] ? kernels[number] : "unknown kernel", 0, stream);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
  return launch(function, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  return launch(function, config->hStream);
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  *clusters = 66;
  return CUDA_SUCCESS;
}
