/* Copies and fills, made on the host at once. */
#include "null_gpu.h"
#include <cuda_runtime_api.h>
#include <string.h>

#define LARGE_FILL (16UL << 20) /* longer fills are not made: they would touch memory that is mapped lazily */

static void copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  const struct settings *settings = null_gpu_settings();
  if (kind == cudaMemcpyDeviceToHost && settings->zero_reads)
    memset(to, 0, bytes);
  else if (bytes <= 4096 || !settings->skip_copies)
    memmove(to, from, bytes);
}

/* Count an asynchronous copy by direction and by the kind of its host side; pageable memory cannot be captured. */
static int begin(const void *to, const void *from, enum cudaMemcpyKind kind, cudaStream_t stream) {
  null_gpu_use("a copy");
  const void *host = kind == cudaMemcpyHostToDevice ? from : kind == cudaMemcpyDeviceToHost ? to : NULL;
  int pageable = host && null_gpu_is_pageable(host);
  const char *name = !host ? "copy device to device"
                     : kind == cudaMemcpyHostToDevice
                         ? (pageable ? "copy host to device, pageable" : "copy host to device, pinned")
                         : (pageable ? "copy device to host, pageable" : "copy device to host, pinned");
  null_gpu_count(name);
  return pageable && null_gpu_is_captured(stream) ? null_gpu_violation(name) : cudaSuccess;
}

static void copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height,
                      enum cudaMemcpyKind kind) {
  const struct settings *settings = null_gpu_settings();
  if (settings->skip_copies && width * height > 4096) return;
  for (size_t row = 0; row < height; row++) copy(to + row * to_pitch, from + row * from_pitch, width, kind);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  int error = begin(to, from, kind, stream);
  if (!error) copy(to, from, bytes, kind);
  return error;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  null_gpu_use("cudaMemcpy");
  null_gpu_count("cudaMemcpy");
  copy(to, from, bytes, kind);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  null_gpu_count("cudaMemcpy2DAsync");
  if (width > to_pitch || width > from_pitch) return null_gpu_fail(cudaErrorInvalidPitchValue);
  int error = begin(to, from, kind, stream);
  if (!error) copy_rows(to, to_pitch, from, from_pitch, width, height, kind);
  return error;
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind) {
  null_gpu_use("cudaMemcpy2D");
  null_gpu_count("cudaMemcpy2D");
  if (width > to_pitch || width > from_pitch) return null_gpu_fail(cudaErrorInvalidPitchValue);
  copy_rows(to, to_pitch, from, from_pitch, width, height, kind);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
  null_gpu_count("cudaMemcpyPeerAsync");
  null_gpu_open_context(to_device, "cudaMemcpyPeerAsync");
  null_gpu_open_context(from_device, "cudaMemcpyPeerAsync");
  copy(to, from, bytes, cudaMemcpyDeviceToDevice);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  null_gpu_use("cudaMemsetAsync");
  null_gpu_count("cudaMemsetAsync");
  if (bytes < LARGE_FILL) memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, 0); }

/* Variables of kernels: they do not exist, and nothing reads them. */
cudaError_t cudaGetSymbolAddress(void **to, const void *symbol) {
  static char memory[1 << 20];
  *to = memory;
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
  return cudaSuccess;
}
