"""Wall clock that jumps by hours every second, for a process and its children, below Python.

A library that is loaded before libc answers for it: what reads the wall clock, in whatever language, gets
one that is hours ahead or behind, and another one a second later. Waits until a time of the wall clock take
as long as on a machine whose clock stands like that when they begin. Monotonic clocks are as they are.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HOURS = (0, 5, -7, 2, -26, 1)

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const long hours[] = {%(hours)s};

static long offset_s(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return 3600 * hours[now.tv_sec %% (long)(sizeof(hours) / sizeof(hours[0]))];
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

/* Times of a monotonic clock are counted from the start of the machine. */
static struct timespec kernels(const struct timespec *until) {
    struct timespec real = *until;
    if (real.tv_sec > 1000000000) real.tv_sec -= offset_s();
    return real;
}

static void *original(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

int pthread_cond_timedwait(
    pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict until
) {
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec real = kernels(until);
    if (!wait) wait = original("pthread_cond_timedwait");
    return wait(condition, mutex, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*wait)(sem_t *, const struct timespec *);
    struct timespec real = kernels(until);
    if (!wait) wait = original("sem_timedwait");
    return wait(semaphore, &real);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*wait)(pthread_mutex_t *, const struct timespec *);
    struct timespec real = kernels(until);
    if (!wait) wait = original("pthread_mutex_timedlock");
    return wait(mutex, &real);
}
"""


def jumping_clock(folder: Path) -> dict[str, str]:
    """Build the library in `folder` and return the environment in which the wall clock jumps."""
    source, library = folder / "jumping_clock.c", folder / "jumping_clock.so"
    source.write_text(SOURCE % {"hours": ", ".join(map(str, HOURS))})
    compile_it = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(compile_it, check=True, timeout=60)
    before = [os.environ["LD_PRELOAD"]] if "LD_PRELOAD" in os.environ else []
    return {**os.environ, "LD_PRELOAD": ":".join([*before, str(library)])}
