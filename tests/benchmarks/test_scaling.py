"""The curves of `benchmarks.scaling`: which sizes are measured, and what counts as a cliff."""

from dataclasses import replace

from benchmarks.scaling import Point, cliffs, doublings

POINT = Point(size=1, step_ms=1.0, quickest_ms=1.0, slowest_ms=1.0, num_steps=1, memory_mib=1)


def test_a_time_that_grows_faster_than_the_size_is_a_cliff() -> None:
    times = {1: 1.0, 2: 2.0, 4: 5.0, 8: 10.0, 9: 20.0, 16: 21.0}
    assert cliffs([replace(POINT, size=size, step_ms=ms) for size, ms in times.items()]) == [9]


def test_sizes_double() -> None:
    assert doublings(512, 4096) == [512, 1024, 2048, 4096]
    assert doublings(512, 5000) == [512, 1024, 2048, 4096]
    assert doublings(1, 1) == [1]
