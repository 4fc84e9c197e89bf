"""`python -m jaxvllm.chat` is `jaxvllm chat`."""

from jaxvllm.cli.chat import main

if __name__ == "__main__":
    raise SystemExit(main())
