"""A Dockerfile, read and executed without Docker: in a root folder that debootstrap has made.

It knows the instructions that cloud/Dockerfile has, and refuses any other.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import string
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from runs import ROOT

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = Path("/run/certificates.crt")
"""Where an image finds this machine's, if its package index has one of its own."""


@dataclass
class Image:
    """What a Dockerfile says, and a folder that becomes it."""

    folder: Path
    arguments: dict[str, str]
    """Of the build, by name."""
    base: str = ""
    user: str = "root"
    directory: str = "/"
    variables: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    default: list[str] = field(default_factory=list)
    health: str = ""
    stop_signal: str = ""

    def run(self, *words: str, **changes: str) -> list[str]:
        """The command that executes words in the image, as its user, as a container's first one.

        Of this machine it has what pip needs to reach a package index: as Docker's builder would.
        """
        variables = {"HOME": self.home, **self.variables, **changes}
        variables.setdefault("PATH", PATH)
        mounts = ""
        if bundle := os.environ.get("SSL_CERT_FILE"):
            variables["PIP_CERT"] = str(CERTIFICATES)
            mounts += self._mounted(Path(bundle), CERTIFICATES)
        if linked := os.environ.get("PIP_FIND_LINKS"):
            variables["PIP_FIND_LINKS"] = linked
            mounts += self._mounted(Path(linked), Path(linked))
        given = [f"{name}={value}" for name, value in variables.items()]
        enter = shlex.join(["chroot", f"--userspec={self.user}:{self.user}", str(self.folder)])
        inside = shlex.join(["env", "-i", *given, "sh", "-c", 'cd "$0" && exec "$@"'])
        script = f"{mounts}exec {enter} {inside} {self.directory} {shlex.join(words)}"
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [*alone, f"--mount-proc={self.folder / 'proc'}", "sh", "-c", script]

    def _mounted(self, path: Path, place: Path) -> str:
        """The command that mounts a path of this machine in the image, to be read only."""
        at = Path(f"{self.folder}{place}")
        at.mkdir(parents=True, exist_ok=True) if path.is_dir() else at.touch()
        return f"mount --options bind,ro {path} {at} && "

    @property
    def home(self) -> str:
        return "/root" if self.user == "root" else f"/home/{self.user}"


def instructions(path: Path) -> list[tuple[str, str]]:
    """Name and words of each, without comments, on one line."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.split("\n") if line]


def read(
    path: Path, folder: Path = Path("/nowhere"), build: bool = False, **arguments: str
) -> Image:
    """The image of a Dockerfile; with `build`, its RUN and COPY are executed in the folder."""
    image = Image(folder, arguments)
    for name, words in instructions(path):
        if name == "FROM":
            image.base = words
        elif name == "ARG":
            key, value = words.split("=", 1)
            image.arguments.setdefault(key, value)
        elif name == "ENV":
            known = {"PATH": PATH, **image.variables}
            given = dict(word.split("=", 1) for word in shlex.split(words))
            image.variables |= {
                key: string.Template(value).substitute(known) for key, value in given.items()
            }
        elif name == "USER":
            image.user = words
        elif name == "WORKDIR":
            image.directory = words
            if build:
                (folder / words.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "STOPSIGNAL":
            image.stop_signal = words
        elif name == "HEALTHCHECK":
            image.health = words.split(" CMD ", 1)[1]
        elif name == "ENTRYPOINT":
            image.entrypoint = json.loads(words)
        elif name == "CMD":
            image.default = json.loads(words)
        elif name == "COPY":
            *sources, to = words.split()
            if build:
                copy(sources, folder / image.directory.lstrip("/") / to)
        elif name == "RUN":
            if build:
                subprocess.run(image.run("sh", "-c", words, **image.arguments), check=True)
        else:
            raise AssertionError(f"{name} is not known here")
    return image


def sent() -> list[str]:
    """What .dockerignore leaves for the builder: it ignores everything but some names."""
    first, *rest = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"
    ]
    assert first == "*"
    assert rest.pop() == "**/__pycache__"
    assert all(re.fullmatch(r"![\w.-]+", line) for line in rest), rest
    return [line.removeprefix("!") for line in rest]


def copy(sources: list[str], to: Path) -> None:
    """COPY, of what is sent."""
    for name in sent() if sources == ["."] else sources:
        assert name in sent()
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, to / name, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, to)
