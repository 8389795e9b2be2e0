"""Which samples the ranks read at a step, against those that one process reads: in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal.proof.records import RunRecord


def same_samples(one: RunRecord, many: RunRecord, step: int) -> bool:
    """Whether the ranks together read what one process reads at a step; also where that is not known."""
    batch, parts = one.samples(step)[0], many.samples(step)
    read = Counter(name for part in parts for name in part)
    return not batch or not read or read == Counter(batch)


def which_samples(one: RunRecord, many: RunRecord, step: int) -> str:
    """What is wrong with the samples of a step, and what to do; empty where they are the same, or not known.

    Samples are called by their place in the batch of one process, counted from 1.
    """
    if same_samples(one, many, step):
        return ""
    batch, parts = one.samples(step)[0], many.samples(step)
    read = Counter(name for part in parts for name in part)
    ranks, sizes = len(parts), [len(part) for part in parts]
    if all(Counter(part) == Counter(parts[0]) for part in parts):
        return _all_the_same(batch, parts[0])
    if all(size == len(batch) for size in sizes):
        return (
            f"each of the {ranks} ranks reads {len(batch)} samples, {sum(sizes)} together, and one process"
            f" {len(batch)}: the batch is stated for a rank; state it for the job, {len(batch)} // world_size a rank"
            f" (or Loader(global_batch={len(batch)}))"
        )
    if set(read) - set(batch):
        return _others(one, many, step)
    return _missing(batch, parts, read)


def _all_the_same(batch: Sequence[str], part: Sequence[str]) -> str:
    remedy = "give each rank its own part of the batch, as shoal.train.data.Loader or a DistributedSampler does"
    if Counter(part) == Counter(batch):
        return f"every rank reads all {len(batch)} samples that one process reads: {remedy}"
    known = [at for at, name in enumerate(batch, 1) if name in set(part)]
    if not known:
        return f"every rank reads the same {len(part)} samples, none of which one process reads then: {remedy}"
    unread = [at for at, name in enumerate(batch, 1) if name not in set(part)]
    return (
        f"every rank reads the same {len(part)} samples, {_numbers(known)} of the {len(batch)} that one process"
        " reads;"
        f" no rank reads {_numbers(unread)}: {remedy}"
    )


def _others(one: RunRecord, many: RunRecord, step: int) -> str:
    """Ranks read samples that are not in this batch."""
    batch = set(one.samples(step)[0])
    strange = {rank: [name for name in part if name not in batch] for rank, part in enumerate(many.samples(step))}
    who = [rank for rank, names in strange.items() if names]
    count = sum(map(len, strange.values()))
    told = f"{_ranks(who)} {count} samples that one process does not read then"
    elsewhere = {name for at in range(one.steps) if at != step for name in one.samples(at)[0]}
    later = sum(name in elsewhere for names in strange.values() for name in names)
    if later:
        return (
            f"{told}, but at another step ({later} of them): the ranks do not follow one order of the samples, the same"
            " for any number of them; cut one global order into batches and each batch into parts, as"
            " shoal.train.data.Loader does"
        )
    return (
        f"{told}: their data is shuffled, split or changed at random by each rank for itself;"
        " draw the order from one seed for all ranks, and what is random in a sample from that sample's own seed"
    )


def _missing(batch: Sequence[str], parts: Sequence[Sequence[str]], read: Counter[str]) -> str:
    """Every sample is of this batch, but some are read by nobody or more than once."""
    unread = [at for at, name in enumerate(batch, 1) if not read[name]]
    twice = [at for at, name in enumerate(batch, 1) if read[name] > batch.count(name)]
    told = []
    if unread:
        told.append(f"no rank reads {_numbers(unread)} of the {len(batch)} samples that one process reads")
    if twice:
        readers = [rank for rank, part in enumerate(parts) if batch[twice[0] - 1] in part]
        told.append(f"{_ranks(readers)} the same: {_numbers(twice)}")
    sizes = [len(part) for part in parts]
    fair = max(sizes)
    short = [rank for rank, size in enumerate(sizes) if size < fair]
    for rank in short[:1]:
        told.append(f"rank {rank} reads {sizes[rank]}, others {fair}")
    return "; ".join(told) + ": every sample of the batch must be read by one rank, and by one only"


def _numbers(places: Sequence[int]) -> str:
    """Places in a batch as a person writes them: `numbers 1-4, 7`."""
    runs: list[list[int]] = []
    for place in sorted(places):
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    told = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"number{'s' * (len(places) > 1)} {told}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} reads"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} read"
