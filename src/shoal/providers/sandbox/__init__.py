"""The sandbox: real Debian hosts as light containers on this one machine."""
