"""What `shoal validate` concludes from the output of its jobs: rows, findings, published limits. Pure."""
