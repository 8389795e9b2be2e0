"""The GPUs of a rank: that the driver opens them, as many as Slurm gave, and copies and a product where torch is."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import time
from typing import Any, Dict, List

from .place import Rank, emit

DRIVER = "libcuda.so.1"
COPY_BYTES = 256 << 20
PRODUCT_SIZE = 4096
REPEATS = 10


def check_gpus(rank: Rank, options: Dict[str, Any]) -> None:
    """The row `gpu`."""
    names = open_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    expected = int(options["gpus"])
    values: Dict[str, Any] = {"gpus": names, "expected": expected, "visible": visible}
    if len(names) >= expected and importlib.util.find_spec("torch") is not None:
        values.update(measure_gpu(rank))
    emit(rank, "gpu", **values)


def open_gpus() -> List[str]:
    """The names of the GPUs that the driver opens for this process."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise RuntimeError("the NVIDIA driver is not usable here: %s" % error) from None
    check(driver, "cuInit", 0)
    count = ctypes.c_int()
    check(driver, "cuDeviceGetCount", ctypes.byref(count))
    names = []
    for number in range(count.value):
        device, text = ctypes.c_int(), ctypes.create_string_buffer(256)
        check(driver, "cuDeviceGet", ctypes.byref(device), number)
        check(driver, "cuDeviceGetName", text, 256, device)
        names.append(text.value.decode())
    return names


def check(driver: Any, function: str, *arguments: Any) -> None:
    status = getattr(driver, function)(*arguments)
    if status != 0:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError("%s: %s" % (function, name.value.decode() if name.value else "error %d" % status))


def measure_gpu(rank: Rank) -> Dict[str, Any]:
    """Copies in GB/s and a matrix product in TFLOP/s on the GPU of this rank; the product is checked."""
    import torch

    if not torch.cuda.is_available():
        return {"note": "torch sees no GPU: it is a build for CPUs only, or for another driver"}
    torch.cuda.set_device(rank.local_rank % torch.cuda.device_count())
    on_host = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
    on_gpu = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    values: Dict[str, Any] = {"h2d": COPY_BYTES / timed(lambda: on_gpu.copy_(on_host)) / 1e9}
    if torch.cuda.device_count() > 1:
        other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
        on_other = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda:%d" % other)
        values["d2d"] = COPY_BYTES / timed(lambda: on_other.copy_(on_gpu)) / 1e9
    factor = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.float16, device="cuda")
    values["tflops"] = 2 * PRODUCT_SIZE**3 / timed(lambda: torch.mm(factor, factor)) / 1e12
    product = torch.mm(factor, factor)
    values["wrong"] = int((product != PRODUCT_SIZE).sum().item())
    return {name: round(value, 3) for name, value in values.items()}


def timed(work: Any) -> float:
    """Seconds of one run, after one that does not count."""
    import torch

    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / REPEATS
