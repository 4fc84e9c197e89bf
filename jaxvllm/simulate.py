"""`python -m jaxvllm.simulate` is `jaxvllm simulate`."""

from jaxvllm.cli.simulate import main

if __name__ == "__main__":
    raise SystemExit(main())
