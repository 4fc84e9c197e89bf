"""`python -m jaxvllm.complete` is `jaxvllm complete`."""

from jaxvllm.cli.complete import main

if __name__ == "__main__":
    raise SystemExit(main())
