"""Files of the operator's on hosts, in place before slurmctld reads the option that names one; and missing scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.agent.document import HEADER, Command, Directory, Document, File
from shoal.agent.facts import Facts
from shoal.errors import ShoalError
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.controller import RECONFIGURE
from shoal.roles.current_conf import JOB_SUBMIT
from shoal.spec.files import SLURM_DIRECTORY, Script, ShippedFile, scripts
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members
from shoal.spec.model import Spec

RECORD = "/etc/shoal/files"
"""The paths that Shoal has written, one a line."""
SENT_TO_NODES = tuple(
    f"{SLURM_DIRECTORY}/{name}.conf" for name in ("plugstack", "acct_gather", "helpers", "job_container", "mpi", "oci")
)
"""Files beside slurm.conf that nodes fetch from slurmctld, which reads them when it is reconfigured."""
RELOAD = f"command {RECONFIGURE}"


class FilesComponent(Component):
    """The file's `files`."""

    files: Mapping[str, FileQuery] = {RECORD: "text"}
    changes_with_members = True  # so that a rented machine gets what has changed since it joined
    in_containers = True

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        return {
            script.path: "program" if script.program else "there" for script in scripts(spec.slurm.options, spec.files)
        }

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        wanted = {path: file for path, file in cluster.spec.files.items() if file.is_for(member)}
        written = _written(cluster.facts_of(member.name))
        obsolete = [path for path in written if path not in wanted]
        if not wanted and not written:
            return {}
        is_controller = "controller" in member.roles
        own_script = is_controller and cluster.conf.spanning and bool(cluster.conf.switches)
        # Nodes fetch these from slurmctld, and must not read of a plugin that is gone.
        sent = [path for path in obsolete if is_controller and path in SENT_TO_NODES]
        others = [path for path in obsolete if path not in sent and not (own_script and path == JOB_SUBMIT)]
        stages: dict[Stage, Document] = {
            Stage.SERVICES: (
                *(_file(path, file, path in written, is_controller) for path, file in wanted.items()),
                *(item for path in sent for item in (File(path, reloads=(RELOAD,)), _put_back(path))),
                Directory("/etc/shoal"),
                File(RECORD, _record([*wanted, *others])),
            )
        }
        if others:  # only now no daemon uses them
            items = (item for path in others for item in (File(path), _put_back(path)))
            stages[Stage.NODES] = (*items, File(RECORD, _record(wanted)))
        if not wanted:
            stages[Stage.NODES] = (*stages.get(Stage.NODES, ())[:-1], File(RECORD))
        return stages

    def removal(self) -> Document:
        put_back = 'rm -f "$path"; ! test -e "$path.before-shoal" || mv "$path.before-shoal" "$path"'
        remove = f"grep '^/' {RECORD} | while read -r path; do {put_back}; done; rm -f {RECORD}"
        return (Command("remove the files of `files`", ("sh", "-c", remove), unless=("test", "!", "-e", RECORD)),)

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        return tuple(missing_scripts(cluster.spec, cluster.members, cluster.facts))


def missing_scripts(spec: Spec, hosts: tuple[Member, ...], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Scripts that an option names, on hosts that have no such file and get none."""
    for script in scripts(spec.slurm.options, spec.files):
        if any(script.path.startswith(f"{share}/") for share in spec.storage):
            continue  # a new host mounts it later
        file = spec.files.get(script.path)
        for member in hosts:
            is_shipped = file is not None and file.is_for(member)
            if is_shipped or script.role not in member.roles or member.name not in facts:
                continue
            if not facts[member.name].has_file(script.path):
                yield _missing_script(script, member)


def reject_missing_scripts(spec: Spec, facts: Mapping[str, Facts]) -> None:
    """Raise ShoalError before a change that would drain nodes, or stop slurmctld."""
    findings = list(missing_scripts(spec, members(spec), facts))
    if findings:
        problems = "\n".join(f"{finding.host}: {finding.what}" for finding in findings)
        fixes = dict.fromkeys(finding.fix for finding in findings)
        raise ShoalError(f"{problems}\nnothing was changed", hint="\n".join(fixes))


def _missing_script(script: Script, member: Member) -> Finding:
    problem = "and there is no such program" if script.program else "and there is no such file"
    what = f"{script.option} names {script.path}, {problem}"
    fix = f"add it to `files`: {{{script.path}: SOURCE}}, or install it on the host"
    path = "files" if script.option.startswith("/") else f"slurm.options.{script.option}"
    return Finding("error", what, fix=fix, path=path, host=member.name)


def _file(path: str, file: ShippedFile, is_ours: bool, is_controller: bool) -> File:
    try:
        content: str | bytes = file.content.decode()
    except UnicodeDecodeError:
        content = file.content
    reloads = (RELOAD,) if is_controller and path in SENT_TO_NODES else ()
    return File(path, content, mode=file.permissions, reloads=reloads, keep=not is_ours)


def _put_back(path: str) -> Command:
    """What was there before, often a package's own file."""
    before = f"{path}.before-shoal"
    return Command(f"put back {path}", ("mv", before, path), unless=("test", "!", "-e", before))


def _record(paths: Mapping[str, ShippedFile] | list[str]) -> str:
    return HEADER + "".join(f"{path}\n" for path in sorted(paths))


def _written(facts: Facts) -> tuple[str, ...]:
    return tuple(line for line in facts.text(RECORD).splitlines() if line.startswith("/"))
