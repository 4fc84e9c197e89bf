"""`python -m jaxvllm.run_batch` is `jaxvllm run-batch`."""

from jaxvllm.cli.run_batch import main

if __name__ == "__main__":
    raise SystemExit(main())
