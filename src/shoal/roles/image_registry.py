"""The cluster's registry of images on the controller; its CA, address and the users' logins on all hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.agent.document import Command, Directory, Document, File, Item, Packages, Secret, SecretRef, Service
from shoal.agent.facts import Facts
from shoal.containers import registry
from shoal.remote import shell_command
from shoal.roles.component import Cluster, Component, FileQuery, SharedSecret, Stage
from shoal.roles.user_ids import recorded_users
from shoal.spec.containers import Registry
from shoal.spec.member import Member
from shoal.spec.members import members
from shoal.spec.model import Spec

PASSWORD_DIGITS = 48
STOP = ("systemctl", "disable", "--now", registry.SERVICE)
TRUST = "trust the registry's certificate"
CERTIFICATE, LOGINS = "make the registry's certificate", "write the registry's logins"


class ImageRegistryComponent(Component):
    """The file's `containers: {registry: ...}`."""

    files: Mapping[str, FileQuery] = {registry.CA: "text", registry.ADDRESS: "there", registry.TRUSTED: "there"}
    services = (registry.SERVICE, registry.PROXY)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if registry_of(spec) is None:
            return ()
        return ("ca-certificates", *(registry.PACKAGES if "controller" in member.roles else ()))

    def ports(self, spec: Spec, member: Member) -> tuple[str, ...]:
        wanted = registry_of(spec)
        return (str(wanted.port),) if wanted and "controller" in member.roles else ()

    def shared_secrets(self, spec: Spec) -> Mapping[str, SharedSecret]:
        if registry_of(spec) is None:
            return {}
        controller = members(spec)[0].name
        return {_secret(name): SharedSecret(controller, _password(name), PASSWORD_DIGITS) for name in spec.users}

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        return {_password(name): "hash" for name in spec.users} if registry_of(spec) else {}

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """The certificate comes first: the other hosts get it."""
        if registry_of(spec) is None or "controller" not in member.roles or facts.text(registry.CA):
            return ()
        return (Packages(("openssl",)), *_certificate(member.name))

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        wanted, facts = registry_of(cluster.spec), cluster.facts_of(member.name)
        if wanted is None:
            return {Stage.SERVICES: self.removal()} if facts.has_file(registry.ADDRESS) else {}
        items = _trust(cluster.controller_facts.text(registry.CA))
        items += (
            Directory("/etc/shoal"),
            Directory(registry.SETTINGS),
            File(registry.ADDRESS, f"{cluster.controller.name}:{wanted.port}\n"),
            *_logins(cluster, member),
        )
        if "controller" in member.roles:
            items += _server(cluster, wanted)
        return {Stage.SERVICES: items}

    def removal(self) -> Document:
        """The images that users pushed stay in its directory."""
        return (
            # A registry that Shoal did not set up goes on.
            Command("stop the registry", STOP, unless=("test", "!", "-e", registry.PLACE)),
            Service(registry.PROXY, enabled=False, running=False),
            File(registry.PROXY_UNIT),
            File(registry.DROP_IN),
            Command(
                "remove the logins of the registry",
                ("rm", "-rf", "--", registry.SETTINGS, registry.PLACE),
                unless=shell_command('test ! -e "$1" && test ! -e "$2"', registry.SETTINGS, registry.PLACE),
            ),
            *_trust(""),
        )

    def cluster_services(self, facts: Facts) -> tuple[str, ...]:
        return ("the registry of images",) if facts.text(registry.CA) else ()


def registry_of(spec: Spec) -> Registry | None:
    return spec.containers.registry if spec.containers else None


def _trust(certificate: str) -> tuple[Item, ...]:
    update = Command(TRUST, ("update-ca-certificates", "--fresh"), on_change=True)
    return (File(registry.TRUSTED, certificate or None, reloads=(f"command {TRUST}",)), update)


def _certificate(name: str) -> tuple[Item, ...]:
    fits = shell_command(registry.CERTIFICATE_FITS, name, registry.PLACE, str(registry.RENEW_S))
    make = shell_command(registry.MAKE_CERTIFICATE, name, registry.PLACE)
    return (
        Directory("/etc/docker"),
        Directory("/etc/docker/registry"),
        Directory(registry.PLACE),
        Command(CERTIFICATE, make, unless=fits, restarts=(registry.PROXY,)),
    )


def _logins(cluster: Cluster, member: Member) -> Iterator[Item]:
    """Each user's password, in a file that only the user can read."""
    yield Directory(registry.PASSWORDS, mode=0o700)
    yield Directory(registry.LOGINS)
    for name in recorded_users(cluster.facts_of(member.name)):
        if name not in cluster.spec.users:
            yield from (File(_password(name)), File(_login(name)))
    for name in cluster.spec.users:
        if "controller" in member.roles:
            yield Secret(_password(name), digits=PASSWORD_DIGITS)
        else:
            digest = cluster.controller_facts.digest(_password(name))
            yield File(_password(name), SecretRef(_secret(name), digest), mode=0o400)
        fills = (("@PASSWORD@", _password(name)),)
        yield File(_login(name), "@PASSWORD@\n", owner=name, group=name, mode=0o400, fills=fills)


def _server(cluster: Cluster, wanted: Registry) -> tuple[Item, ...]:
    fits = shell_command(registry.HTPASSWD_FITS, registry.PASSWORDS, registry.HTPASSWD)
    write = shell_command(registry.MAKE_HTPASSWD, registry.PASSWORDS, registry.HTPASSWD, registry.USER)
    own_key = ("chown", f"{registry.USER}:", registry.SERVER_KEY)
    is_owner = shell_command('[ "$(stat -c %U "$1")" = "$2" ]', registry.SERVER_KEY, registry.USER)
    settings = registry.proxy_config(cluster.controller.name, wanted.port)
    return (
        *_certificate(cluster.controller.name),
        Command("give the registry its key", own_key, unless=is_owner),
        Directory(wanted.directory, owner=registry.USER, group=registry.USER, mode=0o700),
        Command(LOGINS, write, unless=fits),
        Directory(registry.DROP_IN.rpartition("/")[0]),
        File(registry.DROP_IN, registry.drop_in(), restarts=(registry.SERVICE,)),
        File(registry.CONFIG, registry.registry_config(wanted.directory), restarts=(registry.SERVICE,)),
        Service(registry.SERVICE),
        File(registry.PROXY_CONFIG, settings, restarts=(registry.PROXY,)),
        File(registry.PROXY_UNIT, registry.proxy_unit(), restarts=(registry.PROXY,)),
        Service(registry.PROXY),
    )


def _secret(name: str) -> str:
    return f"registry-user-{name}"


def _password(name: str) -> str:
    return f"{registry.PASSWORDS}/{name}"


def _login(name: str) -> str:
    return f"{registry.LOGINS}/{name}"
