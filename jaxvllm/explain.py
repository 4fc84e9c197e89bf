"""`python -m jaxvllm.explain` is `jaxvllm explain`."""

import sys

from jaxvllm.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["explain", *sys.argv[1:]]))
