"""Machines that come and go with the jobs: what runs on the controller beside slurmctld."""
