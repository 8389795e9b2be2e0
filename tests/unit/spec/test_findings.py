"""Every bad file gets every finding, word for word, at its place."""

from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.errors import SpecError
from shoal.spec.loader import load_all, load_text, load_text_all

EMPTY = "s.yaml:1:1: the file is empty, write a spec into it: `shoal init` makes one"
HEAD = "cluster: reef\ncontroller: {host: ctl}\n"
GOOD = HEAD + "nodesets:\n  lab: {hosts: [gpu01, gpu02]}\n"
"""Four lines that load; cases add to them from line 5 on."""

CASES: dict[str, tuple[str, list[str]]] = {
    # not a spec at all
    "empty file": ("", [EMPTY]),
    "only comments": ("# nothing\n", [EMPTY]),
    "an empty document": ("---\n", [EMPTY]),
    "null": ("null\n", [EMPTY]),
    "top-level list": (
        "- a\n- b\n",
        ["s.yaml:1:1: the file is not a mapping, found a list, start it with `cluster: NAME`"],
    ),
    "top-level text": (
        "hello\n",
        ['s.yaml:1:1: the file is not a mapping, found "hello", start it with `cluster: NAME`'],
    ),
    "several documents": (
        GOOD + "---\ncluster: b\n",
        ["s.yaml:5:1: several documents in one file, found `---`, keep one"],
    ),
    "not YAML": (
        "cluster: reef\n  controller: x\n",
        [
            "s.yaml:2:13: not YAML: mapping values are not allowed here, "
            "check the indentation here and above, and the blanks after colons"
        ],
    ),
    "open bracket": (
        "cluster: [reef\n",
        [
            "s.yaml:2:1: not YAML: expected ',' or ']', but got '<stream end>', "
            "check the quotes, brackets and indentation here"
        ],
    ),
    "open quote": (
        "cluster: 'reef\n",
        ["s.yaml:2:1: not YAML: found unexpected end of stream, close the quote or bracket that is still open"],
    ),
    "hostlist without quotes in brackets": (
        HEAD + "nodesets:\n  lab: {hosts: [gpu[01-16]]}\n",
        ["s.yaml:4:20: not YAML: expected ',' or ']', but got '[', put quotes around a hostlist: \"gpu[01-16]\""],
    ),
    "tab": ("cluster: reef\ncontroller:\n\thost: ctl\n", ["s.yaml:3:1: a tab, indent with spaces"]),
    "control character": ("cluster: reef\na: \x07\n", ["s.yaml:2:4: not text, found character U+0007, delete it"]),
    "nested too deeply": (
        "a: " + "[" * 1000,
        ["s.yaml:1:19: nested too deeply, a spec has at most 16 levels"],
    ),
    # what YAML has and a spec does not
    "anchor and alias": (
        GOOD + "partitions:\n  a: &p {nodesets: [lab]}\n  b: *p\n",
        [
            "s.yaml:6:3 partitions.a: anchors are not supported, found `&p`, delete it and write the value out",
            "s.yaml:7:3 partitions.b: aliases are not supported, found `*p`, write the value out",
        ],
    ),
    "merge key": (
        GOOD + "partitions:\n  a:\n    <<: {default: true}\n    nodesets: [lab]\n",
        ["s.yaml:7:5 partitions.a: merge keys are not supported, found `<<`, write the keys out"],
    ),
    "tag": (
        GOOD + "slurm: !!python/object:os.system {}\n",
        [
            's.yaml:5:1 slurm: tags are not supported, found "tag:yaml.org,2002:python/object:os.system", delete it',
        ],
    ),
    "key that is a list": (GOOD + "? [a]\n: b\n", ["s.yaml:5:3: not a key, a key is a plain word"]),
    "no value": (
        GOOD + "partitions:\n",
        ["s.yaml:5:1 partitions: no value, found nothing, give one, indent its lines, or delete the key"],
    ),
    "huge number": (
        GOOD.replace("{hosts: [gpu01, gpu02]}", "{provider: sandbox, count: 99999999999999999999}"),
        ['s.yaml:4:35 nodesets.lab.count: the number is too large, found "99999999999999999999", give a smaller one'],
    ),
    # keys
    "unknown key": (
        GOOD + "partition: {}\n",
        ['s.yaml:5:1: unknown key, found "partition", did you mean `partitions`?'],
    ),
    "unknown key far from any": (
        GOOD + "partitions:\n  main: {nodesets: [lab], zzz: 1}\n",
        [
            's.yaml:6:27 partitions.main: unknown key, found "zzz", '
            "known: nodesets, default, max_time, default_time, max_nodes, priority, grace, preemptable, options"
        ],
    ),
    "a misspelt key is not missing as well": (
        "cluster: reef\ncontroler: {host: ctl}\nnodesets: {lab: {hosts: [gpu01]}}\n",
        ['s.yaml:2:1: unknown key, found "controler", did you mean `controller`?'],
    ),
    "unknown key among many": (
        GOOD + "  f: {provider: sandbox, count: 1, zzz: 2}\n",
        [
            's.yaml:5:36 nodesets.f: unknown key, found "zzz", known: provider, kind, image, cpus, memory, disk, gpus, '
            "cgroups, user, port, identity, site, hosts, count, driver, max, type, region, zone, market, offers, "
            "prefer, idle, lifetime, max_price, budget, features, weight, shards, mps, price"
        ],
    ),
    "unknown key of a host": (
        HEAD + "nodesets:\n  lab: {hosts: [{name: gpu01, adress: 10.0.0.1}]}\n",
        ['s.yaml:4:31 nodesets.lab.hosts[0]: unknown key, found "adress", did you mean `address`?'],
    ),
    "duplicate key": (
        GOOD + "cluster: other\n",
        ['s.yaml:5:1 cluster: duplicate key, found "cluster", it is at line 1 already; keep one'],
    ),
    "duplicate nodeset": (
        GOOD + "  lab: {hosts: [x]}\n",
        ['s.yaml:5:3 nodesets.lab: duplicate key, found "lab", it is at line 4 already; keep one'],
    ),
    "missing keys": (
        "firewall: true\n",
        [
            "s.yaml:1:1: missing key `cluster`, add a line such as `cluster: reef`",
            "s.yaml:1:1: missing key `controller`, add a line such as `controller: {host: gpu01}`",
        ],
    ),
    # types and ranges
    "a number for a name": (
        GOOD.replace("reef", "12"),
        ['s.yaml:1:10 cluster: not text, found 12, put it in quotes: "12"'],
    ),
    "yes for true": (
        GOOD + "firewall: yes\n",
        ['s.yaml:5:11 firewall: not true or false, found "yes", write `true` or `false`'],
    ),
    "text for a list": (
        GOOD + "partitions:\n  main: {nodesets: lab}\n",
        ['s.yaml:6:20 partitions.main.nodesets: not a list, found "lab", write [lab]'],
    ),
    "hosts with commas for a list": (
        HEAD + "nodesets:\n  lab: {hosts: 'n1, gpu[01,03]'}\n",
        ['s.yaml:4:16 nodesets.lab.hosts: not a list, found "n1, gpu[01,03]", write [n1, "gpu[01,03]"]'],
    ),
    "a name for the controller": (
        GOOD.replace("{host: ctl}", "ctl"),
        ['s.yaml:2:13 controller: not a mapping, found "ctl", write it as `controller: {host: gpu01}`'],
    ),
    "list for a mapping": (
        HEAD + "nodesets: [a]\n",
        ["s.yaml:3:1 nodesets: not a mapping, found a list, write it as `nodesets: {lab: {hosts: [gpu01, gpu02]}}`"],
    ),
    "list for a nodeset": (
        HEAD + "nodesets: {lab: [a]}\n",
        ["s.yaml:3:12 nodesets.lab: not a mapping, found a list, write it as `lab: {hosts: [gpu01, gpu02]}`"],
    ),
    "number for a nodeset in a partition": (
        GOOD + "partitions: {main: {nodesets: [lab, 3]}}\n",
        ["s.yaml:5:37 partitions.main.nodesets[1]: not text, found 3, write a plain word"],
    ),
    "out of range": (
        HEAD + "nodesets:\n  f: {provider: sandbox, count: 65, cpus: 0, gpus: 17, memory: 128M, weight: -1}\n",
        [
            "s.yaml:4:33 nodesets.f.count: out of range, found 65, give one from 1 to 64",
            "s.yaml:4:43 nodesets.f.cpus: out of range, found 0, give one from 1 to 1024",
            "s.yaml:4:52 nodesets.f.gpus: out of range, found 17, give one from 0 to 16",
            's.yaml:4:64 nodesets.f.memory: out of range, found "128M", give one from 256M to 16T',
            "s.yaml:4:78 nodesets.f.weight: out of range, found -1, give one from 1 to 1000000",
        ],
    ),
    "not a whole number": (
        HEAD + "nodesets:\n  f: {provider: sandbox, count: .nan, cpus: 2.5, gpus: 2026-01-01, memory: 2048}\n",
        [
            "s.yaml:4:33 nodesets.f.count: not a whole number, found .nan, give one from 1 to 64",
            "s.yaml:4:45 nodesets.f.cpus: not a whole number, found 2.5, give one from 1 to 1024",
            's.yaml:4:56 nodesets.f.gpus: not a whole number, found "2026-01-01", give one from 0 to 16',
            "s.yaml:4:76 nodesets.f.memory: not a size, found 2048, write a number and M, G or T: 512M, 2G",
        ],
    ),
    "times": (
        GOOD + "partitions:\n  a: {nodesets: [lab], max_time: '1:30', default_time: 2-25:00:00}\n"
        "  b: {nodesets: [lab], max_time: 0, default_time: true}\n"
        "  c: {nodesets: [lab], max_time: 01:00:00, default_time: 61}\n",
        [
            's.yaml:6:34 partitions.a.max_time: not a time, found "1:30", '
            "write minutes (90), HH:MM:SS (01:30:00), D-HH:MM:SS (1-12:00:00) or infinite",
            's.yaml:6:56 partitions.a.default_time: not a time, found "2-25:00:00", '
            "write minutes (90), HH:MM:SS (01:30:00), D-HH:MM:SS (1-12:00:00) or infinite",
            "s.yaml:7:34 partitions.b.max_time: out of range, found 0, "
            "give at least one minute and at most 366 days, or infinite",
            "s.yaml:7:51 partitions.b.default_time: not a time, found true, "
            "write minutes (90), HH:MM:SS (01:30:00), D-HH:MM:SS (1-12:00:00) or infinite",
            "s.yaml:8:58 partitions.c.default_time: longer than `max_time`, found 61, give at most 01:00:00",
        ],
    ),
    "preemption": (
        GOOD + "partitions:\n  a: {nodesets: [lab], grace: 1m}\n"
        "  b: {nodesets: [lab], grace: 20, preemptable: false}\n",
        [
            's.yaml:6:31 partitions.a.grace: not a whole number, found "1m", give one from 0 to 65533',
            "s.yaml:7:31 partitions.b.grace: `grace` where no job is preempted, found 20, delete it, or `preemptable`",
        ],
    ),
    "unknown network": (
        GOOD + "network: vpn\n",
        ['s.yaml:5:10 network: unknown network, found "vpn", choose one of lan, wireguard, tailscale'],
    ),
    "network that is neither word nor mapping": (
        GOOD + "network: [lan]\n",
        [
            "s.yaml:5:1 network: not a network, found a list, choose one of lan, wireguard, tailscale, or write "
            "{kind: wireguard}"
        ],
    ),
    "bad values of a network": (
        GOOD + "network: {kind: wireguard, subnet: 8.8.0.0/16, port: 0, hub: gpu09}\n",
        [
            's.yaml:5:36 network.subnet: not a private subnet, found "8.8.0.0/16", write a private IPv4 network of /8 '
            "to /28, such as 10.77.0.0/16",
            "s.yaml:5:54 network.port: out of range, found 0, give one from 1 to 65535",
            's.yaml:5:62 network.hub: the hub is not a host of the cluster, found "gpu09", did you mean `gpu02`?',
        ],
    ),
    "fields of another kind of network": (
        GOOD + "network: {kind: lan, port: 51821, tags: [slurm]}\n",
        [
            "s.yaml:5:28 network.port: `port` applies only to wireguard, delete it, or use wireguard",
            "s.yaml:5:35 network.tags: `tags` applies only to tailscale, delete it, or use tailscale",
        ],
    ),
    "network too small for its hosts": (
        HEAD + "nodesets: {lab: {hosts: ['g[01-20]']}}\nnetwork: {kind: wireguard, subnet: 10.9.0.0/28}\n",
        [
            "s.yaml:4:36 network.subnet: more hosts than the subnet has addresses, found 21 hosts, and room for 14, "
            "give a larger one"
        ],
    ),
    "endpoint that is none": (
        HEAD + "nodesets: {lab: {hosts: [{name: g1, endpoint: 'x:99999'}, {name: g2, endpoint: 'a b'}]}}\n",
        [
            's.yaml:3:47 nodesets.lab.hosts[0].endpoint: not a port, found "x:99999", write an address, or one with a '
            "port: lab.example.org:51820",
            's.yaml:3:80 nodesets.lab.hosts[1].endpoint: not an endpoint, found "a b", write an address, or one with '
            "a port: lab.example.org:51820",
        ],
    ),
    "a controller cannot be rented from every provider": (
        "cluster: reef\ncontroller: {provider: lambda}\nlogin: {provider: azure, count: 1}\n"
        "nodesets: {a: {hosts: [b]}}\n",
        [
            "s.yaml:2:24 controller.provider: lambda rents out no host that stays: its machines cannot be stopped, and "
            'get another address and an empty disk when they are ordered again, found "lambda", rent it from aws, gcp',
            's.yaml:3:19 login.provider: unknown provider, found "azure", '
            "known: sandbox, aws, digitalocean, gcp, lambda, nebius, paperspace, runpod, vast",
        ],
    ),
    "a rented controller without an account": (
        "cluster: reef\ncontroller: {provider: gcp, type: e2-standard-2}\nnodesets: {a: {hosts: [b]}}\n",
        [
            's.yaml:2:24 controller.provider: no account at this provider, found "gcp", '
            "add `providers: {gcp: {key: env:NAME}}`",
        ],
    ),
    "a rented controller in a LAN, and fields that its type decides": (
        "cluster: reef\ncontroller: {provider: gcp, type: e2-standard-2}\nproviders: {gcp: {project: p}}\n"
        "login: {provider: gcp, cpus: 2, user: me}\nnodesets: {a: {hosts: [b]}}\n",
        [
            "s.yaml:2:24 controller.provider: a rented host in a LAN: providers translate its address, so Slurm cannot "
            'use it, found "gcp", set `network: wireguard`',
            "s.yaml:4:1 login: missing key `type`, say what to rent: `type: e2-standard-2`",
            "s.yaml:4:30 login.cpus: `cpus` of a rented host, delete it: its type and its image decide",
            "s.yaml:4:39 login.user: `user` of a rented host, delete it: its type and its image decide",
        ],
    ),
    "fields of a rented host where nothing is rented": (
        "cluster: reef\ncontroller: {provider: sandbox, type: e2-standard-2}\nlogin: {hosts: [a], zone: b}\n"
        "nodesets: {a: {hosts: [b]}}\n",
        [
            "s.yaml:2:39 controller.type: `type` where nothing is rented, "
            "delete it, or name an account of `providers` to rent from",
            "s.yaml:3:27 login.zone: `zone` without `provider`, delete it, or use `provider`",
        ],
    ),
    "unknown provider and image": (
        HEAD + "nodesets: {l: {provider: azure}, m: {provider: sandbox, count: 1, image: ubuntu}}\n",
        [
            's.yaml:3:26 nodesets.l.provider: unknown provider, found "azure", '
            "known: aws, digitalocean, gcp, lambda, nebius, paperspace, runpod, sandbox, vast",
            's.yaml:3:74 nodesets.m.image: unknown image, found "ubuntu", '
            "choose one of debian11, debian12, debian13, sid",
        ],
    ),
    # names that Slurm or a shell would not take
    "unsafe names": (
        "cluster: Reef; rm\ncontroller: {host: '$(id)'}\nnodesets:\n  'a b': {hosts: ['x;y', '-o', '']}\n"
        "  controller: {hosts: [a]}\n  lab: {hosts: [b], features: ['a&b', ALL]}\n"
        "partitions:\n  DEFAULT: {nodesets: [lab, 'a b', controller]}\n",
        [
            's.yaml:1:10 cluster: not a cluster name, found "Reef; rm", '
            "use a lower-case letter, then lower-case letters, digits and `-`",
            's.yaml:2:20 controller.host: not a host name, found "$(id)", '
            "use letters, digits, `-` and `.`, at most 63 characters",
            's.yaml:4:3 nodesets."a b": not a nodeset name, found "a b", '
            "use a lower-case letter, then lower-case letters, digits and `-`",
            's.yaml:4:19 nodesets."a b".hosts[0]: not a host name, found "x;y", '
            "use letters, digits, `-` and `.`, at most 63 characters",
            's.yaml:4:26 nodesets."a b".hosts[1]: not a host name, found "-o", '
            "use letters, digits, `-` and `.`, at most 63 characters",
            's.yaml:4:32 nodesets."a b".hosts[2]: not a host name, found "", '
            "use letters, digits, `-` and `.`, at most 63 characters",
            's.yaml:5:3 nodesets.controller: this name is reserved, found "controller", give the nodeset another',
            's.yaml:6:32 nodesets.lab.features[0]: not a feature name, found "a&b", '
            "use a letter, then letters, digits, `-`, `_` and `.`",
            's.yaml:6:39 nodesets.lab.features[1]: this name is reserved, found "ALL", give the feature another',
            's.yaml:8:3 partitions.DEFAULT: not a partition name, found "DEFAULT", '
            "use a lower-case letter, then letters, digits, `-` and `_`",
            's.yaml:8:36 partitions.DEFAULT.nodesets[2]: the controller runs no jobs, found "controller", '
            "set `compute: true` on it",
        ],
    ),
    "a name that a terminal would not show": (
        GOOD.replace("lab", "\u200blab") + "partitions: {main: {nodesets: [lab]}}\n",
        [
            's.yaml:4:3 nodesets."\\u200blab": not a nodeset name, found "\\u200blab", '
            "use a lower-case letter, then lower-case letters, digits and `-`",
            's.yaml:5:32 partitions.main.nodesets[0]: unknown nodeset, found "lab", did you mean `\\u200blab`?',
        ],
    ),
    "names that are too long": (
        GOOD.replace("reef", "r" * 25).replace("gpu01", "g" * 64),
        [
            's.yaml:1:10 cluster: this cluster name is too long, found "rrrrrrrrrrrrrrrrrrrrrrrrr", '
            "use at most 24 characters",
            f's.yaml:4:17 nodesets.lab.hosts[0]: not a host name, found "{"g" * 39}... (66 characters), '
            "use letters, digits, `-` and `.`, at most 63 characters",
        ],
    ),
    "newline in a name": (
        GOOD.replace("gpu01", r'"gpu01\nSlurmUser=root"'),
        [
            's.yaml:4:17 nodesets.lab.hosts[0]: not a host name, found "gpu01\\nSlurmUser=root", '
            "use letters, digits, `-` and `.`, at most 63 characters"
        ],
    ),
    "addresses and reserved words as hosts": (
        HEAD + "nodesets:\n  lab: {hosts: [10.0.0.1, '[fe80::1]', root@10.0.0.2:22, ALL, localhost, '17', 3]}\n",
        [
            's.yaml:4:17 nodesets.lab.hosts[0]: an address is not a name, found "10.0.0.1", '
            "give the host a name: {name: node1, address: 10.0.0.1}",
            's.yaml:4:27 nodesets.lab.hosts[1]: an address is not a name, found "[fe80::1]", '
            'give the host a name: {name: node1, address: "fe80::1"}',
            's.yaml:4:40 nodesets.lab.hosts[2]: an address is not a name, found "root@10.0.0.2:22", '
            "give the host a name: {name: node1, address: 10.0.0.2}",
            's.yaml:4:58 nodesets.lab.hosts[3]: this name is reserved, found "ALL", '
            "give the host another: {name: node1, address: 127.0.0.1}",
            's.yaml:4:63 nodesets.lab.hosts[4]: this name is reserved, found "localhost", '
            "give the host another: {name: node1, address: 127.0.0.1}",
            's.yaml:4:74 nodesets.lab.hosts[5]: not a host name, found "17", its last part must have a letter',
            "s.yaml:4:80 nodesets.lab.hosts[6]: not a host, found 3, "
            "write its name, or {name: node1, address: 10.0.0.1}",
        ],
    ),
    "parts of a host": (
        HEAD + "nodesets:\n  lab:\n    user: a b\n    port: 0\n    identity: ''\n    hosts:\n"
        "      - a;b@h1\n      - h2:ssh\n      - {name: h3, address: a b, port: 70000}\n"
        "      - {name: 'h[4-5]', address: h4}\n",
        [
            's.yaml:5:11 nodesets.lab.user: not a user name, found "a b", '
            "use letters, digits, `_`, `-` and `.`, at most 32 characters",
            "s.yaml:6:11 nodesets.lab.port: out of range, found 0, give one from 1 to 65535",
            's.yaml:7:15 nodesets.lab.identity: not a path, found "", give a file\'s path, such as ~/.ssh/id_ed25519',
            's.yaml:9:9 nodesets.lab.hosts[0]: not a user name, found "a;b@h1", '
            "use letters, digits, `_`, `-` and `.`, at most 32 characters",
            's.yaml:10:9 nodesets.lab.hosts[1]: not a whole number, found "h2:ssh", give one from 1 to 65535',
            's.yaml:11:29 nodesets.lab.hosts[2].address: not an address, found "a b", give an IP address or a DNS name',
            "s.yaml:11:40 nodesets.lab.hosts[2].port: out of range, found 70000, give one from 1 to 65535",
            's.yaml:12:9 nodesets.lab.hosts[3]: one address for several hosts, found "h[4-5]", write one entry a host',
        ],
    ),
    "broken hostlists": (
        HEAD + "nodesets:\n  lab:\n    hosts:\n      - g[1-\n      - g[1-99999999]\n      - _[1-2]\n",
        [
            's.yaml:6:9 nodesets.lab.hosts[0]: not a hostlist, found "g[1-", '
            "a bracket at character 2 has no partner; write it like gpu[01-16]",
            's.yaml:7:9 nodesets.lab.hosts[1]: not a hostlist, found "g[1-99999999]", '
            "the range '1-99999999' has more than 65536 names; write it like gpu[01-16]",
            's.yaml:8:9 nodesets.lab.hosts[2]: not a host name in this hostlist, found "_1", '
            "use letters, digits, `-` and `.`, at most 63 characters",
        ],
    ),
    # what must hold between fields
    "duplicate host": (
        GOOD.replace("gpu02", "gpu02, root@GPU01:22"),
        [
            's.yaml:4:31 nodesets.lab.hosts[2]: duplicate host, found "GPU01", '
            "it is named at nodesets.lab.hosts[0] already"
        ],
    ),
    "host inside a hostlist": (
        GOOD.replace("gpu02", "'gpu[00-03]'"),
        [
            's.yaml:4:24 nodesets.lab.hosts[1]: duplicate host, found "gpu01", '
            "it is named at nodesets.lab.hosts[0] already"
        ],
    ),
    "host in two nodesets": (
        GOOD + "  b: {hosts: [gpu02]}\n",
        ['s.yaml:5:15 nodesets.b.hosts[0]: host in two nodesets, found "gpu02", it is in `lab` already; keep one'],
    ),
    "made host in two nodesets": (
        GOOD + "  gpu0: {provider: sandbox, count: 1}\n",
        ['s.yaml:5:3 nodesets.gpu0: host in two nodesets, found "gpu01", it is in `lab` already; keep one'],
    ),
    "controller in a nodeset": (
        GOOD.replace("gpu02", "ctl"),
        [
            's.yaml:4:24 nodesets.lab.hosts[1]: host is already the controller\'s, found "ctl", '
            "name it once; for a controller that also runs jobs use `controller: {compute: true}`"
        ],
    ),
    "login host in a nodeset": (
        GOOD + "login: {hosts: [gpu01]}\n",
        ['s.yaml:4:17 nodesets.lab.hosts[0]: host is already the login\'s, found "gpu01", name it once'],
    ),
    "hosts and provider": (
        GOOD + "  b: {hosts: [x], provider: sandbox}\n  c: {}\n  d: {hosts: []}\n  e: {provider: sandbox}\n",
        [
            "s.yaml:5:29 nodesets.b.provider: both `hosts` and `provider`, keep the one you mean, delete the other",
            "s.yaml:6:3 nodesets.c: neither `hosts` nor `provider`, add `hosts`, or `provider: sandbox`",
            "s.yaml:7:7 nodesets.d.hosts: an empty list of hosts, found [], name at least one host",
            "s.yaml:8:3 nodesets.e: missing key `count`, say how many hosts to make: `count: 2`",
        ],
    ),
    "controller of neither kind": (
        GOOD.replace("{host: ctl}", "{compute: true}"),
        ["s.yaml:2:1 controller: neither `host` nor `provider`, add `host`, or `provider: sandbox`"],
    ),
    "fields of the other kind": (
        GOOD + "  b: {hosts: [x], count: 2, memory: 2G}\n  c: {provider: sandbox, count: 1, user: root}\n",
        [
            "s.yaml:5:26 nodesets.b.count: `count` without `provider`, delete it, or use `provider`",
            "s.yaml:5:37 nodesets.b.memory: `memory` without `provider`, delete it, or use `provider`",
            "s.yaml:6:42 nodesets.c.user: `user` without `hosts`, delete it, or use `hosts`",
        ],
    ),
    "partition of an unknown nodeset": (
        GOOD + "partitions: {main: {nodesets: [labb]}}\n",
        ['s.yaml:5:32 partitions.main.nodesets[0]: unknown nodeset, found "labb", did you mean `lab`?'],
    ),
    "partition without nodesets, or twice the same": (
        GOOD + "partitions: {a: {nodesets: []}, b: {nodesets: [lab, lab]}}\n",
        [
            "s.yaml:5:18 partitions.a.nodesets: a partition without nodesets, found [], list at least one",
            's.yaml:5:53 partitions.b.nodesets[1]: nodeset listed twice, found "lab", delete one',
        ],
    ),
    "two default partitions": (
        GOOD + "partitions:\n  a: {nodesets: [lab], default: true}\n  b: {nodesets: [lab], default: true}\n",
        ['s.yaml:7:33 partitions.b.default: two default partitions, found "b", `a` is one already'],
    ),
    "nothing computes": (
        HEAD,
        ["s.yaml:1:1: no host runs jobs, add `nodesets`, or set `compute: true` on the controller"],
    ),
    "options of slurm.conf": (
        GOOD + "slurm:\n  options:\n    slurmuser: root\n    Kill Wait: 3\n    KillWait: '3 SlurmUser=root'\n"
        '    MailProg: "a\\nb"\n    Foo: true\n    Bar: 1\n    BAR: 2\n',
        [
            's.yaml:7:5 slurm.options.slurmuser: Shoal writes this key itself, found "slurmuser", delete it here',
            's.yaml:8:5 slurm.options."Kill Wait": not a key of slurm.conf, found "Kill Wait", '
            "use letters and digits only",
            's.yaml:10:15 slurm.options.MailProg: not a value of slurm.conf, found "a\\nb", '
            "use ASCII text without quotes, `#` and `\\`",
            "s.yaml:11:10 slurm.options.Foo: not a value of Slurm's, found true, write YES or NO, as Slurm does",
            's.yaml:13:10 slurm.options.BAR: duplicate key, found "BAR", `Bar` is the same key to Slurm; delete one',
        ],
    ),
}


@cases("name", *CASES)
def test_invalid_file_has_exactly_the_expected_findings(name: str) -> None:
    text, expected = CASES[name]
    with pytest.raises(SpecError) as caught:
        load_text(text, "s.yaml")
    assert str(caught.value).split("\n") == expected
    assert caught.value.exit_code == 2


def test_base_text_of_the_cases_loads() -> None:
    assert load_text_all(GOOD, "s.yaml")[1] == []


def test_nodeset_in_no_partition_is_a_warning() -> None:
    text = GOOD.replace("ctl}", "ctl, compute: true}") + "  b: {hosts: [x]}\npartitions: {main: {nodesets: [lab]}}\n"
    spec, findings = load_text_all(text, "s.yaml")
    assert list(spec.nodesets) == ["lab", "b"]
    assert [(finding.level, str(finding)) for finding in findings] == [
        (
            "warning",
            "s.yaml:2:34 controller.compute: in no partition: no job can run there, list it in a partition",
        ),
        ("warning", "s.yaml:5:3 nodesets.b: in no partition: no job can run there, list it in a partition"),
    ]


def test_short_grace_of_a_preemptable_partition_is_a_warning() -> None:
    text = GOOD + "partitions:\n  low: {nodesets: [lab], grace: 20}\n  high: {nodesets: [lab]PRIORITY}\n"
    assert load_text_all(text.replace("PRIORITY", ""), "s.yaml")[1] == []
    findings = load_text_all(text.replace("PRIORITY", ", priority: 10"), "s.yaml")[1]
    assert [(finding.level, str(finding)) for finding in findings] == [
        (
            "warning",
            "s.yaml:6:33 partitions.low.grace: a preempted job has less time to save than it counts on, found 20 s, "
            "give at least 60",
        )
    ]


def test_alias_bomb_is_rejected_before_expansion() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    with pytest.raises(SpecError) as caught:
        load_text("\n".join(lines), "s.yaml")
    assert "s.yaml:2:10 a1[0]: aliases are not supported, found `*a0`, write the value out" in str(caught.value)


def test_too_large_file_is_rejected() -> None:
    with pytest.raises(SpecError, match=r"^s\.yaml:1:1: the file is too large, a spec has at most 1 MiB$"):
        load_text("#" * (1024 * 1024 + 1), "s.yaml")


FILES: dict[str, tuple[bytes, str]] = {
    "latin-1": (b"cluster: reef\n# caf\xe9\n", "{}:2:6: not UTF-8 text, found byte 0xe9, save it as UTF-8"),
    "utf-16": ("cluster: reef\n".encode("utf-16"), "{}:1:1: not UTF-8 text, found byte 0xff, save it as UTF-8"),
    "nul": (b"\x00", "{}:1:1: not text, found character U+0000, delete it"),
}


@cases("name", *FILES)
def test_file_that_is_not_text_is_rejected(name: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(FILES[name][0])
    with pytest.raises(SpecError) as caught:
        load_all(path)[0]
    assert str(caught.value) == FILES[name][1].format(path)


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_all(path)[0].cluster == "reef"


def test_missing_file_or_directory_is_a_finding(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(SpecError) as caught:
        load_all(missing)[0]
    assert str(caught.value) == f"{missing}: no such file, `shoal init` writes one"
    with pytest.raises(SpecError) as caught:
        load_all(tmp_path)[0]
    assert str(caught.value) == f"{tmp_path}: this is a directory, name the file in it"
    with pytest.raises(SpecError) as caught:
        load_all(Path("a\0b"))[0]
    assert str(caught.value).endswith(": cannot read the file, found embedded null byte")


def test_warning_beside_errors_is_labelled() -> None:
    text = "cluster: reef\ncontroller: {host: c1, compute: true}\nnodesets: {lab: {hosts: [n1]}}\n"
    text += "partitions: {main: {nodesets: [lab], grace: no}}\n"
    with pytest.raises(SpecError) as caught:
        load_text(text, "s.yaml")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("s.yaml:2:") and ": warning: in no partition" in lines[0], lines
    assert "warning" not in lines[1] and "grace" in lines[1]
    levels = [getattr(finding, "level", "") for finding in caught.value.findings]
    assert levels == ["warning", "error"]
