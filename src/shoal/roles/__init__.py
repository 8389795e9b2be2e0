"""What each host should be, as pure functions of the spec and the facts."""
