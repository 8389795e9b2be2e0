"""Tracking: one MLflow run for a whole job, on all its ranks and through all its requeues.

    with tracker({"lr": 0.1}) as track:
        track.log({"loss": loss}, step=step)

A server that is down, slow or broken does not affect training: records stay in `tracking` of the job's directory.
Does not import torch.
"""

from shoal.train.tracking.track import Status, Tracker, tracker

__all__ = ["Status", "Tracker", "tracker"]
