"""`jaxvllm complete`: has a running server continue a text."""

from collections.abc import Sequence

from jaxvllm.cli.chat import make_parser, talk
from jaxvllm.client.conversation import Completions


def main(argv: Sequence[str] | None = None) -> int:
    """Completes a text and returns the exit code, which is the same as that of `jaxvllm chat`."""
    parser = make_parser("complete", "PROMPT", "Continue a text on a running server, without a chat template.")
    args = parser.parse_args(argv)
    return talk(args, "complete", Completions())
