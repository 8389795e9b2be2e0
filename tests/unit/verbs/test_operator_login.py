"""Whom the controller takes the operator for, and where code of their jobs may run from."""

from tests.support.cases import cases

from shoal.spec.cluster_record import ClusterRecord, RecordShare
from shoal.verbs.operator_login import OperatorLogin, parse_login

RECORD = ClusterRecord(
    "reef", "0.1.0", "desktop", shares={"/data": RecordShare("sshfs", private=False), "/home": RecordShare("nfs")}
)


def test_user_of_the_cluster_is_recognized_and_root_is_none() -> None:
    login = parse_login(f"login 2001 alice /home/alice\nuser\n{RECORD.as_json()}")
    assert (login.uid, login.user, login.is_user, login.record) == (2001, "alice", True, RECORD)
    root = parse_login(f"login 0 root /root\nuser\n{RECORD.as_json()}")
    assert not root.is_user and root.record == RECORD
    assert not parse_login(f"login 1000 ubuntu /home/ubuntu\n{RECORD.as_json()}").is_user
    earlier = parse_login("login 2001 alice /home/alice\nuser\n")
    assert earlier == OperatorLogin(2001, "alice", "/home/alice"), "its release has no record"
    assert OperatorLogin().code_directory == "/var/lib/shoal/user-jobs/root"
    assert OperatorLogin(1000, "ubuntu", "/home/ubuntu").code_directory == "/home/ubuntu/.shoal/code"


@cases("text", "", "login", "login x alice /home/alice\n", "motd\nlogin 0 root /root\n")
def test_unusual_answers_count_as_root_without_a_record(text: str) -> None:
    assert parse_login(text) == OperatorLogin()


@cases("directory, kind", ("/data/jobs", "sshfs"), ("/data", "sshfs"), ("/database", None), ("", None))
def test_directory_on_a_share_is_recognized(directory: str, kind: str | None) -> None:
    share = OperatorLogin(record=RECORD).share_of(directory)
    assert (share.kind if share else None) == kind
