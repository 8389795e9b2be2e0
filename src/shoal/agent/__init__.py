"""The operator's side of the agent: the document a host should match, the facts it reports, the session with it.

The program itself is `shoal.remote.agent`; `loader.py` sends it.
May import hosts, spec, remote and errors.
"""
