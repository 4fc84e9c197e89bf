"""`python -m jaxvllm` is `jaxvllm`."""

from jaxvllm.cli import main

raise SystemExit(main())
