"""What a user may give as a model: a name of one that ships with us, a directory, or a name on the Hugging Face hub."""

import re
from pathlib import Path

# The model that ships inside the package, and what drafts for it.
ASSETS = Path(__file__).parent / "assets"
SHIPPED = ("demo", "demo-draft", "demo-eagle3", "demo-medusa")
CONFIG = "config.json"
# A name on the hub begins with a letter or a digit, so that ./nope and ../nope are paths.
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def local_directory(model: str) -> Path | None:
    """Returns the directory of a model that is on this machine, or None for a name on the hub.

    Raises ValueError when `model` is neither, or is a directory without a config.json.
    """
    if model in SHIPPED:
        return ASSETS / model
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # the ~ of a user who does not exist
        raise ValueError(f"model {model!r} is in nobody's home ({error}): give the directory without ~") from error
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path} has no {CONFIG}: it must be a model in Hugging Face format")
        return path
    if path.is_file():
        raise ValueError(f"model {model!r} is a file: give the directory that holds {CONFIG}")
    if not _HUB_NAME.fullmatch(model):
        raise ValueError(
            f"model {model!r} is no directory on this machine, nor a hub name such as owner/name: correct it, or leave "
            "it out for the embedded model"
        )
    return None
