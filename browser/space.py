"""A folder with a model that Gradio runs: on this machine, or as a Space of the Hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from huggingface_hub import SpaceCardData

from snapshot.config_values import value_of
from snapshot.disk.folder import atomic_folder, expanded
from snapshot.errors import SnapshotError
from snapshot.named_model import NamedModel, find_model
from store.kinds import named_repo

APP = Path(__file__).with_name("app.py")
GRADIO = "6.31.0"
REQUIREMENTS = f"torch\ntransformers>=5.24,<6\nhuggingface_hub>=2.4,<3\ngradio>={GRADIO},<7\n"


def make_space(source: str, target: str) -> None:
    """Write the program, what it needs, the card and the model into the new folder `target`.

    Raises SnapshotError and DataError for what is no model and for a target that exists, OSError if
    a file cannot be written.
    """
    folder = expanded(target).absolute()
    if "://" in target:
        raise SnapshotError(
            f"--to {target} is not a folder. Name a new one, and upload it: "
            "hf upload owner/name <folder> . --repo-type space --private."
        )
    if str(expanded(target)).startswith("~"):
        raise SnapshotError(f"--to {target} names the home of an unknown user: write {folder}.")
    if os.path.lexists(folder):
        raise SnapshotError(f"--to {target} exists already. Name a new folder, or move it away.")
    named = find_model(source)
    with atomic_folder(folder.parent, folder.name) as building:
        model = building / "model"
        model.mkdir()
        named.write(model)  # as transformers loads it
        shutil.copyfile(APP, building / APP.name)
        (building / "requirements.txt").write_text(REQUIREMENTS)
        (building / "README.md").write_text(_card(named, source), encoding="utf-8")


def _card(named: NamedModel, source: str) -> str:
    """The README.md, whose first lines make a repo a Gradio Space."""
    found, state = named_repo(source), named.state
    metadata = SpaceCardData(
        title=named.folder.name if state is None else value_of(state.config, "run.name"),
        sdk="gradio",
        sdk_version=GRADIO,
        app_file=APP.name,
        license=None if state is None else value_of(state.config, "hub.license"),
        models=None if found is None else [found[0]],
    )
    return (
        f"---\n{metadata.to_yaml()}\n---\n\nThe program and the model also run on your machine:\n\n"
        "```bash\npip install -r requirements.txt && python app.py\n```\n"
    )
