/* Memory of the device and pinned memory of the host: both are host memory, mapped when it is first touched. */
#include "null_gpu.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#define MAX_RANGES (1 << 16)
#define DRIVERS_OWN (600UL << 20) /* what a context takes */
#define MAX_DEVICES 64

struct range {
  char *start; /* NULL: unused */
  size_t bytes;
  enum kind kind;
  int device;
};

static struct range ranges[MAX_RANGES];
static int num_ranges;
static size_t used[MAX_DEVICES]; /* by this process; others on the same GPU are not known */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* The three below are called with the mutex held. */
static struct range *find(const void *pointer) {
  for (int i = 0; i < num_ranges; i++)
    if (ranges[i].start && (char *)pointer >= ranges[i].start && (char *)pointer < ranges[i].start + ranges[i].bytes)
      return &ranges[i];
  return NULL;
}

static struct range *find_start(const void *pointer) {
  for (int i = 0; i < num_ranges; i++)
    if (ranges[i].start == pointer) return &ranges[i];
  return NULL;
}

static void report(void) {
  size_t total = 0;
  for (int i = 0; i < MAX_DEVICES; i++) total += used[i];
  null_gpu_count_memory(total);
}

int null_gpu_reserve(size_t bytes) {
  const struct settings *settings = null_gpu_settings();
  pthread_mutex_lock(&mutex);
  size_t *here = &used[null_gpu_current()], needed = *here + bytes;
  int fits = needed <= settings->memory - DRIVERS_OWN && needed <= settings->max_allocated;
  if (fits) *here = needed;
  report();
  pthread_mutex_unlock(&mutex);
  return fits;
}

void null_gpu_release(size_t bytes) {
  pthread_mutex_lock(&mutex);
  used[null_gpu_current()] -= bytes;
  report();
  pthread_mutex_unlock(&mutex);
}

void null_gpu_add_range(void *start, size_t bytes, enum kind kind) {
  pthread_mutex_lock(&mutex);
  struct range *range = find_start(NULL);
  if (!range) range = &ranges[num_ranges++];
  *range = (struct range){start, bytes, kind, null_gpu_current()};
  pthread_mutex_unlock(&mutex);
}

static struct range take_range(void *start) {
  struct range none = {0}, taken = none;
  pthread_mutex_lock(&mutex);
  struct range *range = start ? find_start(start) : NULL;
  if (range) {
    taken = *range;
    *range = none;
    if (taken.kind == DEVICE) used[taken.device] -= taken.bytes;
    report();
  }
  pthread_mutex_unlock(&mutex);
  return taken;
}

void null_gpu_remove_range(void *start) { take_range(start); }

int null_gpu_is_pageable(const void *pointer) {
  pthread_mutex_lock(&mutex);
  int pageable = !find(pointer);
  pthread_mutex_unlock(&mutex);
  return pageable;
}

static void *map(size_t bytes) {
  void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? NULL : start;
}

static size_t in_pages(size_t bytes) { return bytes ? (bytes + 4095) & ~4095UL : 4096; }

static int allocate(void **to, size_t bytes, enum kind kind) {
  bytes = in_pages(bytes);
  *to = kind == DEVICE && !null_gpu_reserve(bytes) ? NULL : map(bytes);
  if (!*to) return null_gpu_fail(cudaErrorMemoryAllocation);
  null_gpu_add_range(*to, bytes, kind);
  return cudaSuccess;
}

static int free_range(void *pointer) {
  struct range range = take_range(pointer);
  if (range.start) munmap(range.start, range.bytes);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **to, size_t bytes) {
  null_gpu_count("cudaMalloc");
  null_gpu_use("cudaMalloc");
  return allocate(to, bytes, DEVICE);
}

cudaError_t cudaMallocAsync(void **to, size_t bytes, cudaStream_t stream) {
  null_gpu_count("cudaMallocAsync");
  null_gpu_use("cudaMallocAsync");
  return allocate(to, bytes, DEVICE);
}

cudaError_t cudaFree(void *pointer) {
  null_gpu_count("cudaFree");
  null_gpu_use("cudaFree"); /* cudaFree(NULL) is the customary way to open a context */
  return free_range(pointer);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
  null_gpu_count("cudaFreeAsync");
  return free_range(pointer);
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  null_gpu_use("cudaMemGetInfo");
  *total = null_gpu_settings()->memory;
  *free = *total - DRIVERS_OWN - used[null_gpu_current()];
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **to, size_t bytes, unsigned flags) {
  null_gpu_count("cudaHostAlloc");
  null_gpu_use("cudaHostAlloc");
  return allocate(to, bytes, HOST_ALLOCATED);
}

cudaError_t cudaMallocHost(void **to, size_t bytes) { return cudaHostAlloc(to, bytes, 0); }

cudaError_t cudaFreeHost(void *pointer) { return free_range(pointer); }

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
  null_gpu_count("cudaHostRegister");
  null_gpu_use("cudaHostRegister");
  if (null_gpu_settings()->fail_register) return null_gpu_fail(cudaErrorMemoryAllocation);
  null_gpu_add_range(pointer, bytes, HOST_REGISTERED);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
  null_gpu_count("cudaHostUnregister");
  int registered = take_range(pointer).kind == HOST_REGISTERED;
  return registered ? cudaSuccess : null_gpu_fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *to, const void *pointer) {
  null_gpu_use("cudaPointerGetAttributes");
  memset(to, 0, sizeof *to);
  pthread_mutex_lock(&mutex);
  struct range *range = find(pointer);
  int on_device = range && range->kind >= DEVICE;
  to->type = !range ? cudaMemoryTypeUnregistered : on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  to->device = range ? range->device : -2;
  pthread_mutex_unlock(&mutex);
  to->devicePointer = to->hostPointer = (void *)pointer;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &pointer, sizeof pointer);
  return cudaSuccess;
}
