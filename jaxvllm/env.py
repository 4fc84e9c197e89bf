"""`python -m jaxvllm.env` is `jaxvllm env`."""

from jaxvllm.cli.env import main

if __name__ == "__main__":
    raise SystemExit(main())
