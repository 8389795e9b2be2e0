"""Python environments for jobs, and the proxies through which packages come."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, PrivateAttr, WithJsonSchema

from shoal.spec.checks import choice, matching, refusal
from shoal.spec.finding import Problem
from shoal.spec.values import FilePath, SpecModel, text_schema

SOURCES = ("requirements", "lock", "pyproject")
"""The fields that say what is in an environment: each of them has one."""
PLACES = ("shared", "local")
SHARED_DIRECTORY = "/shared/environments"


directory = matching(
    r"(/(?!\.\.(/|$))[A-Za-z0-9_.+@-]+)+",  # nothing that needs quoting
    "not a directory on the hosts",
    "give an absolute path without blanks, such as /shared/apps",
)
_form = matching(
    r"(?=.{1,32}$)[a-z]([a-z0-9-]*[a-z0-9])?",
    "not a name for an environment",
    "use a lower-case letter, then lower-case letters, digits and `-`, at most 32 characters",
)
_RESERVED = re.compile(r"archives|names|wheels|[0-9a-f]{16}")
"""What else is in the directory of an environment, beside the names."""


def environment_name(value: object) -> str:
    """A name, which becomes a path on the hosts."""
    name = _form(value)
    if _RESERVED.fullmatch(name):
        raise refusal("a name that Shoal uses itself", "choose another name")
    return name


def _python(value: object) -> str:
    fix = 'give a version, as "3.11", or a program on the hosts, as /opt/python/bin/python3'
    if isinstance(value, float):
        raise refusal("not text", f'put it in quotes: "{value}"')
    if not isinstance(value, str) or not re.fullmatch(r"3\.[0-9]{1,2}|python3(\.[0-9]{1,2})?|(/[\w.+-]+)+", value):
        raise refusal("not a Python", fix)
    return f"python{value}" if value[0] == "3" else value


def _proxy(value: object) -> str:
    fix = "write it like http://proxy.example.org:3128"
    if not isinstance(value, str) or not re.fullmatch(r"[!#-&(-~]{1,300}", value):
        raise refusal("not the address of a proxy", fix, None if isinstance(value, str) else value)
    try:
        url = urllib.parse.urlsplit(value)
        _ = url.port
    except ValueError:
        raise refusal("not the address of a proxy", fix, "(hidden)" if "@" in value else None) from None
    if "@" in value:
        what = "a proxy with a password, and every user can read this"
        raise refusal(what, "leave user and password out", "(hidden)")
    if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/") or url.query:
        raise refusal("not the address of a proxy", fix)
    return f"{url.scheme}://{url.netloc}"


def _no_proxy(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
    if not isinstance(text, str) or not re.fullmatch(r"[A-Za-z0-9.:/*_-]+(,[A-Za-z0-9.:/*_-]+)*", text):
        raise refusal("not a list of hosts", "write names and networks with commas between: localhost,10.0.0.0/8")
    return text


EnvironmentName = Annotated[str, BeforeValidator(environment_name), text_schema("name")]
HostDirectory = Annotated[str, BeforeValidator(directory), text_schema("path")]
PythonProgram = Annotated[str, BeforeValidator(_python), text_schema("version or program")]
ProxyUrl = Annotated[str, BeforeValidator(_proxy), text_schema("URL")]
NoProxy = Annotated[str, BeforeValidator(_no_proxy), WithJsonSchema({"type": ["string", "array"], "title": "hosts"})]


class Environment(SpecModel):
    """A Python environment for jobs: `shoal env build` makes it, `shoal run --env NAME` uses it.

    One of `requirements`, `lock` and `pyproject` says what is in it. These are files on your machine; their paths are
    relative to this file.
    """

    requirements: FilePath | None = None
    """A requirements file, as pip reads it. What it leaves open is decided when the environment is made."""
    lock: FilePath | None = None
    """A file with the version of every package: a requirements file with `==` on each line, or a pylock.toml."""
    pyproject: FilePath | None = None
    """A pyproject.toml: the environment has the dependencies of the project, not the project itself."""
    python: PythonProgram = "python3"
    """The Python of the hosts to use: a version (`"3.11"`) or a program."""
    place: Annotated[Literal["shared", "local"], BeforeValidator(choice("place", PLACES))] = "shared"
    """`shared`: nodes read it from the directory they share. `local`: every node gets a copy, from one archive."""
    directory: HostDirectory | None = None
    """Where it is kept. Without it, `environments` in the first share of `storage`, or /shared/environments."""

    _needs_git: bool = PrivateAttr(default=False)

    @property
    def needs_git(self) -> bool:
        """Whether one of its packages comes from a git repository. Known once its file has been read."""
        return self._needs_git

    def with_git(self) -> Self:
        copy = self.model_copy()
        copy._needs_git = True
        return copy


class Proxy(SpecModel):
    """How hosts that have no way to the internet of their own get packages, with apt and with pip."""

    http: ProxyUrl | None = None
    """The proxy for http:// addresses."""
    https: ProxyUrl | None = None
    """The proxy for https:// addresses. Without it, the one for http:// serves."""
    no_proxy: NoProxy | None = None
    """Hosts and networks that are reached without a proxy."""

    @property
    def variables(self) -> dict[str, str]:
        """The variables that programs read. curl and Python take them in lower case."""
        variables = {"http_proxy": self.http, "https_proxy": self.https or self.http, "no_proxy": self.no_proxy}
        return {name: value for name, value in variables.items() if value}


def environment_problems(environments: Mapping[str, Environment | None], proxy: Proxy | None) -> Iterator[Problem]:
    """Every environment says what is in it once, and a proxy has an address."""
    for name, environment in environments.items():
        sources = environment.set_among(SOURCES) if environment is not None else list(SOURCES[:1])
        if not sources:
            fix = "add one of `requirements`, `lock` and `pyproject`"
            yield Problem(("environments", name), "nothing says what is in it", "", fix)
        for key in sources[1:]:
            fix = "keep one, delete the other"
            yield Problem(("environments", name, key), f"both `{sources[0]}` and `{key}`", "", fix)
    if proxy is not None and not proxy.is_set("http") and not proxy.is_set("https"):
        yield Problem(("proxy",), "neither `http` nor `https`", "", "name a proxy, or delete this")
