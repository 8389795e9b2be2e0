"""Times Shoal's loader beside webdataset's on the same shards, and counts what each loses at a resume.

The shards are written to a temporary folder. Epochs of the two alternate, each begins every other pair, and medians are
compared, since machines are noisy. Both shuffle: webdataset its shards and a buffer of 1000 samples, Shoal blocks
and windows of 8192 samples. Exits with 1 if Shoal is under 95 % of webdataset anywhere, or loses or repeats a sample.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import webdataset
from torch.utils.data import DataLoader, default_collate

from shoal.train.data import Loader, ShardDataset, write_shards

BATCH = 64
PER_SHARD = 500
TO_REACH = 0.95
RESULT = Path(__file__).resolve().parents[1] / "results" / "data.txt"


@dataclass(frozen=True)
class Case:
    side: int
    """Pixels: an image of side x side x 3 bytes is a sample's larger file."""
    decode: bool
    workers: int
    cold: bool = False


CASES = [
    *(Case(64, decode, workers) for decode in (False, True) for workers in (0, 1, 2)),
    *(Case(192, False, workers, cold) for cold in (False, True) for workers in (0, 2)),
]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of samples")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sets = {
            side: written(Path(folder), side, int(count * options.scale)) for side, count in ((64, 8000), (192, 2000))
        }
        lines = [
            f"{os.cpu_count()} CPUs, torch {torch.__version__}, webdataset {webdataset.__version__}.",
            *(about(side, shards) for side, shards in sets.items()),
            f"Samples a second, batches of {BATCH}, medians of {options.rounds} alternated epochs each:",
            "",
            f"{'sample':<10}{'decode':<9}{'read from':<11}{'workers':>7}{'shoal':>10}{'webdataset':>12}{'ratio':>8}",
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)
        ratios: list[float] = []
        for case in CASES:
            line, ratio = compared(case, sets[case.side], options.rounds)
            print(line, file=sys.stderr, flush=True)
            lines.append(line)
            ratios.append(ratio)
        shards = sets[64]
        ours, theirs = shoal_resumed(shards), webdataset_resumed(shards)
        keys = {sample["__key__"] for sample in ShardDataset(shards).__getitems__(range(len(ShardDataset(shards))))}
        lines += [
            f"Lowest ratio: {min(ratios):.2f}; to reach: {TO_REACH}.",
            "",
            f"One epoch of {len(keys):,} samples, stopped after 40 % on 2 ranks with 2 workers each and resumed on 1:",
            f"{'':<12}{'twice':>8}{'never':>8}   how it is resumed",
            f"{'shoal':<12}{repeated(ours):>8,}{len(keys - set(ours)):>8,}   state_dict, load_state_dict",
            f"{'webdataset':<12}{repeated(theirs):>8,}{len(keys - set(theirs)):>8,}   "
            "it keeps no position: from the start, for the steps that are left",
        ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    RESULT.write_text(text)
    return 0 if min(ratios) >= TO_REACH and sorted(ours) == sorted(keys) else 1


def written(folder: Path, side: int, count: int) -> list[str]:
    random = torch.Generator().manual_seed(1)

    def samples() -> Iterator[dict[str, object]]:
        for number in range(count):
            pixels = torch.randint(0, 256, (side * side * 3,), dtype=torch.uint8, generator=random)
            yield {"__key__": f"{number:06d}", "raw": pixels.numpy().tobytes(), "cls": number % 10}

    return [str(path) for path in write_shards(folder / str(side), samples(), per_shard=PER_SHARD)]


def about(side: int, shards: list[str]) -> str:
    start = time.perf_counter()
    count = len(ShardDataset(shards))
    took = time.perf_counter() - start
    size = sum(Path(shard).stat().st_size for shard in shards) >> 20
    return (
        f"{count} samples of {side * side * 3 >> 10} KiB in {len(shards)} shards, {size} MiB; "
        f"Shoal's indexes, built once in the life of the data: {took:.2f} s."
    )


def compared(case: Case, shards: list[str], rounds: int) -> tuple[str, float]:
    decode, collate = (image, default_collate) if case.decode else (None, list)
    dataset = ShardDataset(shards)
    ours = Loader(dataset, global_batch=BATCH, seed=1, workers=case.workers, decode=decode, collate=collate)
    pair: list[tuple[str, Any]] = [("shoal", ours), ("webdataset", peer(shards, decode, collate, case.workers))]
    speeds: dict[str, list[float]] = {"shoal": [], "webdataset": []}
    for turn in range(rounds + 1):
        for name, loader in pair if turn % 2 else pair[::-1]:
            if case.cold:
                forget(shards)
            speed = samples_a_second(loader, len(dataset))
            if turn:  # the first epoch starts the workers
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


def forget(shards: list[str]) -> None:
    """Have the kernel drop the shards from memory, and nothing else of this machine's."""
    for shard in shards:
        file = os.open(shard, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def shoal_resumed(shards: list[str]) -> list[str]:
    seen: list[str] = []
    state: dict[str, Any] = {}
    for rank in range(2):
        part = Loader(ShardDataset(shards), global_batch=BATCH, rank=rank, world_size=2, workers=2, collate=list)
        for batch in islice(part, len(part) * 2 // 5):
            seen += [sample["__key__"] for sample in batch]
        state = part.state_dict()
        part.close()
    rest = Loader(ShardDataset(shards), global_batch=BATCH, rank=0, world_size=1, collate=list)
    rest.load_state_dict(state)
    for batch in rest:
        seen += [sample["__key__"] for sample, real in zip(batch, rest.mask.tolist(), strict=True) if real]
    return seen


def webdataset_resumed(shards: list[str]) -> list[str]:
    seen: list[str] = []
    steps = -(-len(ShardDataset(shards)) // BATCH)
    for rank in range(2):
        pipeline = webdataset.WebDataset(shards[rank::2], shardshuffle=len(shards), seed=1).shuffle(1000)
        part = DataLoader(pipeline.batched(BATCH // 2, collation_fn=list), batch_size=None, num_workers=2)
        for batch in islice(part, steps * 2 // 5):
            seen += [sample["__key__"] for sample in batch]
    rest = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=1).shuffle(1000)
    for batch in islice(rest.batched(BATCH, collation_fn=list), steps - steps * 2 // 5):
        seen += [sample["__key__"] for sample in batch]
    return seen


def repeated(seen: list[str]) -> int:
    return len(seen) - len(set(seen))


if __name__ == "__main__":
    sys.exit(main())
