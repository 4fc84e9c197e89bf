"""The names of models: one that ships with us, a directory, or a name on the Hugging Face hub."""

import re
from pathlib import Path

# The model that ships inside the package, and what drafts for it.
ASSETS = Path(__file__).parent / "assets"
DEMO_MODEL = ASSETS / "demo"
SHIPPED = ("demo", "demo-draft", "demo-eagle3", "demo-medusa")
CONFIG = "config.json"
# Only these files of a hub repository are downloaded.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
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
            f"model {model!r} is not a directory, nor a hub name such as owner/name: correct it, or leave "
            "it out for the embedded model"
        )
    return None


def resolve(model: str) -> Path:
    """Returns the directory of a model: of one that ships with us, of a local directory, or of a Hugging Face hub name.

    A hub repository that is not here yet is downloaded. Raises ValueError when `model` is none of these, or the
    download fails.
    """
    if (directory := local_directory(model)) is not None:
        return directory
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    # Anything may go wrong on a network, and each kind has its own exception.
    except Exception as error:
        raise ValueError(
            f"model {model!r} is not a directory, and could not be downloaded "
            f"({type(error).__name__}: {error}): give a local directory"
        ) from error
