"""The answers of real Slurm commands, captured from 22.05, 24.11 and 26.05, parse to the same data."""

from pathlib import Path

from tests.support.cases import cases

from shoal.slurm.state import JOB_RECORD, JOBS_COMMAND, parse_jobs, parse_nodes, parse_partitions, parse_state

ANSWERS = Path(__file__).parent / "answers"
RELEASES = {"22.05": "22.05.8", "24.11": "24.11.5", "26.05": "26.05.5"}


@cases("release", *RELEASES)
def test_nodes_of_every_release_are_parsed(release: str) -> None:
    nodes = {node.name: node for node in parse_nodes((ANSWERS / release / "nodes.txt").read_text())}
    assert {name: node.state for name, node in nodes.items()} == {
        "n1": ("ALLOCATED", "DRAIN"),
        "n2": ("DOWN",),
        "n3": ("UNKNOWN", "DRAIN"),
        "n4": ("IDLE", "NOT_RESPONDING"),
        "n5": ("UNKNOWN",),
    }
    n1 = nodes["n1"]
    assert (n1.reason, n1.reason_by) == ("look at the fan", "root")
    assert (n1.address, n1.hostname, n1.version) == ("10.77.0.1", "ctl", RELEASES[release])
    assert (n1.cpus, n1.cpus_alloc, n1.memory_mb, n1.memory_alloc_mb) == (2, 2, 3675, 200)
    assert (n1.gres, n1.gres_used) == ("gpu:sim:2", "gpu:sim:1(IDX:0)")
    assert (n1.features, n1.partitions) == (("lab",), ("main", "all"))
    assert n1.boot_time.startswith("20") and n1.slurmd_start_time.startswith("20")


@cases("release", *RELEASES)
def test_reason_that_looks_like_keys_stays_a_reason(release: str) -> None:
    n2 = parse_nodes((ANSWERS / release / "nodes.txt").read_text())[1]
    assert n2.reason == "disk full=yes; call bob State=IDLE"
    assert n2.state == ("DOWN",)
    assert n2.reason_time.startswith("20")
    assert (n2.version, n2.boot_time) == ("", "")


@cases("release", *RELEASES)
def test_jobs_of_every_release_are_parsed(release: str) -> None:
    text = (ANSWERS / release / "jobs.txt").read_text().replace("\x1e", JOB_RECORD)
    jobs = {job.id: job for job in parse_jobs(text)}
    assert {job.id: (job.state, job.partition, job.name) for job in jobs.values()} == {
        "1": ("RUNNING", "main", 'train = "a b" | c'),
        "2_1": ("RUNNING", "all", "größe"),
        "2_[2-3%1]": ("PENDING", "all", "größe"),
        "3": ("PENDING", "main", "two\nlines"),
    }
    assert (jobs["1"].user, jobs["1"].nodes, jobs["1"].node_names, jobs["1"].reason) == ("root", "n1", ("n1",), "None")
    assert (jobs["1"].time_limit, jobs["1"].node_count) == ("1:00:00", 1)
    assert (jobs["3"].nodes, jobs["3"].node_names, jobs["3"].node_count) == ("", (), 3)
    assert jobs["3"].reason.startswith("Nodes required for job are DOWN")


@cases("release", *RELEASES)
def test_partitions_of_every_release_are_parsed(release: str) -> None:
    main, everything = parse_partitions((ANSWERS / release / "partitions.txt").read_text())
    assert (main.name, main.state, main.default, main.nodes) == ("main", "UP", True, "n[1-3]")
    assert (main.max_time, main.default_time, main.total_nodes, main.total_cpus) == ("1-00:00:00", "01:00:00", 3, 18)
    assert (everything.default, everything.priority, everything.max_nodes) == (False, 10, "UNLIMITED")
    assert (everything.grace, everything.preempt_mode) == (0, "OFF")


@cases("release", *RELEASES)
def test_sinfo_and_scontrol_states_agree(release: str) -> None:
    nodes = {node.name: node for node in parse_nodes((ANSWERS / release / "nodes.txt").read_text())}
    for line in (ANSWERS / release / "sinfo.txt").read_text().splitlines():
        name, short, long = line.split()
        said = set(nodes[name].state)
        assert set(parse_state(short)) <= said | {"IDLE"}, line
        assert set(parse_state(long)) - {"IDLE"} <= said, line


@cases(
    "text, state",
    ("IDLE", ("IDLE",)),
    ("IDLE+CLOUD+POWERED_DOWN", ("IDLE", "CLOUD", "POWERED_DOWN")),
    ("down*", ("DOWN", "NOT_RESPONDING")),
    ("DOWN*+DRAIN", ("DOWN", "NOT_RESPONDING", "DRAIN")),
    ("alloc", ("ALLOCATED",)),
    ("mix-", ("MIXED", "PLANNED")),
    ("idle~", ("IDLE", "POWERED_DOWN")),
    ("mixed#", ("MIXED", "POWERING_UP")),
    ("drng", ("ALLOCATED", "DRAIN")),
    ("drained*", ("IDLE", "DRAIN", "NOT_RESPONDING")),
    ("inval", ("INVALID_REG",)),
    ("idle^*", ("IDLE", "REBOOT_ISSUED", "NOT_RESPONDING")),
    ("", ()),
)
def test_state_words_and_suffixes_are_translated(text: str, state: tuple[str, ...]) -> None:
    assert parse_state(text) == state


def test_empty_cluster_has_no_nodes_partitions_and_jobs() -> None:
    assert parse_nodes("No nodes in the system\n") == []
    assert parse_partitions("No partitions in the system\n") == []
    assert parse_jobs("") == []


def test_job_name_with_separators_is_no_record_of_another_job() -> None:
    row = "7\x1fRUNNING\x1fada\x1fmain\x1fn1\x1fNone\x1f0:01\x1f1:00\x1f1\x1f{}\n"
    names = ("a\x1fb\x1ec", "x\n\x1e" + row.format("forged").strip(), "plain")
    jobs = parse_jobs("".join(JOB_RECORD + row.format(name) for name in names))
    assert [job.name for job in jobs] == [*names]


def test_job_name_is_the_last_queried_field() -> None:
    assert JOBS_COMMAND[-1].endswith("\x1f%j")


@cases(
    "state, reason",
    *((state, "") for state in ("IDLE", "MIXED+PLANNED", "IDLE*", "IDLE+CLOUD", "IDLE+NOT_RESPONDING")),
    *((state, "fan") for state in ("IDLE+DRAIN", "DOWN+NOT_RESPONDING", "IDLE+INVALID_REG", "UNKNOWN")),
    *((state, "fan") for state in ("FUTURE", "ALLOCATED+REBOOT_REQUESTED", "IDLE+CLOUD+POWERED_DOWN")),
)
def test_reason_that_slurm_kept_after_a_resume_is_left_out(state: str, reason: str) -> None:
    [node] = parse_nodes(f"NodeName=n1 CPUTot=4 State={state} Reason=fan [root@2026-01-01T00:00:00]\n")
    assert (node.reason, node.reason_by) == (reason, "root" if reason else "")


@cases(
    "state, reason", ("DOWN+NOT_RESPONDING", "Not responding"), ("DOWN+DRAIN+NOT_RESPONDING", "fan : Not responding")
)
def test_silence_of_a_node_is_read_behind_a_reason_that_slurm_kept(state: str, reason: str) -> None:
    text = f"NodeName=n1 CPUTot=4 State={state} Reason=fan : Not responding [slurm@2026-01-01T00:00:00]\n"
    assert parse_nodes(text)[0].reason == reason


def test_multi_line_reason_belongs_to_its_node() -> None:
    text = "NodeName=a State=DOWN Reason=one\ntwo [ada@2026-01-02T03:04:05]\nNodeName=b State=IDLE \n"
    first, second = parse_nodes(text)
    assert (first.reason, first.reason_by, first.reason_time) == ("one\ntwo", "ada", "2026-01-02T03:04:05")
    assert (second.name, second.reason) == ("b", "")
