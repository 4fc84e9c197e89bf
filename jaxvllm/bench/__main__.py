"""`python -m jaxvllm.bench` is `jaxvllm bench`."""

from jaxvllm.cli.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
