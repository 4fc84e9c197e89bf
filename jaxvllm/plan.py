"""`python -m jaxvllm.plan` is `jaxvllm plan`."""

from jaxvllm.cli.plan import main

if __name__ == "__main__":
    raise SystemExit(main())
