"""Simulated clouds: HTTP servers that keep to the shapes, delays and errors of the providers, for tests and trials."""
