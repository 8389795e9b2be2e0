"""The commands about images: image pull, build, push, login, save, bundle, list, remove, prune."""

from __future__ import annotations

from time import localtime, strftime
from typing import Annotated

import typer

from shoal.cli.options import with_session
from shoal.cli.screen import Columns
from shoal.cli.session import Session
from shoal.errors import Interrupted
from shoal.hostlist import compress

image = typer.Typer(
    help="Pull, build, push, save, list and remove images that jobs run in.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@image.command("pull")
@with_session
def image_pull(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="REGISTRY/IMAGE:TAG, or the path of an archive where you log in.")
    ],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="What to call it. Default: SOURCE.")] = None,
    *,
    session: Session,
) -> None:
    """Get an image, for all your jobs. A tag that moved since is pulled anew."""
    from shoal.verbs.images import pull

    pulled = session.run(pull(session.open(), source, name))
    if not session.finish(pulled):
        session.console.print(f"[green]✓[/] {pulled.name}: {pulled.digest}, {pulled.architecture}", soft_wrap=True)


@image.command("build")
@with_session
def image_build(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A Containerfile or its directory; a list of packages; or a root file system where you log in.",
        ),
    ],
    base: Annotated[
        str | None, typer.Option("--from", metavar="IMAGE", help="The image to start from: yours, or of a registry.")
    ] = None,
    node: Annotated[str | None, typer.Option(metavar="NODE", help="The node that builds. Default: any.")] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "-p", metavar="NAME", help="The partition. Default: that of the nodes.")
    ] = None,
    cpus_per_task: Annotated[
        int | None, typer.Option("--cpus-per-task", "-c", metavar="NUMBER", help="CPUs of the build. Default: 1.")
    ] = None,
    mem: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory, as 16G; 0 for all of the node. Default: the partition's."),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", "-t", metavar="TIME", help="The time limit, as for `shoal run`. Default: an hour."),
    ] = None,
    *,
    session: Session,
) -> None:
    """Make an image, in a job of yours on a node. Ctrl-C cancels it.

    A Containerfile is sent with the files beside it. A list of packages (requirements.txt, a lock file, pyproject.toml)
    is installed into the image of --from.
    """
    from shoal.jobs.model import job_from_options
    from shoal.verbs.image_build import build

    values = {"script": "-", "partition": partition, "cpus_per_task": cpus_per_task, "mem": mem, "time": time}
    try:
        work = build(session.open(), name, source, base, node, job_from_options(values))
        built = session.run(work, watching=True)
    except Interrupted:
        raise Interrupted("stopped; the job of the build was cancelled") from None
    if not session.finish(built):
        session.console.print(f"[green]✓[/] {built.name}: {built.digest}, {built.architecture}", soft_wrap=True)


@image.command("push")
@with_session
def image_push(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of your images.")],
    reference: Annotated[
        str | None,
        typer.Argument(metavar="REFERENCE", help="Where to: REGISTRY/IMAGE:TAG. Default: the cluster's own registry."),
    ] = None,
    *,
    session: Session,
) -> None:
    """Copy an image of yours to a registry."""
    from shoal.verbs.images import push

    pushed = session.run(push(session.open(), name, reference))
    if not session.finish(pushed):
        session.console.print(f"[green]✓[/] {pushed.reference}: {pushed.digest}", soft_wrap=True)


@image.command("login")
@with_session
def image_login(
    registry: Annotated[str, typer.Argument(metavar="REGISTRY", help="Such as registry.example.org or gpu01:5000.")],
    user: Annotated[str, typer.Option("--user", metavar="NAME", help="Your name there.")],
    password: Annotated[
        str, typer.Option(metavar="REFERENCE", help="Where your password is: env:NAME or file:PATH, on this machine.")
    ],
    *,
    session: Session,
) -> None:
    """Log in to a registry, for pulls, pushes and builds. Only you can read what is kept."""
    from shoal.verbs.images import login

    session.run(login(session.open(), registry, user, password))
    if not session.finish({"registry": registry, "user": user}):
        session.console.print(f"[green]✓[/] {registry}: logged in as {user}")


@image.command("logout")
@with_session
def image_logout(
    registry: Annotated[str, typer.Argument(metavar="REGISTRY", help="As in `shoal image login`.")],
    *,
    session: Session,
) -> None:
    """Forget your login to a registry."""
    from shoal.verbs.images import logout

    session.run(logout(session.open(), registry))
    if not session.finish({"registry": registry}):
        session.console.print(f"[green]✓[/] {registry}: logged out")


@image.command("save")
@with_session
def image_save(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    container: Annotated[str, typer.Argument(metavar="CONTAINER", help="The --container-name of your jobs.")],
    node: Annotated[str | None, typer.Option(metavar="NODE", help="The node that has it.")] = None,
    job: Annotated[str | None, typer.Option(metavar="NUMBER", help="A running job of yours that is in it.")] = None,
    *,
    session: Session,
) -> None:
    """Make an image of a container that jobs have changed.

    A running job goes on; files that it writes meanwhile may be saved in part.
    """
    from shoal.verbs.images import save

    saved = session.run(save(session.open(), name, container, node, job))
    if not session.finish(saved):
        session.console.print(f"[green]✓[/] {saved.name}: {saved.digest}, {saved.architecture}", soft_wrap=True)


@image.command("bundle")
@with_session
def image_bundle(
    source: Annotated[
        str | None,
        typer.Argument(metavar="IMAGE", help="As `shoal run --image` takes it; none for a container that nodes have."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The bundle's name. Default: one that its image and options have alone."),
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE:DESTINATION[:ro]", help="A directory or file of the nodes in the image; may be repeated."
        ),
    ] = None,
    workdir: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="Where in the image commands start. Default: as outside.")
    ] = None,
    container_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run in a copy of the image that jobs may change.")
    ] = None,
    home: Annotated[str, typer.Option(metavar="WORD", help="Whether the image has your home: on or off.")] = "off",
    *,
    session: Session,
) -> None:
    """Print the path of a bundle of an image, for `srun --container` and `sbatch --container`."""
    from shoal.jobs.model import job_from_options
    from shoal.verbs.images import bundle

    values = {"image": source, "mount": mount or [], "workdir": workdir, "container_name": container_name, "home": home}
    path = session.run(bundle(session.open(), job_from_options({"script": "-", **values}), name))
    if not session.finish({"path": path}):
        session.console.out(path)


@image.command("list")
@with_session
def image_list(session: Session) -> None:
    """Show your images, with their digests, and the containers with a name that nodes keep for you."""
    from shoal.verbs.images import list_images

    images, containers = session.run(list_images(session.open()))
    if session.finish({"images": images, "containers": containers}):
        return
    if not images:
        session.console.print("no images; `shoal image pull REGISTRY/IMAGE:TAG` gets one")
    else:
        table = Columns("image", "digest", "cpu type", "size", "since", wraps=("image",))
        for entry in images:
            size = f"{entry.bytes / 1e6:.0f} MB"
            table.add_row(entry.name, entry.digest[:19], entry.architecture, size, _local_time(entry.made_at))
        session.console.print(table)
    if containers:
        table = Columns("container", "of image", "nodes", "since", wraps=("of image", "nodes"))
        for one in containers:
            table.add_row(one.name, one.image, compress(one.nodes), _local_time(one.made_at))
        session.console.print()
        session.console.print(table)


def _local_time(seconds: int) -> str:
    return strftime("%Y-%m-%d %H:%M", localtime(seconds))


@image.command("remove")
@with_session
def image_remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of your images; with --node, a container.")],
    node: Annotated[
        str | None, typer.Option(metavar="NODE", help="Remove the container of this name from this node.")
    ] = None,
    *,
    session: Session,
) -> None:
    """Remove an image, or a container with a name from a node.

    Nodes remove what they unpacked of an image when no job has used it for 30 days.
    """
    from shoal.verbs.images import remove, remove_container

    session.run(remove(session.open(), name) if node is None else remove_container(session.open(), name, node))
    if not session.finish({"removed": name} if node is None else {"removed": name, "node": node}):
        session.console.print(f"[green]✓[/] {name}: removed")


@image.command("prune")
@with_session
def image_prune(session: Session) -> None:
    """Remove images without a name: those that a later pull replaced."""
    from shoal.verbs.images import prune

    removed = session.run(prune(session.open()))
    if not session.finish({"removed": removed}):
        session.console.print("\n".join(f"removed {id[:12]}" for id in removed) or "nothing to remove")
