"""The names of GPUs."""

from tests.support.cases import cases

from shoal.cloud.providers.prices import gpu_model


@cases(
    "told, usual, memory",
    ("nvidia-tesla-t4", "T4", 16),
    ("nvidia-tesla-a100", "A100", 40),
    ("nvidia-a100-80gb", "A100", 80),
    ("nvidia-h100-mega-80gb", "H100", 80),
    ("nvidia-rtx-pro-6000", "RTX PRO 6000", 96),
    ("nvidia-h200-141gb", "H200", 141),
    ("A10 (24 GB PCIe)", "A10", 24),
    ("GH200 (96 GB)", "GH200", 96),
    ("Tesla V100 (16 GB)", "V100", 16),
    ("NVIDIA H100 80GB HBM3", "H100", 80),
    ("Quadro RTX 6000 (24 GB)", "Quadro RTX 6000", 24),
    ("nvidia-x1", "nvidia-x1", 0),
    ("", "", 0),
)
def test_gpu_name_is_normalized(told: str, usual: str, memory: int) -> None:
    assert gpu_model(told) == (usual, memory)
