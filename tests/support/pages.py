"""The pages of the documentation, and the commands and names that stand in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from runs import ROOT

README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCS = ROOT / "docs"
PAGES = (README, CONTRIBUTING, ROOT / "slurm" / "README.md", *sorted(DOCS.glob("*.md")))
PROGRAMS = ("accelerate", "python", "pytest", "pip", "hf", "sbatch", "ruff", "mypy")
PROGRAMS += ("docker", "git", "kubectl", "sky", "uv")


@dataclass(frozen=True)
class Command:
    """A command line of a page."""

    page: Path
    line: str

    @property
    def words(self) -> list[str]:
        """Of its last part, behind any `&&`."""
        return shlex.split(self.line.split("&&")[-1])

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {self.line}"


def name_of(page: Path) -> str:
    """As it is named in the repository."""
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def shown_in(page: Path) -> list[Command]:
    """What a reader is to type: each line of the blocks marked as bash."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return [Command(page, line) for block in blocks for line in block.splitlines()]


def mentioned_in(page: Path) -> list[Command]:
    """Whatever else looks like a command: in a line of text, in a loop, behind a prompt."""
    text = text_of(page)
    prose, blocks = split(text)
    found = [code for code in inline_code(prose) if " " in code]
    found += [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    found += re.findall(r"accelerate launch .*?(?=; do)", text)
    return [Command(page, line) for line in found if line.split(" ")[0] in PROGRAMS]


def split(text: str) -> tuple[str, list[str]]:
    """The prose of a page, and its blocks that are not marked as bash."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return prose, [content for language, content in blocks if language != "bash"]


def inline_code(prose: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose)


def headings_of(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ (.*)$", split(text_of(page))[0], flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def launched_by(command: Command) -> tuple[str, list[str]]:
    """The accelerate config file and the overrides of a launch."""
    words = command.words
    config = words[words.index("--config_file") + 1]
    return config, [word for word in words[words.index(script_of(command)) + 1 :] if word != "..."]


def script_of(command: Command) -> str:
    """What is launched: train.py, trace.py or prove.py."""
    return next(word for word in command.words if word in ("train.py", "trace.py", "prove.py"))


SHOWN = list({command.line: command for page in PAGES for command in shown_in(page)}.values())
"""Each command once, on the first page that has it."""
LAUNCHES = [
    command
    for command in SHOWN
    if "accelerate launch" in command.line and " -m " not in command.line
]
