"""`python -m jaxvllm.serve` is `jaxvllm serve`."""

import sys

from jaxvllm.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]]))
