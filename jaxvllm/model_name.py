"""The names of models: one that ships with us, a directory, a GGUF file, or a name on the Hugging Face hub."""

import re
from pathlib import Path

from jaxvllm.gguf_file import SUFFIX, is_gguf, is_later_part

# The model that ships inside the package, and what drafts for it.
ASSETS = Path(__file__).parent / "assets"
DEMO_MODEL = ASSETS / "demo"
SHIPPED = ("demo", "demo-draft", "demo-eagle3", "demo-medusa")
CONFIG = "config.json"
# Only these files of a hub repository are downloaded.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
# A name on the hub begins with a letter or a digit, so that ./nope and ../nope are paths. The kind of one of several
# GGUF files may follow, such as Q4_K_M.
_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/[\w.-]+)(:(?P<kind>[\w.-]+))?")
_BESIDE = "mmproj"  # how names of files begin that have the vision tower of a model


def local_directory(model: str) -> Path | None:
    """Returns the directory or the GGUF file of a model that is on this machine, or None for a name on the hub.

    DIR:Q4_K_M is the GGUF file of that kind in a directory. Raises ValueError when `model` is none of these, or a
    directory that has neither a config.json nor one GGUF file.
    """
    if model in SHIPPED:
        return ASSETS / model
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # the ~ of a user who does not exist
        raise ValueError(f"model {model!r} is in nobody's home ({error}): give the directory without ~") from error
    if path.is_dir():
        return path if (path / CONFIG).is_file() else _gguf_in(path)
    if is_gguf(path):
        return path
    if path.is_file():
        raise ValueError(f"model {model!r} is a file: give the directory that holds {CONFIG}, or a {SUFFIX} file")
    start, _, kind = model.rpartition(":")
    if start and (directory := Path(start).expanduser()).is_dir():
        return _gguf_in(directory, kind)
    if not _HUB_NAME.fullmatch(model):
        raise ValueError(
            f"model {model!r} is not a directory, nor a hub name such as owner/name, nor a {SUFFIX} file: correct it, "
            "or leave it out for the embedded model"
        )
    return None


def _gguf_in(directory: Path, kind: str | None = None) -> Path:
    """Returns the GGUF file in a directory, of a kind such as Q4_K_M: the first of its files where a model is split."""
    found = _first_files(directory)
    if not found:
        raise ValueError(
            f"{directory} has no {CONFIG}: it must be a model in Hugging Face format, or in {SUFFIX} files"
        )
    of_kind = found if kind is None else _of_kind(found, kind)
    if len(of_kind) != 1:
        names = ", ".join(str(file.relative_to(directory)) for file in found)
        asked = f"one {SUFFIX} file" if kind is None else f"one {SUFFIX} file of the kind {kind}"
        raise ValueError(f"{directory} must have {asked}, and has {names}: give one of these, or {directory}:KIND")
    return of_kind[0]


def _first_files(directory: Path) -> list[Path]:
    """Returns the GGUF files of the models in a directory, the first one of each that is split."""
    # Files of a large model may have a directory of their own.
    everything = sorted(file for pattern in ("*", "*/*") for file in directory.glob(f"{pattern}{SUFFIX}"))
    return [file for file in everything if not file.name.startswith(_BESIDE) and not is_later_part(file)]


def _of_kind(files: list[Path], kind: str) -> list[Path]:
    named = re.compile(rf"(^|[-._]){re.escape(kind)}($|[-.])", re.IGNORECASE)
    return [file for file in files if named.search(file.stem)]


def hub_patterns(kind: str) -> tuple[str, ...]:
    """Returns the patterns of the GGUF files of a kind: F16 is a word of their names, and BF16 another one.

    The hub compares letters with their case, so names with the kind as it is given, in lower and in upper case match.
    """
    ends = (f"{SUFFIX}", f"[-.]*{SUFFIX}")
    starts = ("", "*[-._/]")
    return tuple(f"{start}{word}{end}" for word in _spellings(kind) for start in starts for end in ends)


def _spellings(kind: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((kind, kind.lower(), kind.upper())))


def resolve(model: str) -> Path:
    """Returns the directory or the GGUF file of a model: one that ships with us, a local one, or one of the hub.

    A hub repository that is not here yet is downloaded. Raises ValueError when `model` is none of these, or the
    download fails.
    """
    if (directory := local_directory(model)) is not None:
        return directory
    match = _HUB_NAME.fullmatch(model)
    assert match is not None, model
    # Anything may go wrong on a network, and each kind has its own exception.
    try:
        directory = _snapshot(match)
    except Exception as error:
        raise ValueError(
            f"model {model!r} is not a directory, and could not be downloaded "
            f"({type(error).__name__}: {error}): give a local directory"
        ) from error
    return directory if match["kind"] is None else _gguf_of_hub(directory, match["name"], match["kind"])


def local_gguf(model: str) -> Path | None:
    """Returns the GGUF file that `model` names, of those that are on this machine, or None if it names something else.

    It is a file, DIR:Q4_K_M, a directory of one such file, or owner/name:Q4_K_M of the hub, which nothing is downloaded
    from. Raises ValueError when a directory has several such files, and for a file of the hub that is not here.
    """
    path, start = Path(model).expanduser(), model.rpartition(":")[0]
    if model in SHIPPED:
        return None
    if path.is_dir() or is_gguf(path) or (start and Path(start).expanduser().is_dir()):
        found = local_directory(model)
        return found if found is not None and is_gguf(found) else None
    match = _HUB_NAME.fullmatch(model)
    if match is None or match["kind"] is None:
        return None
    try:
        directory = _snapshot(match, is_local=True)
    except OSError as error:
        raise ValueError(
            f"model {model!r} is a file of the hub that is not here, and nothing is downloaded: download it before, or "
            f"give a {SUFFIX} file"
        ) from error
    return _gguf_of_hub(directory, match["name"], match["kind"])


def _snapshot(name: re.Match[str], is_local: bool = False) -> Path:
    """Returns the directory of a repository of the hub, downloaded unless it `is_local`: then OSError if it is not."""
    from huggingface_hub import snapshot_download

    patterns = HUB_FILES if name["kind"] is None else hub_patterns(name["kind"])
    return Path(
        snapshot_download(
            name["name"],
            allow_patterns=list(patterns),
            ignore_patterns=[f"*{_BESIDE}*"],
            local_files_only=is_local,
        )
    )


def _gguf_of_hub(directory: Path, name: str, kind: str) -> Path:
    if not _of_kind(_first_files(directory), kind):
        raise ValueError(
            f"{name} on the hub has no {SUFFIX} file of the kind {', '.join(_spellings(kind))}: give the kind as the "
            "names of its files spell it"
        )
    return _gguf_in(directory, kind)
