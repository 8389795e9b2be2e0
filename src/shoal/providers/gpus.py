"""What GPUs are called, whatever a provider makes of their names, and how much memory they have."""

from __future__ import annotations

import re

MEMORY_GB = {
    "P4": 8,
    "P100": 16,
    "V100": 16,
    "T4": 16,
    "A10": 24,
    "L4": 24,
    "A100": 40,
    "L40S": 48,
    "H100": 80,
    "GH200": 96,
    "RTX PRO 6000": 96,
    "H200": 141,
    "B200": 180,
}
"""The usual name -> the memory of one, where its longer name tells none."""


def usual_gpu(name: str) -> tuple[str, int]:
    """A GPU's usual name and its memory in GB: `nvidia-h100-mega-80gb` and `H100 (80 GB SXM5)` are H100 with 80.

    One that nobody knows keeps its name, and has 0 if that does not tell.
    """
    words = " ".join(re.findall(r"[A-Z0-9]+", name.upper()))
    known = next((one for one in MEMORY_GB if re.search(rf"\b{one}\b", words)), "")
    told = re.search(r"\b(\d+) ?GB\b", words)
    return known or name.partition(" (")[0], int(told[1]) if told else MEMORY_GB.get(known, 0)
