"""Each user's login to the tracking server, on every host: for `sbatch` jobs, for `shoal run`, and for the web page.

The controller makes the passwords. A user's login is a file that only the user can read, in a directory of root's;
`~/.mlflow/credentials`, where MLflow's client looks, links to it. The server's address is in the user's environment
after a login, and `sbatch` passes it on.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.agent.document import Block, Command, Directory, Document, File, Item, Secret, SecretRef
from shoal.remote import shell_command
from shoal.roles.component import Cluster, FileQuery, SharedSecret
from shoal.roles.user_ids import recorded_users
from shoal.roles.users import PAM, USERS_GROUP, creates_homes, home_of
from shoal.spec.member import Member
from shoal.spec.members import members
from shoal.spec.model import Spec
from shoal.tracking import login, mlflow

PAM_BLOCK = "tracking"
LINK = 'mkdir -p -m 0700 "$(dirname "$1")" && ln -s "$2" "$1"'


def user_passwords(spec: Spec, digits: int) -> dict[str, SharedSecret]:
    """The passwords of users, which the controller keeps: rented machines get theirs from it."""
    controller = members(spec)[0].name
    return {_secret(name): SharedSecret(controller, _password_file(name), digits) for name in spec.users}


def fact_files(spec: Spec) -> dict[str, FileQuery]:
    """The digests of the passwords, and whether there are logins that an earlier spec asked for."""
    return {mlflow.USER_VARIABLES: "there", **{_password_file(name): "hash" for name in spec.users}}


def login_items(cluster: Cluster, member: Member, uri: str, digits: int) -> Document:
    """The logins on a host. Without a server of ours (`uri`), and for users who left, there are none."""
    facts, users = cluster.facts[member.name], cluster.spec.users
    former = [name for name in recorded_users(facts) if name not in users or not uri]
    removal: tuple[Item, ...] = tuple(
        File(path) for name in former for path in (_login_file(name), _password_file(name))
    )
    if users and uri:
        return (*_logins(cluster, member, digits), *removal, *_environment(uri))
    if not facts.has_file(mlflow.USER_VARIABLES):
        return ()
    return (*removal, Block(PAM, PAM_BLOCK, ""), File(mlflow.USER_VARIABLES))


def _logins(cluster: Cluster, member: Member, digits: int) -> Iterator[Item]:
    yield Directory("/etc/shoal")
    yield Directory(mlflow.USER_PASSWORDS, mode=0o700)
    yield Directory(login.USER_LOGINS)
    for name in cluster.spec.users:
        password = _password_file(name)
        if "controller" in member.roles:
            yield Secret(password, digits=digits)
        else:
            digest = cluster.controller_facts.digest(password)
            yield File(password, SecretRef(_secret(name), digest), mode=0o400)
        fills = (("@PASSWORD@", password),)
        yield File(_login_file(name), mlflow.user_login(name), owner=name, group=name, mode=0o400, fills=fills)
        if creates_homes(cluster, member):
            yield _link(cluster.spec, name)


def _link(spec: Spec, name: str) -> Command:
    """Made with the rights of the user, in whose home a link may lead anywhere. A file of the user's own stays."""
    as_user = ("runuser", "-u", name, "--")
    place = f"{home_of(spec, name)}/.mlflow/credentials"
    return Command(
        f"link {place}",
        (*as_user, *shell_command(LINK, place, _login_file(name))),
        unless=(*as_user, *shell_command('test -e "$1" || test -L "$1"', place)),
        fix=f"remove {place} and what stands in its way",
    )


def _environment(uri: str) -> tuple[Item, ...]:
    rules = (
        f"session [success=1 default=ignore] pam_succeed_if.so quiet user notingroup {USERS_GROUP}\n"
        f"session optional pam_env.so conffile={mlflow.USER_VARIABLES} readenv=0\n"
        "session optional pam_permit.so\n"
    )
    return (File(mlflow.USER_VARIABLES, mlflow.user_variables(uri)), Block(PAM, PAM_BLOCK, rules))


def _secret(name: str) -> str:
    return f"mlflow-user-{name}"


def _password_file(name: str) -> str:
    return f"{mlflow.USER_PASSWORDS}/{name}"


def _login_file(name: str) -> str:
    return f"{login.USER_LOGINS}/{name}"


_DIRECTORIES = (mlflow.USER_PASSWORDS, login.USER_LOGINS)
REMOVAL: Document = (
    Block(PAM, PAM_BLOCK, ""),
    File(mlflow.USER_VARIABLES),
    Command(
        "remove the logins of users to MLflow",
        ("rm", "-rf", "--", *_DIRECTORIES),
        unless=shell_command(" && ".join(f"test ! -e {path}" for path in _DIRECTORIES)),
    ),
)
