"""The file `shoal.yaml`: frozen models with their rules, and loading with the line and column of every finding.

Start at `model.py` (Spec) and `loader.py`; `members.py` lists the hosts that a spec stands for. `finding.py` and
`member.py` need no pydantic. May import `remote`, `contract`, `errors` and `hostlist`.
"""
