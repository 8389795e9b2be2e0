"""Plans: what differs between the spec and the hosts, what each change costs, and its application."""
