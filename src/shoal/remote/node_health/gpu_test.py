"""The acceptance check of GPUs when a node joins or returns: each opens, holds data, copies, and multiplies right.

Needs the driver's library (libcuda) alone. It runs once after a boot while no job is there, each GPU in a process of
its own: a GPU that hangs must not hold up the health program.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from typing import Any, Callable, Iterator

from .gpu_checks import Gpu, gpus
from .node import Node, read_text

CUDA = "libcuda.so.1"
BOOT = "/proc/sys/kernel/random/boot_id"
TEST_TIMEOUT_S = 45
"""For one GPU; after that time no other is begun in the same run, which has two minutes."""
MEMORY_PART = 2
"""The part of the free memory that is tested is 1 / this: a job that starts meanwhile gets the rest."""
COPY_BYTES, COPIES = 64 << 20, 3
"""The best of several copies counts: the first ones are slow."""
SIZE, LAUNCHES = 512, 50
"""Of the matrices, and how often they are multiplied."""
SLOW_PART = 0.5
"""A GPU is slow if it has less than this part of its best speed."""
UNSUPPORTED = (209, 218, 222)
"""What CUDA returns for a program that the GPU is too old, or the driver is too new for."""
PTX = b""".version 6.0
.target sm_50
.address_size 64
.visible .entry fill(.param .u64 p, .param .u64 n, .param .u32 seed) {
  .reg .pred %q; .reg .b32 %a, %b, %v, %s; .reg .b64 %m, %n, %i, %t, %x;
  ld.param.u64 %m, [p]; cvta.to.global.u64 %m, %m; ld.param.u64 %n, [n]; ld.param.u32 %s, [seed];
  mov.u32 %a, %tid.x; cvt.u64.u32 %x, %a; mov.u32 %a, %ctaid.x; mov.u32 %b, %ntid.x; mad.wide.u32 %i, %a, %b, %x;
  mov.u32 %a, %nctaid.x; mul.wide.u32 %t, %a, %b;
NEXT: setp.ge.u64 %q, %i, %n; @%q bra DONE;
  cvt.u32.u64 %v, %i; mul.lo.u32 %v, %v, 0x9E3779B1; xor.b32 %v, %v, %s;
  shl.b64 %x, %i, 2; add.u64 %x, %m, %x; st.global.u32 [%x], %v; add.u64 %i, %i, %t; bra NEXT;
DONE: ret;
}
.visible .entry compare(.param .u64 p, .param .u64 n, .param .u32 seed, .param .u64 errors) {
  .reg .pred %q, %r; .reg .b32 %a, %b, %v, %w, %s; .reg .b64 %m, %n, %i, %t, %x, %e;
  ld.param.u64 %m, [p]; cvta.to.global.u64 %m, %m; ld.param.u64 %n, [n]; ld.param.u32 %s, [seed];
  ld.param.u64 %e, [errors]; cvta.to.global.u64 %e, %e;
  mov.u32 %a, %tid.x; cvt.u64.u32 %x, %a; mov.u32 %a, %ctaid.x; mov.u32 %b, %ntid.x; mad.wide.u32 %i, %a, %b, %x;
  mov.u32 %a, %nctaid.x; mul.wide.u32 %t, %a, %b;
NEXT: setp.ge.u64 %q, %i, %n; @%q bra DONE;
  cvt.u32.u64 %v, %i; mul.lo.u32 %v, %v, 0x9E3779B1; xor.b32 %v, %v, %s;
  shl.b64 %x, %i, 2; add.u64 %x, %m, %x; ld.global.u32 %w, [%x];
  setp.ne.u32 %r, %v, %w; @%r red.global.add.u32 [%e], 1; add.u64 %i, %i, %t; bra NEXT;
DONE: ret;
}
.visible .entry multiply(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n) {
  .reg .pred %q; .reg .b32 %t, %u, %r, %k, %n, %z; .reg .f32 %f, %g, %s; .reg .b64 %x, %y, %w, %h;
  ld.param.u64 %x, [a]; ld.param.u64 %y, [b]; ld.param.u64 %w, [c]; ld.param.u32 %n, [n];
  cvta.to.global.u64 %x, %x; cvta.to.global.u64 %y, %y; cvta.to.global.u64 %w, %w;
  mov.u32 %t, %ctaid.x; shl.b32 %t, %t, 4; mov.u32 %u, %tid.x; add.u32 %t, %t, %u;
  mov.u32 %r, %ctaid.y; shl.b32 %r, %r, 4; mov.u32 %u, %tid.y; add.u32 %r, %r, %u;
  mul.lo.u32 %z, %r, %n; mul.wide.u32 %h, %z, 4; add.u64 %x, %x, %h;
  add.u32 %z, %z, %t; mul.wide.u32 %h, %z, 4; add.u64 %w, %w, %h;
  mul.wide.u32 %h, %t, 4; add.u64 %y, %y, %h; mul.wide.u32 %h, %n, 4; mov.f32 %s, 0f00000000; mov.u32 %k, 0;
NEXT: setp.ge.u32 %q, %k, %n; @%q bra DONE;
  ld.global.f32 %f, [%x]; ld.global.f32 %g, [%y]; fma.rn.f32 %s, %f, %g, %s;
  add.u64 %x, %x, 4; add.u64 %y, %y, %h; add.u32 %k, %k, 1; bra NEXT;
DONE: st.global.f32 [%w], %s; ret;
}
"""
START = "import sys; sys.path.insert(0, sys.argv[1]); from node_health.gpu_test import main; main()"


class CudaError(Exception):
    """A call of the driver's library failed."""

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(f"{call}: {name or status}")
        self.status = status


class Cuda:
    """The first GPU of this process, through the driver's library."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(CUDA)
        self.call("cuInit", 0)
        device, self.context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuCtxCreate_v2", ctypes.byref(self.context), 0, device)
        self.call("cuModuleLoadData", ctypes.byref(module), PTX)
        self.module = module

    def call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self.library, name)(*arguments))
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(text))
            raise CudaError(name, status, (text.value or b"").decode())

    def allocate(self, size: int) -> ctypes.c_ulonglong:
        pointer = ctypes.c_ulonglong()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def to_gpu(self, pointer: ctypes.c_ulonglong, data: Any, size: int) -> None:
        self.call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(size))

    def to_host(self, data: Any, pointer: ctypes.c_ulonglong, size: int) -> None:
        self.call("cuMemcpyDtoH_v2", data, pointer, ctypes.c_size_t(size))

    def launch(self, name: str, blocks: tuple[int, int], threads: tuple[int, int], *arguments: Any) -> None:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in arguments)
        )
        self.call("cuLaunchKernel", function, *blocks, 1, *threads, 1, 0, None, pointers, None)

    def wait(self) -> None:
        self.call("cuCtxSynchronize")


def main() -> None:
    """In the process of one GPU: test it, and print the result as JSON."""
    try:
        print(json.dumps(test_gpu(Cuda())), flush=True)
    except CudaError as error:
        # A driver that cannot run the program says nothing of the GPU.
        result = {"unsupported": str(error)} if error.status in UNSUPPORTED else {"problem": str(error)}
        print(json.dumps(result), flush=True)


def test_gpu(cuda: Cuda) -> dict[str, Any]:
    """What is wrong, and the speeds in GB/s and GFLOP/s."""
    result: dict[str, Any] = {}
    for test in (test_memory, test_copy, test_product):
        problem = test(cuda, result)
        if problem:
            return {**result, "problem": problem}
    return result


def test_memory(cuda: Cuda, result: dict[str, Any]) -> str:
    """Two patterns in half of the free memory."""
    words = cuda.free_bytes() // MEMORY_PART // 4
    memory, errors, count = cuda.allocate(words * 4), cuda.allocate(4), ctypes.c_uint(0)
    cuda.to_gpu(errors, ctypes.byref(count), 4)
    number = ctypes.c_ulonglong(words)
    start = time.perf_counter()
    for seed in (ctypes.c_uint(0), ctypes.c_uint(0xFFFFFFFF)):
        cuda.launch("fill", (4096, 1), (256, 1), memory, number, seed)
        cuda.launch("compare", (4096, 1), (256, 1), memory, number, seed, errors)
    cuda.wait()
    result["memory GB/s"] = round(4 * words * 4 / (time.perf_counter() - start) / 1e9, 1)
    result["memory MB"] = words * 4 >> 20
    cuda.to_host(ctypes.byref(count), errors, 4)
    cuda.call("cuMemFree_v2", memory)
    return f"{count.value} of {words} words of its memory changed" if count.value else ""


def test_copy(cuda: Cuda, result: dict[str, Any]) -> str:
    """Random bytes to the GPU and back."""
    data = random_bytes(random.Random(1), 1 << 20) * (COPY_BYTES >> 20)
    back, memory = ctypes.create_string_buffer(COPY_BYTES), cuda.allocate(COPY_BYTES)
    result["copy to GPU GB/s"] = result["copy to host GB/s"] = 0.0
    for _ in range(COPIES):
        start = time.perf_counter()
        cuda.to_gpu(memory, data, COPY_BYTES)
        middle = time.perf_counter()
        cuda.to_host(back, memory, COPY_BYTES)
        for name, seconds in (("GPU", middle - start), ("host", time.perf_counter() - middle)):
            key = f"copy to {name} GB/s"
            result[key] = max(result[key], round(COPY_BYTES / seconds / 1e9, 1))
        if back.raw != data:
            return "a copy came back changed"
    return ""


def test_product(cuda: Cuda, result: dict[str, Any]) -> str:
    """A product of matrices of small whole numbers, which floats hold exactly. Checked with a random vector."""
    generator = random.Random(2)
    matrix = ctypes.c_float * (SIZE * SIZE)
    left, right = (matrix(*(byte & 15 for byte in random_bytes(generator, SIZE * SIZE))) for _ in range(2))
    product, size = matrix(), SIZE * SIZE * 4
    a, b, c = (cuda.allocate(size) for _ in range(3))
    cuda.to_gpu(a, left, size)
    cuda.to_gpu(b, right, size)
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        cuda.launch("multiply", (SIZE // 16, SIZE // 16), (16, 16), a, b, c, ctypes.c_uint(SIZE))
    cuda.wait()
    result["product GFLOP/s"] = round(2 * SIZE**3 * LAUNCHES / (time.perf_counter() - start) / 1e9, 1)
    cuda.to_host(product, c, size)
    vector: list[float] = [generator.randrange(2) for _ in range(SIZE)]
    expected = multiply_vector(left, multiply_vector(right, vector))
    return "" if multiply_vector(product, vector) == expected else "a product is wrong"


def random_bytes(generator: random.Random, size: int) -> bytes:
    return generator.getrandbits(8 * size).to_bytes(size, "little")


def multiply_vector(matrix: Any, vector: list[float]) -> list[float]:
    rows = (matrix[start : start + SIZE] for start in range(0, SIZE * SIZE, SIZE))
    return [sum(x * y for x, y in zip(row, vector)) for row in rows]


# ---- in the health program


def check_gpus(node: Node) -> Iterator[str]:
    """GPUs that fail. Each is tested once after a boot, and again until it passes."""
    for gpu, result in _results(node):
        if result.get("problem"):
            yield f"{gpu}: {result['problem']}"


def check_speeds(node: Node) -> Iterator[str]:
    for gpu, result in node.cache.get("gpu_tests", ()):
        for name, value in result.items():
            if name.endswith("/s"):
                best = node.baseline.best(f"{name} {gpu.uuid}", value)
                if value < SLOW_PART * best:
                    what, _, unit = name.rpartition(" ")
                    yield f"{gpu}: {what} {value} {unit}, before {best} {unit}"


def _results(node: Node) -> list[tuple[Gpu, dict[str, Any]]]:
    """The last result of each GPU, tested now where it must be."""
    if "gpu_tests" not in node.cache:
        results = node.memory.setdefault("gpu_tests", {})
        boot, start = read_text(BOOT).strip(), time.monotonic()
        for gpu in gpus(node):
            last = results.get(gpu.uuid) or {}
            is_due = (last.get("boot") != boot or "problem" in last) and time.monotonic() - start < TEST_TIMEOUT_S
            if gpu.uuid and is_due and node.is_idle and not gpu.pids:
                results[gpu.uuid] = {"boot": boot, **run_test(gpu.uuid)}
        node.cache["gpu_tests"] = [(gpu, results[gpu.uuid]) for gpu in gpus(node) if gpu.uuid in results]
    tests: list[tuple[Gpu, dict[str, Any]]] = node.cache["gpu_tests"]
    return tests


def run_test(uuid: str) -> dict[str, Any]:
    """Test one GPU in a process of its own."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", START, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
    )
    try:
        output, errors = process.communicate(timeout=TEST_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            pass  # it hangs in the kernel
        return {"problem": f"its test does not end within {TEST_TIMEOUT_S} s"}
    if process.returncode < 0:
        return {"problem": f"its test was ended by signal {-process.returncode}"}
    try:
        result = json.loads(output)
    except ValueError:
        # Without the library no job can compute there either; the checks of the driver say so.
        return {"unsupported": errors.decode("utf-8", "replace").strip()[-200:]}
    return result if isinstance(result, dict) else {}


TEST_CHECKS: dict[str, Callable[[Node], Iterator[str]]] = {"gpu-test": check_gpus, "gpu-slow": check_speeds}
