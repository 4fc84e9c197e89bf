"""`python -m jaxvllm.serve` is `jaxvllm serve`."""

from jaxvllm.cli.serve import main

if __name__ == "__main__":
    raise SystemExit(main())
