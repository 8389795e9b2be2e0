"""Jobs and sites: a job stays on one unless it says how many it may span, `--switches=2`.

The sites are switches under a common one, so that a job can span them; a job that says nothing gets `--switches=1`,
and waits for that as long as it takes. slurmctld asks a Lua script about every job, whoever submits it and how.
"""

from __future__ import annotations

from shoal.slurm.model import ClusterConf

PLUGIN = "job_submit_lua.so"
SCRIPT = "job_submit.lua"
"""The file beside slurm.conf that slurmctld's plugin reads, again whenever it has changed."""
ABOVE = "shoal-sites"
"""The switch above all sites. No site can have this name."""
FOREVER = 365 * 24 * 3600
"""Seconds that a job waits for nodes on as many sites as it asked for; Slurm's own default gives up after 300."""


def job_submit_lua(c: ClusterConf) -> str:
    """The script that gives a job the switches it did not ask for."""
    largest = max((len(switch.nodes) for switch in c.switches), default=0)
    return (
        "-- Written by shoal; changes here are lost.\n"
        "-- A job stays on one site unless it says how many it may span: --switches=2.\n"
        f"local largest_site = {largest}\n"
        "\n"
        "local function given(number)\n"
        "    return number ~= nil and number > 0 and number < 0xfffffff0\n"
        "end\n"
        "\n"
        "function slurm_job_submit(job, partitions, uid)\n"
        "    if given(job.req_switch) then\n"
        "        return slurm.SUCCESS\n"
        "    end\n"
        "    if given(job.min_nodes) and job.min_nodes > largest_site then\n"
        '        slurm.log_user("no site has " .. job.min_nodes .. " nodes; "\n'
        '            .. "a job that may span sites says how many: --switches=2")\n'
        "        return slurm.ERROR\n"
        "    end\n"
        "    job.req_switch = 1\n"
        f"    job.wait4switch = {FOREVER}\n"
        "    return slurm.SUCCESS\n"
        "end\n"
        "\n"
        "function slurm_job_modify(job, record, partitions, uid)\n"
        "    return slurm.SUCCESS\n"
        "end\n"
        "\n"
        "return slurm.SUCCESS\n"
    )
