/* Streams, events, captures and graphs. Work is done at once, so that only captures have a state. */
#include "null_gpu.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>

static uintptr_t last_handle = 0x1000;
static struct {
  int active;
  cudaStream_t stream;
  pthread_t thread;
  long num_kernels;
} capture;

static void *new_handle(void) { return (void *)__atomic_add_fetch(&last_handle, 16, __ATOMIC_RELAXED); }

int null_gpu_is_captured(void *stream) { return capture.active && stream == capture.stream; }

/* Kernels on side streams of the capturing thread are part of the graph as well. */
void null_gpu_captured_kernel(void *stream) {
  if (capture.active && pthread_equal(pthread_self(), capture.thread)) capture.num_kernels++;
}

int null_gpu_violation(const char *call) {
  null_gpu_count_violation(call);
  return null_gpu_fail(cudaErrorStreamCaptureUnsupported);
}

/* Streams */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  null_gpu_use("cudaStreamCreate");
  *stream = new_handle();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  null_gpu_count("cudaStreamSynchronize");
  return null_gpu_is_captured(stream) ? null_gpu_violation("cudaStreamSynchronize") : cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  null_gpu_use("cudaDeviceSynchronize");
  null_gpu_count("cudaDeviceSynchronize");
  int captures = capture.active && pthread_equal(pthread_self(), capture.thread);
  return captures ? null_gpu_violation("cudaDeviceSynchronize") : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  null_gpu_count("cudaStreamWaitEvent");
  return cudaSuccess;
}

/* Events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  null_gpu_use("cudaEventCreate");
  *event = new_handle();
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  null_gpu_count("cudaEventSynchronize");
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = 1.0f; /* nothing can be timed here */
  return cudaSuccess;
}

/* Captures and graphs. A graph's handle is the number of its kernels. */

struct graph {
  long num_kernels;
};

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  null_gpu_count("cudaStreamBeginCapture");
  if (!stream) return null_gpu_violation("cudaStreamBeginCapture on the legacy stream");
  capture.stream = stream;
  capture.thread = pthread_self();
  capture.num_kernels = 0;
  capture.active = 1;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *nodes,
                                          const cudaGraphEdgeData *edges, size_t num_nodes,
                                          enum cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(stream, mode);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  null_gpu_count("cudaStreamEndCapture");
  capture.active = 0;
  struct graph *made = malloc(sizeof *made);
  made->num_kernels = capture.num_kernels;
  *graph = (cudaGraph_t)made;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  null_gpu_use("cudaStreamIsCapturing");
  *status = null_gpu_is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *num_nodes) {
  *status = null_gpu_is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = 7;
  if (graph) *graph = (cudaGraph_t)0x77;
  if (num_nodes) *num_nodes = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  static __thread enum cudaStreamCaptureMode current;
  enum cudaStreamCaptureMode old = current;
  current = *mode;
  *mode = old;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *num_nodes) {
  *num_nodes = 1;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
  null_gpu_count("cudaGraphInstantiate");
  *executable = (cudaGraphExec_t)graph; /* never freed: a graph may be destroyed once it is instantiated */
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  null_gpu_count("cudaGraphLaunch");
  null_gpu_count_replay(((struct graph *)executable)->num_kernels);
  return cudaSuccess;
}
