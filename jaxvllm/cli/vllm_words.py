"""`read_words`: a command line in which options of vLLM are replaced by ours, or left out where they change nothing."""

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxvllm.cli.flags import flag_of
from jaxvllm.vllm_options import OBJECTS, SHORT_NAMES, VALUES, Refused, Unneeded, find_option
from jaxvllm.vllm_translation import translate, translated_value

CONFIG_FLAG = "--config"
_FLAG = re.compile(r"--?[A-Za-z][\w.+-]*")
_LEVEL = re.compile(r"-O=?(\d)")  # vLLM takes -O3, -O=3 and -O 3


@dataclass(frozen=True)
class CommandLine:
    """A command line without options of vLLM, and what became of those."""

    words: list[str]
    note: str | None  # one line about the options that change nothing here
    problems: tuple[str, ...]  # a sentence for each option that cannot be, with the way out
    unknown: tuple[str, ...]  # flags of vLLM that mean nothing to this command


@dataclass
class _Flags:
    """The options of vLLM on a command line, and how they are written there: a `vllm_translation.Spelling`."""

    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)  # the flags by the names of the options
    chosen: dict[str, str] = field(default_factory=dict)  # values of our options that mean auto here, and why

    def add(self, name: str, flag: str, value: Any) -> None:
        self.values[name] = value
        self.written[name] = flag

    def ours(self, field: str, value: str) -> str:
        return f"{flag_of(field)} {shlex.quote(value)}" if value else flag_of(field)

    def given(self, name: str) -> str:
        return self.written.get(name, flag_of(name))


def read_words(words: Sequence[str], flags: Collection[str], fields: Collection[str]) -> CommandLine:
    """Replaces the options of vLLM among `words`. `flags` are the flags of this command, and `fields` what they set.

    Flags may be written with underscores, and a member of a JSON object as `--flag.member value`. `--config FILE`
    stands for the options in a file. Words after `--` stay as they are. Raises ValueError for a file that is wrong.
    """
    end = words.index("--") if "--" in words else len(words)
    # The short names that the user has typed, which messages repeat.
    typed = {SHORT_NAMES[word.partition("=")[0]]: word.partition("=")[0] for word in words if _is_short(word)}
    head = [canonical(word, flags) for word in words[:end]]
    if CONFIG_FLAG in flags:
        head = _with_file(head, flags)
    head = _with_objects(head)
    foreign = _Flags()
    kept: list[str] = []
    while head:
        head = _take(head, flags, foreign, kept)
    foreign.written |= {name: flag for name, flag in typed.items() if name in foreign.values}
    ours = {name for word in kept if (name := _name(word)) in fields}
    translation = translate(foreign.values, ours, fields, foreign)
    note = replace(translation, unneeded={**translation.unneeded, **foreign.chosen}).note
    for name, value in translation.options.items():
        kept += [flag_of(name)] if value is True else [flag_of(name), str(value)]
    unknown = tuple(map(foreign.given, translation.unknown))
    return CommandLine([*kept, *words[end:]], note, translation.problems, unknown)


def _is_short(word: str) -> bool:
    return word.partition("=")[0] in SHORT_NAMES


def _name(word: str) -> str:
    return word.partition("=")[0].strip("-").replace("-", "_")


def canonical(word: str, flags: Collection[str]) -> str:
    """Returns a word with the long name of its option, and with dashes in it."""
    if (level := _LEVEL.fullmatch(word)) is not None:
        return f"--optimization-level={level[1]}"
    flag, equals, value = word.partition("=")
    if not _FLAG.fullmatch(flag):
        return word
    first, dot, members = flag.partition(".")
    if first in SHORT_NAMES and first not in flags:
        first = flag_of(SHORT_NAMES[first])
    if first.startswith("--"):
        first = first.replace("_", "-")
        first = _switch(first, flags)
    return f"{first}{dot}{members}{equals}{value}"


def _switch(flag: str, flags: Collection[str]) -> str:
    """Returns the flag of a switch as it is written here: vLLM takes `--disable-x` for `--no-enable-x`, and so on."""
    for theirs, ours in (("--disable-", "--no-enable-"), ("--no-disable-", "--enable-")):
        if flag.startswith(theirs) and flag not in flags and (other := ours + flag.removeprefix(theirs)) in flags:
            return other
    return flag


def _take(head: list[str], flags: Collection[str], foreign: _Flags, kept: list[str]) -> list[str]:
    """Puts the first word of `head`, with its values, where it belongs, and returns the words after them."""
    word, *rest = head
    flag, equals, value = word.partition("=")
    name = _name(word)
    if not _FLAG.fullmatch(flag):
        return _keep(kept, word, rest)
    if flag in flags:
        if name not in VALUES or not (equals or rest):
            return _keep(kept, word, rest)
        if not equals:
            value, *rest = rest
        if (ours := translated_value(name, value)) is None:
            return rest
        if isinstance(ours, Unneeded | Refused):
            foreign.add(name, flag, value)
            return rest
        if ours != value and ours == "auto":
            foreign.chosen[f"{flag} {value}"] = "it is chosen for the device"
        return _keep(kept, f"{flag}={ours}", rest)
    found = find_option(name)
    if found is None and name not in OBJECTS:
        return _keep(kept, word, rest)
    takes = "value" if found is None else found[0].takes
    if takes == "nothing":
        foreign.add(name, flag, True)
        return rest
    if equals or not rest:
        foreign.add(name, flag, value)
        return rest
    if takes == "value":
        foreign.add(name, flag, rest[0])
        return rest[1:]
    count = next((i for i, one in enumerate(rest) if _FLAG.fullmatch(one.partition("=")[0])), len(rest))
    foreign.add(name, flag, " ".join(rest[:count]))
    return rest[count:]


def _keep(kept: list[str], word: str, rest: list[str]) -> list[str]:
    kept.append(word)
    return rest


def _with_objects(head: Sequence[str]) -> list[str]:
    """Returns the words in which `--flag.member value` is a member of the JSON object of `--flag`."""
    words: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(head)
    for word in rest:
        flag, equals, value = word.partition("=")
        base, dot, path = flag.partition(".")
        if not dot or not _FLAG.fullmatch(flag):
            words.append(word)
            continue
        if not equals:
            value = next(rest, "")
        if _name(base) in OBJECTS:
            words.append(f"{flag}={value}")
            continue
        if base not in objects:
            words.append(f"{base}=")  # its place
        _insert(objects.setdefault(base, {}), path, value)
    return [f"{word}{json.dumps(objects[word[:-1]])}" if word[:-1] in objects else word for word in words]


def _insert(members: dict[str, Any], path: str, text: str) -> None:
    """Writes one member of an object. A path that ends with + names a list, to which the values are added."""
    *outer, last = path.removesuffix("+").split(".")
    for name in outer:
        inner = members.setdefault(name, {})
        members = inner if isinstance(inner, dict) else {}
    if path.endswith("+"):
        members.setdefault(last, []).extend(text.split(","))
    else:
        members[last] = _json_or_text(text)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_file(head: list[str], flags: Collection[str]) -> list[str]:
    """Returns the words with the options of the file that `--config` names. Words of the command line win."""
    at = next((i for i, word in enumerate(head) if word.partition("=")[0] == CONFIG_FLAG), None)
    if at is None:
        return head
    _, equals, path = head[at].partition("=")
    if not equals and at + 1 == len(head):
        raise ValueError(f"{CONFIG_FLAG} needs a YAML file with options")
    path = path if equals else head[at + 1]
    words = head[:at] + head[at + (1 if equals else 2) :]
    given = {_name(word.partition(".")[0]).removeprefix("no_") for word in words if word.startswith("-")}
    if words and not words[0].startswith("-"):
        given |= {"model", "model_tag"}
    options = {name: value for name, value in _read_file(path).items() if name not in given}
    from_file = [canonical(word, flags) for name, value in options.items() for word in _as_words(name, value)]
    split = 1 if words and not words[0].startswith("-") else 0
    return [*words[:split], *from_file, *words[split:]]


def _read_file(path: str) -> Mapping[str, Any]:
    """Returns the options in a YAML file, by their names with underscores."""
    import yaml  # only a command line with a file needs it

    try:
        options = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{CONFIG_FLAG} {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{CONFIG_FLAG} {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError(f"{CONFIG_FLAG} {path} must have a line `option: value` for each option")
    return {"model" if _name(name) == "model_tag" else _name(name): value for name, value in options.items()}


def _as_words(name: str, value: Any) -> Iterator[str]:
    """Yields an option of the file as it is written on a command line."""
    flag = flag_of(name)
    match value:
        case None:
            pass
        case True:
            yield flag
        case False:
            yield flag_of(f"no_{name}")
        case list():
            # One word for each, which swallows no word after it.
            yield from (f"{flag}={one}" for one in value)
        case dict():
            yield f"{flag}={json.dumps(value)}"
        case _:
            yield f"{flag}={value}"
