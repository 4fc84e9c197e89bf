"""`python -m jaxvllm.explain` is `jaxvllm explain`."""

from jaxvllm.cli.explain import main

if __name__ == "__main__":
    raise SystemExit(main())
