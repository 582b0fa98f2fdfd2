/* What the files of the null device share. Settings are environment variables, see docs/gpu.md. */
#pragma once
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>

/* Properties of the kind of GPU that stands in. */
struct model {
  int major, minor;
  const char *name;
  int num_sms, l2_bytes, shared_bytes_sm, shared_bytes_block, clock_khz, bus_bits;
};

struct settings {
  int num_devices;        /* NULL_GPU_DEVICES */
  struct model model;     /* NULL_GPU_CAPABILITY */
  size_t memory;          /* NULL_GPU_MEMORY_GIB, in bytes */
  size_t max_allocated;   /* NULL_GPU_MAX_ALLOCATED: allocations fail beyond this many bytes */
  const char *driver;     /* NULL_GPU_DRIVER */
  int cuda_version;       /* newest CUDA of that driver, as 13000 */
  int zero_reads;         /* NULL_GPU_ZERO_READS: what is read back from the device is 0 */
  int skip_copies;        /* NULL_GPU_SKIP_COPIES: copies above a page are not made */
  int fail_register;      /* NULL_GPU_FAIL_REGISTER: cudaHostRegister fails */
  int trace;              /* NULL_GPU_TRACE: report contexts and initialisation on stderr */
};

/* settings.c */
const struct settings *null_gpu_settings(void);
int null_gpu_visible(void); /* devices that CUDA_VISIBLE_DEVICES leaves */

/* counters.c */
uint64_t null_gpu_hash(const char *name);
void null_gpu_count(const char *call);
void null_gpu_count_kernel(const char *name, uint64_t hash, void *stream);
void null_gpu_count_replay(long num_kernels);
void null_gpu_count_context(int device, const char *call);
void null_gpu_count_violation(const char *call);
void null_gpu_count_memory(long used);

/* device.c */
int null_gpu_current(void);
int null_gpu_fail(int error);                  /* remember an error for cudaGetLastError, return it */
void null_gpu_use(const char *call);           /* open the current device's context, if it is not yet */
int null_gpu_has_context(int device);
void null_gpu_open_context(int device, const char *call);
int null_gpu_attribute(int attribute);

/* memory.c */
enum kind { HOST_ALLOCATED = 1, HOST_REGISTERED, DEVICE, DEVICE_ADDRESSES };
int null_gpu_reserve(size_t bytes);            /* 0 if the device has no room */
void null_gpu_release(size_t bytes);
void null_gpu_add_range(void *start, size_t bytes, enum kind kind);
void null_gpu_remove_range(void *start);
int null_gpu_is_pageable(const void *pointer);

/* streams.c */
int null_gpu_is_captured(void *stream);
int null_gpu_violation(const char *call);      /* count it, return cudaErrorStreamCaptureUnsupported */
void null_gpu_captured_kernel(void *stream);
