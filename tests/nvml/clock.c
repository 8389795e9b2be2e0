/* A wrong clock for tests: preloaded, it sets every program of a host ahead by the seconds in /etc/shoal-clock. */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
    static long seconds = -1;
    if (seconds < 0) {
        FILE *file = fopen("/etc/shoal-clock", "r");
        seconds = 0;
        if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *when) {
    int status = (int)syscall(SYS_clock_gettime, clock, when);
    if (!status && clock == CLOCK_REALTIME) when->tv_sec += ahead();
    return status;
}

int gettimeofday(struct timeval *restrict when, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    when->tv_sec = now.tv_sec;
    when->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *when) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (when) *when = now.tv_sec;
    return now.tv_sec;
}
