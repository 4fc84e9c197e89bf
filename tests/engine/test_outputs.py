import pytest

from jaxvllm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput


def test_a_completion_is_finished_once_it_has_a_reason() -> None:
    assert not CompletionOutput(0, "a", [1]).finished()
    assert CompletionOutput(0, "a", [1], finish_reason="length").finished()


def test_metrics_are_differences_or_nothing_yet() -> None:
    metrics = RequestMetrics(arrival_time=10.0, first_scheduled_time=10.5, first_token_time=11.0)
    assert (metrics.queued_seconds, metrics.first_token_seconds, metrics.total_seconds) == (0.5, 1.0, None)


def test_outputs_do_not_change() -> None:
    output = RequestOutput("1", None, [1], [])
    with pytest.raises(AttributeError):
        output.finished = True  # type: ignore[misc]
