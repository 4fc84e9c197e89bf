"""`python -m jaxvllm.generate` is `jaxvllm generate`."""

import sys

from jaxvllm.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["generate", *sys.argv[1:]]))
