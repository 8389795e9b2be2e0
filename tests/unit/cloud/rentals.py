"""Offers and rentals for tests."""

from dataclasses import replace
from typing import Any

from shoal.cloud.providers.api import Offer
from shoal.cloud.rental import Rental

H100 = Offer("lambda", "gpu_8x_h100_sxm5", "us-west-1", usd_hour=31.92, gpu="H100", gpus=8)
A100 = Offer("gcp", "a2-highgpu-1g", "us-central1", "us-central1-b", usd_hour=3.67, gpu="A100", gpus=1)


def rental(token: str = "t1", node: str = "burst1", offer: Offer = H100, **values: Any) -> Rental:
    made = Rental(token, node, "burst", offer.provider, offer, intended_at=100.0, usd_hour=offer.usd_hour)
    return replace(made, **values)
