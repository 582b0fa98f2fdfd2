/* libnvidia-ml.so.1: what nvidia-smi, PyTorch and vLLM ask about the machine. It knows all devices, whatever
   CUDA_VISIBLE_DEVICES says; a handle is a device's number plus 1. Built with settings.c. */
#include "null_gpu.h"
#include <stdio.h>
#include <stdlib.h>

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "an error of the null device's NVML"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = null_gpu_settings()->num_devices;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  *handle = (void *)(uintptr_t)(index + 1);
  return (int)index < null_gpu_settings()->num_devices ? 0 : 2; /* an invalid argument */
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  unsigned length = 0;
  while (uuid[length]) length++;
  *handle = (void *)(uintptr_t)(length > 2 ? strtoul(uuid + length - 2, NULL, 16) : 1);
  return 0;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  *index = (unsigned)(uintptr_t)handle - 1;
  return 0;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  *major = null_gpu_settings()->model.major;
  *minor = null_gpu_settings()->model.minor;
  return 0;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
  snprintf(name, size, "%s", null_gpu_settings()->model.name);
  return 0;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
  snprintf(uuid, size, "GPU-00000000-0000-0000-0000-0000000000%02lx", (unsigned long)(uintptr_t)handle);
  return 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
  total_free_used[0] = null_gpu_settings()->memory;
  total_free_used[2] = 1ULL << 30;
  total_free_used[1] = total_free_used[0] - total_free_used[2];
  return 0;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
  snprintf(version, size, "%s", null_gpu_settings()->driver);
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = null_gpu_settings()->cuda_version;
  return 0;
}

int nvmlDeviceGetP2PStatus(void *handle, void *peer, int index, int *status) {
  *status = 0; /* fine */
  return 0;
}

/* PyTorch asks for these when an allocation fails, and aborts where one is missing. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) { /* 0000:01:00.0 is device 0 */
  unsigned bus = 1;
  sscanf(id, "%*x:%x", &bus);
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, handle);
}

int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *processes) {
  *count = 0;
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *processes) {
  *count = 0;
  return 0;
}

enum { NOT_SUPPORTED = 3 };
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void) { return NOT_SUPPORTED; }
