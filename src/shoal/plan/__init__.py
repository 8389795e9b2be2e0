"""Plans: what differs between the spec and the hosts, what each change costs, and its application.

Reads hosts through the agent and changes them only in `apply` and the key rotations.
May import roles, jobs, slurm, network, agent, hosts and spec; verbs and the rental service import it.
"""
