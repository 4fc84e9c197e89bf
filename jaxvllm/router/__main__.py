"""`python -m jaxvllm.router` is `jaxvllm router`."""

from jaxvllm.cli.router import main

if __name__ == "__main__":
    raise SystemExit(main())
