"""The parser of every command: errors are one line, and name what to give instead of an option that does not exist."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NoReturn

from jaxvllm.cli.flags import flag_of
from jaxvllm.vllm_options import SHORT_NAMES, Advice, advice_on

# How like an option another must be to be offered. --max-num-sequences and --max-num-seqs are so to 0.85; what only
# begins alike, such as --num-warmups and --num-prompts, is below 0.7.
_LIKENESS = 0.75
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
# What --help says at its end, where the options are those of an engine.
ENGINE_EPILOG = (
    "Options of vLLM that have another name here work under both names where they mean the same; for the others the "
    "error says what to give. Whole numbers may be written 4k (4000) or 4K (4096)."
)
_LONG_NAME = re.compile(r"^--[A-Za-z][\w-]*(?==|$)")


class Parser(argparse.ArgumentParser):
    """An argument parser that knows options of vLLM. Its options may be written with underscores for dashes."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._read(args), namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_intermixed_args(self._read(args), namespace)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def _read(self, args: Sequence[str] | None) -> list[str]:
        """The arguments with dashes in the names of options. Ends the program when some options do not exist."""
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        words[:end] = [_LONG_NAME.sub(lambda name: name[0].replace("_", "-"), word) for word in words[:end]]
        # With commands below this parser, an option that it does not know may be theirs.
        problems = list(self._problems(words[:end])) if self._subparsers is None else []
        if problems:
            self.error(f"\n{self.prog}: ".join(problems))
        return words

    def _problems(self, words: Sequence[str]) -> Iterator[str]:
        """What to do instead of each option that does not exist."""
        known = self._option_string_actions
        fields = {action.dest for action in known.values()}
        advised: dict[str, _Advised] = {}  # by our option, of which several of vLLM's may be a part, else by the flag
        unknown = []
        for word, following in zip_longest(words, words[1:], fillvalue="-"):
            flag, equals, value = word.partition("=")
            if not _OPTION.fullmatch(flag) or any(one.startswith(flag) for one in known):
                continue  # argparse takes the beginning of a name, too
            if not flag.startswith("--") and flag[:2] in known:
                continue  # -iFILE is -i FILE
            name = SHORT_NAMES.get(flag, flag.strip("-").replace("-", "_"))
            advice = advice_on(name)
            if advice is not None and (advice.field is None or advice.field in fields):
                value = value if equals or following.startswith("-") else following
                one = advised.setdefault(advice.field or flag, _Advised(advice))
                one.words.append(f"{flag} {value}".rstrip() if advice.uses_value else flag)
                one.values.update({name: value} if value else {})
            else:
                # A short name has too few letters to guess from.
                near = difflib.get_close_matches(flag, known, 1, _LIKENESS) if flag.startswith("--") else []
                unknown.append(f"unknown option {flag}" + (f": did you mean {near[0]}?" if near else ""))
        for one in advised.values():
            yield f"{' '.join(one.words)}: {one.advice.text(one.values, fields, _written)}"
        yield from unknown


@dataclass(frozen=True)
class _Advised:
    """Options of vLLM that were given, and the one advice for all of them."""

    advice: Advice
    words: list[str] = field(default_factory=list)  # as they were given
    values: dict[str, str] = field(default_factory=dict)  # by the names of the options


def _written(field: str, value: str) -> str:
    return f"{flag_of(field)} {value}".rstrip()
