"""Times Shoal's loader beside webdataset's on the same shards, and counts the samples that each loses at a resume.

The shards are written to a temporary directory. Epochs of the two alternate, each is first in every other pair, and
medians are compared. Both shuffle: webdataset its shards and a buffer of 1000 samples, Shoal blocks and windows of 8192
samples. Fails if Shoal is below 95 % of webdataset anywhere, or loses or repeats a sample.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import webdataset
from harness import BenchError, bench_parser, describe_machine, report, run_bench, show_progress
from torch.utils.data import DataLoader, default_collate

from shoal.train.data import Loader, ShardDataset, write_shards

BATCH = 64
PER_SHARD = 500
TARGET = 0.95


@dataclass(frozen=True)
class Case:
    side: int
    """Pixels: the larger file of a sample is an image of side x side x 3 bytes."""
    decode: bool
    workers: int
    cold: bool = False


CASES = [
    *(Case(64, decode, workers) for decode in (False, True) for workers in (0, 1, 2)),
    *(Case(192, False, workers, cold) for cold in (False, True) for workers in (0, 2)),
]


def main() -> None:
    parser = bench_parser("data", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the number of samples")
    options = parser.parse_args()
    if options.small:
        options.rounds, options.scale = 1, 0.1
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sets = {
            side: write_samples(Path(folder), side, int(count * options.scale))
            for side, count in ((64, 8000), (192, 2000))
        }
        lines = [
            describe_machine(options, f"torch {torch.__version__}", f"webdataset {webdataset.__version__}"),
            *(describe_shards(side, shards) for side, shards in sets.items()),
            f"Samples a second, batches of {BATCH}, medians of {options.rounds} alternating epochs:",
            "",
            f"{'sample':<10}{'decode':<9}{'read from':<11}{'workers':>7}{'shoal':>10}{'webdataset':>12}{'ratio':>8}",
        ]
        show_progress("\n".join(lines))
        ratios: list[float] = []
        for case in CASES[::3] if options.small else CASES:
            line, ratio = compare(case, sets[case.side], options.rounds)
            show_progress(line)
            lines.append(line)
            ratios.append(ratio)
        shards = sets[64]
        ours, theirs = resume_shoal(shards), resume_webdataset(shards)
        keys = {sample["__key__"] for sample in ShardDataset(shards).__getitems__(range(len(ShardDataset(shards))))}
        lines += [
            f"Lowest ratio: {min(ratios):.2f}; target: {TARGET}.",
            "",
            f"One epoch of {len(keys):,} samples, stopped after 40 % on 2 ranks with 2 workers each and resumed on 1:",
            f"{'':<12}{'repeated':>9}{'lost':>8}   how it resumes",
            f"{'shoal':<12}{count_repeated(ours):>9,}{len(keys - set(ours)):>8,}   state_dict, load_state_dict",
            f"{'webdataset':<12}{count_repeated(theirs):>9,}{len(keys - set(theirs)):>8,}   "
            "it stores no position: restarts the epoch for the remaining steps",
        ]
    report("data", options, "\n".join(lines) + "\n")
    if sorted(ours) != sorted(keys):
        raise BenchError("Shoal lost or repeated samples at the resume")
    if min(ratios) < TARGET and not options.small:
        raise BenchError(f"the lowest ratio is {min(ratios):.2f}, below {TARGET}")


def write_samples(folder: Path, side: int, count: int) -> list[str]:
    random = torch.Generator().manual_seed(1)

    def samples() -> Iterator[dict[str, object]]:
        for number in range(count):
            pixels = torch.randint(0, 256, (side * side * 3,), dtype=torch.uint8, generator=random)
            yield {"__key__": f"{number:06d}", "raw": pixels.numpy().tobytes(), "cls": number % 10}

    return [str(path) for path in write_shards(folder / str(side), samples(), per_shard=min(PER_SHARD, count // 4))]


def describe_shards(side: int, shards: list[str]) -> str:
    start = time.perf_counter()
    count = len(ShardDataset(shards))
    took = time.perf_counter() - start
    size = sum(Path(shard).stat().st_size for shard in shards) >> 20
    return (
        f"{count} samples of {side * side * 3 >> 10} KiB in {len(shards)} shards, {size} MiB; "
        f"Shoal's indexes, built once: {took:.2f} s."
    )


def compare(case: Case, shards: list[str], rounds: int) -> tuple[str, float]:
    decode, collate = (image, default_collate) if case.decode else (None, list)
    dataset = ShardDataset(shards)
    ours = Loader(dataset, global_batch=BATCH, seed=1, workers=case.workers, decode=decode, collate=collate)
    pair: list[tuple[str, Any]] = [("shoal", ours), ("webdataset", peer(shards, decode, collate, case.workers))]
    speeds: dict[str, list[float]] = {"shoal": [], "webdataset": []}
    for turn in range(rounds + 1):
        for name, loader in pair if turn % 2 else pair[::-1]:
            if case.cold:
                drop_from_page_cache(shards)
            speed = samples_a_second(loader, len(dataset))
            if turn:  # the first epoch is a warm-up: it starts the workers
                speeds[name].append(speed)
    ours.close()
    shoal, theirs = (statistics.median(speeds[name]) for name in ("shoal", "webdataset"))
    what = f"{case.side**2 * 3 >> 10} KiB"
    source = "disk" if case.cold else "memory"
    return (
        f"{what:<10}{'float' if decode else 'none':<9}{source:<11}{case.workers:>7}{shoal:>10,.0f}{theirs:>12,.0f}"
        f"{shoal / theirs:>8.2f}",
        shoal / theirs,
    )


def peer(shards: list[str], decode: Callable[[Any], Any] | None, collate: Callable[[Any], Any], workers: int) -> Any:
    pipeline = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=1).shuffle(1000)
    if decode is not None:
        pipeline = pipeline.map(decode)
    return DataLoader(
        pipeline.batched(BATCH, collation_fn=collate),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=2 if workers else None,
    )


def image(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Bytes to a float image: the cheapest decoding there is, beside which a loader's own cost shows most."""
    pixels = torch.frombuffer(bytearray(sample["raw"]), dtype=torch.uint8)
    side = round((len(pixels) / 3) ** 0.5)
    return pixels.view(side, side, 3).permute(2, 0, 1).float().div_(255), int(sample["cls"])


def samples_a_second(loader: Any, count: int) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return count / (time.perf_counter() - start)


def drop_from_page_cache(shards: list[str]) -> None:
    """Drop these shards from the page cache, and nothing else."""
    for shard in shards:
        file = os.open(shard, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def resume_shoal(shards: list[str]) -> list[str]:
    keys: list[str] = []
    state: dict[str, Any] = {}
    for rank in range(2):
        part = Loader(ShardDataset(shards), global_batch=BATCH, rank=rank, world_size=2, workers=2, collate=list)
        for batch in islice(part, len(part) * 2 // 5):
            keys += [sample["__key__"] for sample in batch]
        state = part.state_dict()
        part.close()
    rest = Loader(ShardDataset(shards), global_batch=BATCH, rank=0, world_size=1, collate=list)
    rest.load_state_dict(state)
    for batch in rest:
        keys += [sample["__key__"] for sample, real in zip(batch, rest.mask.tolist(), strict=True) if real]
    return keys


def resume_webdataset(shards: list[str]) -> list[str]:
    keys: list[str] = []
    steps = -(-len(ShardDataset(shards)) // BATCH)
    for rank in range(2):
        pipeline = webdataset.WebDataset(shards[rank::2], shardshuffle=len(shards), seed=1).shuffle(1000)
        part = DataLoader(pipeline.batched(BATCH // 2, collation_fn=list), batch_size=None, num_workers=2)
        for batch in islice(part, steps * 2 // 5):
            keys += [sample["__key__"] for sample in batch]
    rest = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=1).shuffle(1000)
    for batch in islice(rest.batched(BATCH, collation_fn=list), steps - steps * 2 // 5):
        keys += [sample["__key__"] for sample in batch]
    return keys


def count_repeated(keys: list[str]) -> int:
    return len(keys) - len(set(keys))


if __name__ == "__main__":
    run_bench("data", main)
