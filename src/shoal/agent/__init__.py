"""The standard-library program that converges one host, and the client that feeds it."""
