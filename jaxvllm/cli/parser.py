"""The parser of every command. Its errors are one line, and say what to give instead of an unknown option."""

import argparse
import difflib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NoReturn

from jaxvllm.cli.flags import flag_of
from jaxvllm.vllm_options import SHORT_NAMES, Advice, advice_on

# The similarity at which an option is suggested. It is 0.85 for --max-num-sequences and --max-num-seqs; options that
# only begin alike, such as --num-warmups and --num-prompts, are below 0.7.
_LIKENESS = 0.75
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
# The end of the help of commands with an engine's options.
ENGINE_EPILOG = (
    "Options of vLLM that have another name here work under both names if they mean the same. For the others, the "
    "error message says what to give instead. Whole numbers may be written as 4k (4000) or 4K (4096)."
)
_LONG_NAME = re.compile(r"^--[A-Za-z][\w-]*(?==|$)")


class Parser(argparse.ArgumentParser):
    """An argument parser that knows options of vLLM, and short names of them that it has under the long name alone.

    Options may be written with underscores instead of dashes.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._read(args), namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_intermixed_args(self._read(args), namespace)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def _read(self, args: Sequence[str] | None) -> list[str]:
        """Returns the arguments with dashes in the names of options. Ends the program when an option is unknown."""
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        words[:end] = [_LONG_NAME.sub(lambda name: name[0].replace("_", "-"), self._long(word)) for word in words[:end]]
        # If the parser has subcommands, an option that it does not know may belong to one of them.
        problems = list(self._problems(words[:end])) if self._subparsers is None else []
        if problems:
            self.error(f"\n{self.prog}: ".join(problems))
        return words

    def _long(self, word: str) -> str:
        """Returns `word` with the long name of vLLM's short one, if this parser has that option."""
        name, equals, value = word.partition("=")
        if name not in SHORT_NAMES or (flag := flag_of(SHORT_NAMES[name])) not in self._option_string_actions:
            return word
        return f"{flag}{equals}{value}"

    def _problems(self, words: Sequence[str]) -> Iterator[str]:
        """Yields, for each unknown option, a message that says what to do instead."""
        known = self._option_string_actions
        fields = {action.dest for action in known.values()}
        advised: dict[str, _Advised] = {}  # by our option, which may stand for several of vLLM's, or else by the flag
        unknown = []
        for word, following in zip_longest(words, words[1:], fillvalue="-"):
            flag, equals, value = word.partition("=")
            if not _OPTION.fullmatch(flag) or any(one.startswith(flag) for one in known):
                continue  # argparse also takes the beginning of a name
            if not flag.startswith("--") and flag[:2] in known:
                continue  # -iFILE means -i FILE
            name = SHORT_NAMES.get(flag, flag.strip("-").replace("-", "_"))
            advice = advice_on(name)
            if advice is not None and (advice.field is None or advice.field in fields):
                value = value if equals or following.startswith("-") else following
                one = advised.setdefault(advice.field or flag, _Advised(advice))
                one.words.append(f"{flag} {value}".rstrip() if advice.uses_value else flag)
                one.values.update({name: value} if value else {})
            else:
                # A short name has too few letters to guess what was meant.
                near = difflib.get_close_matches(flag, known, 1, _LIKENESS) if flag.startswith("--") else []
                unknown.append(f"unknown option {flag}" + (f": did you mean {near[0]}?" if near else ""))
        for one in advised.values():
            yield f"{' '.join(one.words)}: {one.advice.text(one.values, fields, _written)}"
        yield from unknown


@dataclass(frozen=True)
class _Advised:
    """Options of vLLM that were given, with one advice for all of them."""

    advice: Advice
    words: list[str] = field(default_factory=list)  # the options as they were given
    values: dict[str, str] = field(default_factory=dict)  # by the names of the options


def _written(field: str, value: str) -> str:
    return f"{flag_of(field)} {shlex.quote(value)}" if value else flag_of(field)
