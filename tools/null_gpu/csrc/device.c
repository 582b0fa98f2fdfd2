/* Devices, their properties and contexts. Devices are numbered as the process sees them. */
#include "null_gpu.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define MAX_DEVICES 64

static __thread int current, last_error;
static int contexts[MAX_DEVICES];

int null_gpu_current(void) { return current; }
int null_gpu_fail(int error) { return last_error = error; }
int null_gpu_has_context(int device) { return contexts[device]; }

void null_gpu_open_context(int device, const char *call) {
  if (contexts[device]) return;
  contexts[device] = 1;
  null_gpu_count_context(device, call);
}

void null_gpu_use(const char *call) { null_gpu_open_context(current, call); }

cudaError_t cudaGetDeviceCount(int *count) {
  static int called;
  if (!called++ && null_gpu_settings()->trace)
    fprintf(stderr, "null GPU: cudaGetDeviceCount fixes CUDA_VISIBLE_DEVICES of this process\n");
  *count = 0;
  if (null_gpu_settings()->cuda_version < 13000) return null_gpu_fail(cudaErrorInsufficientDriver);
  *count = null_gpu_visible();
  return *count ? cudaSuccess : null_gpu_fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= null_gpu_visible()) return null_gpu_fail(cudaErrorInvalidDevice);
  current = device;
  null_gpu_use("cudaSetDevice"); /* since CUDA 12 this opens the context */
  return cudaSuccess;
}

cudaError_t cudaDeviceReset(void) { return cudaSuccess; }

cudaError_t cudaGetLastError(void) {
  int error = last_error;
  last_error = 0;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    default: return "cudaErrorOfTheNullDevice";
  }
}

const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = null_gpu_settings()->cuda_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}

/* Attributes by their number, so that the driver's library, which numbers them alike, can ask too. */
int null_gpu_attribute(int attribute) {
  const struct model *model = &null_gpu_settings()->model;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: return 1024;
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: return 65535;
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrClockRate: return model->clock_khz;
    case cudaDevAttrMultiProcessorCount: return model->num_sms;
    case cudaDevAttrConcurrentKernels: return 1;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return model->bus_bits;
    case cudaDevAttrL2CacheSize: return model->l2_bytes;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrComputeCapabilityMajor: return model->major;
    case cudaDevAttrComputeCapabilityMinor: return model->minor;
    case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrGlobalL1CacheSupported: return 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return model->shared_bytes_sm;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrManagedMemory: return 1;
    case cudaDevAttrPageableMemoryAccess: return 1;
    case cudaDevAttrConcurrentManagedAccess: return 1;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return model->shared_bytes_block;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrMemoryPoolsSupported: return 1;
    case cudaDevAttrClusterLaunch: return model->major >= 9;
    default: return 0;
  }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  *value = null_gpu_attribute(attribute);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *to, int device) {
  const struct settings *settings = null_gpu_settings();
  const struct model *model = &settings->model;
  memset(to, 0, sizeof *to);
  strcpy(to->name, model->name);
  to->uuid.bytes[15] = device + 1;
  to->totalGlobalMem = settings->memory;
  to->sharedMemPerBlock = 49152;
  to->regsPerBlock = to->regsPerMultiprocessor = 65536;
  to->warpSize = 32;
  to->maxThreadsPerBlock = to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024;
  to->maxThreadsDim[2] = 64;
  to->maxGridSize[0] = 2147483647;
  to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  to->major = model->major;
  to->minor = model->minor;
  to->multiProcessorCount = model->num_sms;
  to->l2CacheSize = model->l2_bytes;
  to->maxThreadsPerMultiProcessor = 2048;
  to->maxBlocksPerMultiProcessor = 32;
  to->sharedMemPerMultiprocessor = model->shared_bytes_sm;
  to->sharedMemPerBlockOptin = model->shared_bytes_block;
  to->memoryBusWidth = model->bus_bits;
  to->unifiedAddressing = to->managedMemory = to->concurrentKernels = to->cooperativeLaunch = 1;
  to->pciBusID = device + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *to, int size, int device) {
  snprintf(to, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  *pool = (cudaMemPool_t)0x99;
  return cudaSuccess;
}

/* Functions of the driver that the runtime hands out by name. */
static int succeed(void) { return 0; }

static void *find_in_driver(const char *name) {
  static void *driver;
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  if (!driver) return succeed;
  char newer[256];
  snprintf(newer, sizeof newer, "%s_v2", name);
  void *found = dlsym(driver, newer);
  if (!found) found = dlsym(driver, name);
  return found ? found : succeed;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  *function = find_in_driver(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
