"""The parser of every command. Its errors are one line, and say what to give instead of an unknown option."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from jaxvllm.cli.vllm_words import canonical, read_words

# The similarity at which an option is suggested. It is 0.85 for --max-num-sequences and --max-num-seqs; options that
# only begin alike, such as --num-warmups and --num-prompts, are below 0.7.
_LIKENESS = 0.75
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
# The end of the help of commands with an engine's options.
ENGINE_EPILOG = (
    "vLLM's options are understood too: those that have another name here work under both names, those that change "
    "nothing here are accepted with one line that names them, and for all others the error says what to give instead. "
    "Whole numbers may be written as 4k (4000) or 4K (4096)."
)


class Parser(argparse.ArgumentParser):
    """An argument parser that also reads command lines of vLLM: see `vllm_words`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._read(args), namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_intermixed_args(self._read(args), namespace)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def _read(self, args: Sequence[str] | None) -> list[str]:
        """Returns the arguments without options of vLLM. Ends the program when an option is unknown or refused."""
        words = list(sys.argv[1:] if args is None else args)
        known = self._option_string_actions
        if self._subparsers is not None:  # an option that this parser does not know may belong to one of them
            return [canonical(word, known) for word in words]
        try:
            read = read_words(words, known, {action.dest for action in known.values()})
        except ValueError as error:
            self.error(str(error))
        end = read.words.index("--") if "--" in read.words else len(read.words)
        problems = [*read.problems, *self._unknown([*read.words[:end], *read.unknown])]
        if problems:
            self.error(f"\n{self.prog}: ".join(problems))
        if read.note is not None:
            print(f"{self.prog}: {read.note}", file=sys.stderr)
        return read.words

    def _unknown(self, words: Sequence[str]) -> Iterator[str]:
        """Yields a sentence for each word that names an option which does not exist."""
        known = self._option_string_actions
        for flag in (word.partition("=")[0] for word in words):
            if not _OPTION.fullmatch(flag) or any(one.startswith(flag) for one in known):
                continue  # argparse also takes the beginning of a name
            if not flag.startswith("--") and flag[:2] in known:
                continue  # -iFILE means -i FILE
            # A short name has too few letters to guess what was meant.
            near = difflib.get_close_matches(flag, known, 1, _LIKENESS) if flag.startswith("--") else []
            yield f"unknown option {flag}" + (f": did you mean {near[0]}?" if near else "")
