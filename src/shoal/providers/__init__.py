"""Where hosts come from when they are not there yet. Code asks a provider for capabilities, never for its name."""
