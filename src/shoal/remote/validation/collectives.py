"""All-reduce with torch, over NCCL or gloo: among all ranks, inside each node, and between every two nodes."""

from __future__ import annotations

import datetime
import importlib.util
import time
from typing import Any, Dict, List

from .place import MissingTool, Rank, emit, rounds, size_row

GROUP_TIMEOUT_S = 120.0
"""For ranks that do not come: a node without torch, or an address that the others cannot reach."""


def load_torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise MissingTool("torch", "torch")
    import torch

    return torch


def measure_torch(rank: Rank, options: Dict[str, Any]) -> None:
    """The row `torch all-reduce`."""
    torch = load_torch()
    import torch.distributed as dist

    device, backend = "cpu", "gloo"
    if options["gpus"]:
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU: is it a build for CPUs only?")
        torch.cuda.set_device(rank.local_rank % torch.cuda.device_count())
        device, backend = "cuda", "nccl"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S))
    try:
        nodes: List[Any] = [None] * rank.world
        dist.all_gather_object(nodes, rank.node)
        names = list(dict.fromkeys(nodes))
        measure = Measurement(torch, dist, device, int(options["iterations"]))
        sizes = [measure.all_reduce(size, None, rank.rank, list(range(rank.world))) for size in options["sizes"]]
        if rank.rank == 0:
            version = "torch %s" % torch.__version__
            if device == "cuda":
                version += ", NCCL %s" % ".".join(map(str, torch.cuda.nccl.version()))
            gpu = torch.cuda.get_device_name() if device == "cuda" else ""
            values = {"backend": backend, "sizes": sizes, "ranks": rank.world, "nodes": names}
            emit(rank, "torch", version=version, gpu=gpu, **values)
        largest = options["sizes"][-1]
        if rank.world > len(names) > 1:
            measure_nodes(measure, rank, nodes, largest)
        if len(names) > 2:
            measure_pairs(measure, rank, nodes, largest)
    finally:
        dist.destroy_process_group()


class Measurement:
    """The all-reduce of tensors of one kind, checked and timed."""

    def __init__(self, torch: Any, dist: Any, device: str, iterations: int) -> None:
        self.torch = torch
        self.dist = dist
        self.device = device
        self.iterations = iterations

    def all_reduce(self, size: int, group: Any, rank: int, ranks: List[int]) -> Dict[str, Any]:
        """One line of the table; `group` has these ranks, None all."""
        count = size // 4
        tensor = self.torch.full((count,), float(rank + 1), dtype=self.torch.float32, device=self.device)
        self.dist.all_reduce(tensor, group=group)
        expected = float(sum(number + 1 for number in ranks))
        wrong = int((tensor != expected).sum().item())
        tensor.zero_()
        self.dist.barrier(group=group)
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(self.iterations):
            self.dist.all_reduce(tensor, group=group)
        self.synchronize()
        return size_row(size, (time.perf_counter() - begin) / self.iterations, len(ranks), wrong)

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def measure_nodes(measure: Measurement, rank: Rank, nodes: List[str], size: int) -> None:
    """Inside each node, all nodes at once. Every rank must make every group."""
    for name in dict.fromkeys(nodes):
        ranks = [number for number, node in enumerate(nodes) if node == name]
        group = measure.dist.new_group(ranks)
        if rank.rank in ranks:
            line = measure.all_reduce(size, group, rank.rank, ranks)
            if rank.rank == ranks[0]:
                emit(rank, "torch-node", speed=line["busbw"], sizes=[line], ranks=len(ranks), wrong=line["wrong"])


def measure_pairs(measure: Measurement, rank: Rank, nodes: List[str], size: int) -> None:
    """Between every two nodes, in rounds in which no node is in two pairs."""
    for pairs in rounds(list(dict.fromkeys(nodes))):
        measure.dist.barrier()
        groups = []
        for pair in pairs:
            ranks = [number for number, node in enumerate(nodes) if node in pair]
            groups.append((pair, ranks, measure.dist.new_group(ranks)))
        for pair, ranks, group in groups:
            if rank.rank in ranks:
                line = measure.all_reduce(size, group, rank.rank, ranks)
                if rank.rank == ranks[0]:
                    emit(rank, "torch-pair", pair=list(pair), speed=line["busbw"], wrong=line["wrong"])
