"""Tracking: one MLflow run for a whole job, on all its ranks and through all its requeues.

    with tracker({"lr": 0.1}) as track:
        track.log({"loss": loss}, step=step)

    track.py            what a script calls
    run_identity.py     which run a process belongs to
    spool.py            records on disk
    delivery.py         the thread that sends them: nothing is lost or sent twice
    mlflow_client.py    MLflow's REST API and the job's run on the server
    system_metrics.py   CPU, memory, network and GPU metrics of each node
    send.py             the command that sends what is left

A server that is down, slow or broken does not affect training: records stay in `tracking` of the job's directory.
May import the standard library, shoal.contract, and from shoal.train env, errors and proof_record.
"""

from shoal.train.tracking.track import Status, Tracker, tracker

__all__ = ["Status", "Tracker", "tracker"]
