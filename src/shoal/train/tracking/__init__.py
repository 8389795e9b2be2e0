"""Tracking: one MLflow run for a whole job, on all its ranks and through all its requeues.

    with tracker({"lr": 0.1}) as track:
        track.log({"loss": loss}, step=step)

    track.py        what a script calls
    identity.py     which run a process belongs to
    spool.py        records on disk, before anything else happens to them
    background.py   the thread that brings them to the disk and to the server
    shipping.py     batches, and why nothing is sent twice or lost
    remote.py       the run on the server
    server.py       MLflow's REST API
    system.py       what each node does
    send.py         the command that sends what is left

A server that is down, slow or broken costs training nothing: the records wait in `tracking` of the job's directory.
"""

from shoal.train.tracking.track import Status, Tracker, tracker

__all__ = ["Status", "Tracker", "tracker"]
