"""The time of a program that several replicas ran together."""

from jaxvllm.engine.decode_pace import DecodeTime


def test_replicas_with_fewer_rows_do_not_keep_a_time_from_counting() -> None:
    """Only times of the most rows are kept, so that the pace of fewer rows may stay unknown for ever."""
    fewer = DecodeTime(7, 1, 3, 0.25, 2.5, is_paced=False, is_blind=False)
    most = DecodeTime(8, 1, 3, 0.5, 1.0, is_paced=True, is_blind=False)
    for times in ([fewer, most], [most, fewer]):
        assert DecodeTime.joined(times) == DecodeTime(8, 1, 3, 0.25, 1.7, is_paced=True, is_blind=False)
