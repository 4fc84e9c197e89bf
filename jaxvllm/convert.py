"""`python -m jaxvllm.convert` is `jaxvllm convert`."""

from jaxvllm.cli.convert import main

if __name__ == "__main__":
    raise SystemExit(main())
