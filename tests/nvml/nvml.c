/* A simulated NVML for tests: what it answers is in a file of lines `NAME VALUE`, or `GPU.NAME VALUE` for one GPU.
   A value that is missing is one that this driver does not support. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

static int look_up(const char *key, char *value) {
    const char *path = getenv("SHOAL_FAKE_NVML");
    FILE *file = fopen(path ? path : "/etc/shoal-nvml", "r");
    char name[64];
    int status = NOT_SUPPORTED;
    if (!file) return NOT_SUPPORTED;
    while (fscanf(file, "%63s %63s", name, value) == 2)
        if (!strcmp(name, key)) { status = SUCCESS; break; }
    fclose(file);
    return status;
}

static int number(const char *gpu, const char *name, long long *value) {
    char key[64], text[64];
    snprintf(key, sizeof key, gpu ? "%s.%s" : "%s%s", gpu ? gpu : "", name);
    if (look_up(key, text)) return NOT_SUPPORTED;
    *value = atoll(text);
    return SUCCESS;
}

static int get(void *device, const char *name, unsigned *value) {
    long long found;
    char gpu[8];
    snprintf(gpu, sizeof gpu, "%ld", (long)device - 1);
    if (number(gpu, name, &found)) return NOT_SUPPORTED;
    *value = (unsigned)found;
    return SUCCESS;
}

int nvmlInit_v2(void) { long long status; return number(NULL, "init", &status) ? SUCCESS : (int)status; }
int nvmlDeviceGetCount_v2(unsigned *count) { long long n = 0; number(NULL, "count", &n); *count = (unsigned)n; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    unsigned status = 0;
    *device = (void *)((long)index + 1);
    get(*device, "status", &status);
    return (int)status;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    char key[32], value[64];
    snprintf(key, sizeof key, "%ld.uuid", (long)device - 1);
    if (look_up(key, value)) return NOT_SUPPORTED;
    snprintf(text, size, "%s", value);
    return SUCCESS;
}

struct pci { char legacy[16]; unsigned domain, bus, device, ids[2]; char name[32]; };
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *info) { memset(info, 0, sizeof *info); return get(device, "bus", &info->bus); }
int nvmlDeviceGetMinorNumber(void *device, unsigned *value) { return get(device, "minor", value); }
int nvmlDeviceGetPowerUsage(void *device, unsigned *value) { return get(device, "power", value); }
struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *device, struct utilization *rates) { rates->memory = 0; return get(device, "utilization", &rates->gpu); }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *value) { return get(device, "limit", value); }
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *value) { return get(device, "width", value); }
int nvmlDeviceGetRetiredPagesPendingStatus(void *device, unsigned *value) { return get(device, "retired", value); }

int nvmlDeviceGetPersistenceMode(void *device, unsigned *value) { return get(device, "persistence", value); }

int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, int counter, unsigned long long *value) {
    unsigned errors;
    if (counter != 2 || link != 3 || get(device, "link_errors", &errors)) return NOT_SUPPORTED;
    *value = errors;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *value) {
    unsigned links;
    if (get(device, "links", &links)) return NOT_SUPPORTED;
    *value = link < links;
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = *uncorrected = 0;
    return get(device, "remap_pending", pending) || get(device, "remap_failed", failed) ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *value) {
    unsigned count;
    if (kind != 1 || counter != 0 || get(device, "ecc", &count)) return NOT_SUPPORTED;
    *value = count;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *value) {
    unsigned bits;
    if (get(device, "throttle", &bits)) return NOT_SUPPORTED;
    *value = bits;
    return SUCCESS;
}

struct field { unsigned id, scope; long long time, latency; unsigned type; int status; unsigned long long value; };
int nvmlDeviceGetFieldValues(void *device, int count, struct field *field) {
    unsigned action;
    if (count != 1 || field->id != 230) return NOT_FOUND;
    field->status = get(device, "recovery", &action);
    field->value = action;
    return SUCCESS;
}

struct process { unsigned pid; unsigned long long memory; unsigned instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *size, struct process *processes) {
    unsigned pid = 0;
    *size = !get(device, "pid", &pid) && pid;
    processes[0].pid = pid;
    return SUCCESS;
}
