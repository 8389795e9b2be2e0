"""Shared directories: which access each host uses, and the text of NFS, sshfs and rsync configuration.

Pure functions over text and facts; `roles` applies it. Imports spec, agent's facts and what lies below.
"""
