"""How a host is reached: one narrow interface, over SSH, on this machine, or as the fake shipped for tests."""
