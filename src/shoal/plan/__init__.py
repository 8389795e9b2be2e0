"""What differs between the spec and the hosts, what changing it costs, and doing it."""
