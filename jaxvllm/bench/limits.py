"""What the operating system lets this program have at a time."""

import resource

SPARE = 64  # files that are no connections


def allow_connections(count: int) -> None:
    """Raises the limit of open files, mostly 1024, to what `count` connections need. ValueError if it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"{count} connections at a time exceed the {hard} files that may be open: give --max-concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
