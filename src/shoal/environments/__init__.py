"""Python environments for jobs: their requirements, where hosts keep them, and whether a torch fits the drivers.

Pure functions over text; `remote/environment_builder.py` builds. Imports spec, remote and what lies below.
"""
