"""`python -m jaxvllm.bench` does the same as `jaxvllm bench`."""

from jaxvllm.cli.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
