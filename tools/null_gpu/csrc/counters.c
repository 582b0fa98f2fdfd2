/* Counters of one process, in a file of NULL_GPU_COUNTERS that others map, so that they outlive a killed process.
   tools/null_gpu/counters.py reads this layout. */
#include "null_gpu.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define NUM_KERNELS 4096
#define NUM_CALLS 512

struct slot {
  uint64_t hash; /* of the whole name; 0: unused */
  int64_t count;
  char name[496];
};

struct counters {
  int64_t pid, launches, replayed, violations, contexts, used, peak;
  char visible[64], role[64], rank[64], spare[8];
  struct slot calls[NUM_CALLS], kernels[NUM_KERNELS];
};

static struct counters *counters;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void forget(void) { /* a forked child counts for itself */
  counters = NULL;
  pthread_mutex_init(&mutex, NULL);
}

static void copy_variable(char *to, const char *name) {
  const char *value = getenv(name);
  snprintf(to, 64, "%s", value ? value : "");
}

/* Called with the mutex held. The file is made at the first count: most children never use a GPU. */
static struct counters *open_counters(void) {
  static int registered;
  if (counters) return counters;
  if (!registered++) pthread_atfork(NULL, NULL, forget);
  const char *folder = getenv("NULL_GPU_COUNTERS");
  int file = -1;
  if (folder && *folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
    file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof *counters)) {
      perror(path);
      abort();
    }
  }
  int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  counters = mmap(NULL, sizeof *counters, PROT_READ | PROT_WRITE, flags, file, 0);
  if (counters == MAP_FAILED) abort();
  if (file >= 0) close(file);
  counters->pid = getpid();
  copy_variable(counters->visible, "CUDA_VISIBLE_DEVICES");
  copy_variable(counters->role, "RELAY_ROLE");
  copy_variable(counters->rank, "LOCAL_RANK");
  return counters;
}

uint64_t null_gpu_hash(const char *name) { /* FNV-1a */
  uint64_t hash = 14695981039346656037UL;
  for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 1099511628211UL;
  return hash ? hash : 1;
}

static void add(struct slot *slots, int size, const char *name, uint64_t hash) {
  for (int tries = 0, i = hash % size; tries < size; tries++, i = (i + 1) % size) {
    if (!slots[i].hash) {
      slots[i].hash = hash;
      snprintf(slots[i].name, sizeof slots[i].name, "%s", name);
    }
    if (slots[i].hash == hash) {
      slots[i].count++;
      return;
    }
  }
  fprintf(stderr, "null GPU: more than %d names to count\n", size);
  abort();
}

void null_gpu_count(const char *call) {
  uint64_t hash = null_gpu_hash(call);
  pthread_mutex_lock(&mutex);
  add(open_counters()->calls, NUM_CALLS, call, hash);
  pthread_mutex_unlock(&mutex);
}

void null_gpu_count_kernel(const char *name, uint64_t hash, void *stream) {
  null_gpu_captured_kernel(stream);
  pthread_mutex_lock(&mutex);
  open_counters()->launches++;
  add(counters->kernels, NUM_KERNELS, name, hash ? hash : null_gpu_hash(name));
  pthread_mutex_unlock(&mutex);
}

void null_gpu_count_replay(long num_kernels) {
  pthread_mutex_lock(&mutex);
  open_counters()->replayed += num_kernels;
  pthread_mutex_unlock(&mutex);
}

void null_gpu_count_context(int device, const char *call) {
  pthread_mutex_lock(&mutex);
  open_counters()->contexts |= 1L << device;
  pthread_mutex_unlock(&mutex);
  char text[128];
  snprintf(text, sizeof text, "context on device %d by %s", device, call);
  null_gpu_count(text);
  if (null_gpu_settings()->trace) fprintf(stderr, "null GPU: process %d: %s\n", (int)getpid(), text);
}

void null_gpu_count_violation(const char *call) {
  pthread_mutex_lock(&mutex);
  open_counters()->violations++;
  pthread_mutex_unlock(&mutex);
  char text[128];
  snprintf(text, sizeof text, "capture violation by %s", call);
  null_gpu_count(text);
  fprintf(stderr, "null GPU: process %d: %s\n", (int)getpid(), text);
}

void null_gpu_count_memory(long used) {
  pthread_mutex_lock(&mutex);
  open_counters()->used = used;
  if (used > counters->peak) counters->peak = used;
  pthread_mutex_unlock(&mutex);
}

/* For Python in this process. */
const void *null_gpu_counters(void) {
  pthread_mutex_lock(&mutex);
  const void *found = open_counters();
  pthread_mutex_unlock(&mutex);
  return found;
}

/* Set launches, replays, calls and kernels to 0; contexts, violations and memory stay. */
void null_gpu_reset(void) {
  pthread_mutex_lock(&mutex);
  open_counters()->launches = counters->replayed = 0;
  for (int i = 0; i < NUM_CALLS; i++) counters->calls[i].count = 0;
  for (int i = 0; i < NUM_KERNELS; i++) if (counters->kernels[i].hash) counters->kernels[i].count = 0;
  pthread_mutex_unlock(&mutex);
}
