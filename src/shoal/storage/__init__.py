"""Shares: how they are served, and how hosts get at them."""
