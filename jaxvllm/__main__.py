"""`python -m jaxvllm COMMAND` is `jaxvllm COMMAND`, for every command."""

from jaxvllm.cli import main

raise SystemExit(main())
