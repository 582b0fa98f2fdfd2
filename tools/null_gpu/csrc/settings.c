#include "null_gpu.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct model MODELS[] = {
    {9, 0, "NVIDIA H100 80GB HBM3", 132, 52428800, 233472, 232448, 1980000, 5120},
    {8, 0, "NVIDIA A100-SXM4-80GB", 108, 41943040, 167936, 166912, 1410000, 5120},
    {8, 9, "NVIDIA GeForce RTX 4090", 128, 75497472, 102400, 101376, 2520000, 384},
};

static struct settings values;

static const char *read(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value && *value ? value : otherwise;
}

static int is_on(const char *name) { return strcmp(read(name, "0"), "0") != 0; }

static void read_all(void) {
  values.num_devices = atoi(read("NULL_GPU_DEVICES", "1"));
  const char *capability = read("NULL_GPU_CAPABILITY", "9.0");
  for (size_t i = 0; i < sizeof MODELS / sizeof *MODELS; i++) {
    char known[16];
    snprintf(known, sizeof known, "%d.%d", MODELS[i].major, MODELS[i].minor);
    if (!strcmp(known, capability)) values.model = MODELS[i];
  }
  if (!values.model.major) {
    fprintf(stderr, "NULL_GPU_CAPABILITY=%s is not valid: use 8.0, 8.9 or 9.0\n", capability);
    exit(2);
  }
  values.memory = (size_t)(atof(read("NULL_GPU_MEMORY_GIB", "80")) * (1UL << 30));
  values.max_allocated = strtoull(read("NULL_GPU_MAX_ALLOCATED", "18446744073709551615"), NULL, 10);
  values.driver = read("NULL_GPU_DRIVER", "580.95.05");
  int branch = atoi(values.driver); /* the first driver of each CUDA: 580 of 13.0, 570 of 12.8, 550 of 12.4 */
  values.cuda_version = branch >= 580 ? 13000 : branch >= 570 ? 12080 : branch >= 550 ? 12040 : 12020;
  values.zero_reads = is_on("NULL_GPU_ZERO_READS");
  values.skip_copies = is_on("NULL_GPU_SKIP_COPIES");
  values.fail_register = is_on("NULL_GPU_FAIL_REGISTER");
  values.trace = is_on("NULL_GPU_TRACE");
}

const struct settings *null_gpu_settings(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_all);
  return &values;
}

/* Read anew at each call: a process may set its mask until the first call of CUDA. */
int null_gpu_visible(void) {
  int total = null_gpu_settings()->num_devices;
  const char *mask = getenv("CUDA_VISIBLE_DEVICES");
  if (!mask) return total;
  int visible = *mask != 0;
  for (; *mask; mask++) visible += *mask == ',';
  return visible < total ? visible : total;
}
