"""`python -m jaxvllm.generate` is `jaxvllm generate`."""

from jaxvllm.cli.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
