"""Files of small clusters, to which a test adds its own lines: first nodesets, then keys."""

HEAD = """
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1}}
"""
NODE = "nodesets:\n  lab: {hosts: [{name: n1, address: 10.0.0.11}]}\n"
ONE_NODE = HEAD + NODE
TWO_NODES = ONE_NODE.replace("}]", "}, {name: n2, address: 10.0.0.12}]")
WITH_LOGIN = HEAD + "login: {hosts: [{name: door, address: 10.0.0.2}]}\n" + NODE
