/* A simulated libcuda for tests. Memory of the GPU is memory of the process; faults are in the file of nvml.c, as lines
   `cuda.NAME VALUE`: init (status of cuInit), memory, copy, product (wrong results), hang. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long fault(const char *name) {
    const char *path = getenv("SHOAL_FAKE_NVML");
    FILE *file = fopen(path ? path : "/etc/shoal-nvml", "r");
    char key[64], value[64], wanted[64];
    long found = 0;
    if (!file) return 0;
    snprintf(wanted, sizeof wanted, "cuda.%s", name);
    while (fscanf(file, "%63s %63s", key, value) == 2)
        if (!strcmp(key, wanted)) found = atol(value);
    fclose(file);
    return found;
}

int cuInit(unsigned flags) { if (fault("hang")) pause(); return (int)fault("init"); }
int cuGetErrorName(int status, const char **name) { *name = status == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { *context = (void *)1; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return (int)fault("module"); }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = 16 << 20; return 0; }
int cuMemAlloc_v2(unsigned long long *pointer, size_t size) { *pointer = (unsigned long long)calloc(1, size); return 0; }
int cuMemFree_v2(unsigned long long pointer) { free((void *)pointer); return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size) { memcpy((void *)to, from, size); return 0; }

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) {
    memcpy(to, (void *)from, size);
    if (size > 1 << 21 && fault("copy")) ((char *)to)[size / 2] ^= 1;
    return 0;
}

static void multiply(const float *a, const float *b, float *c, unsigned n) {
    static int is_done;
    if (is_done++) return;
    for (unsigned row = 0; row < n; row++)
        for (unsigned k = 0; k < n; k++)
            for (unsigned column = 0; column < n; column++) c[row * n + column] += a[row * n + k] * b[k * n + column];
    if (fault("product")) for (unsigned row = 0; row < n; row++) c[row * n] += 1;
}

int cuLaunchKernel(const char *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    unsigned *memory = *(unsigned **)arguments[0];
    if (!strcmp(function, "multiply")) {
        multiply(*(float **)arguments[0], *(float **)arguments[1], *(float **)arguments[2], *(unsigned *)arguments[3]);
        return 0;
    }
    unsigned long long words = *(unsigned long long *)arguments[1];
    unsigned seed = *(unsigned *)arguments[2];
    int is_fill = !strcmp(function, "fill");
    for (unsigned long long i = 0; i < words; i++) {
        unsigned value = (unsigned)i * 0x9E3779B1u ^ seed;
        if (is_fill) memory[i] = value;
        else if (memory[i] != value) (**(unsigned **)arguments[3])++;
    }
    if (is_fill && fault("memory")) memory[words / 2] ^= 4;
    return 0;
}
