"""Prometheus reads what happened, under vLLM's names; counters never go back, and no request is kept."""

import json
import re
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from prometheus_client.parser import text_string_to_metric_families

from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.engine.outputs import CompletionOutput, FinishReasonName, RequestMetrics, RequestOutput
from jaxvllm.server.metrics import histograms
from jaxvllm.server.metrics.histograms import RequestHistograms
from jaxvllm.server.metrics.prometheus import COUNTERS, EngineTotals, Metrics
from jaxvllm.worker import wire
from tests.server.metrics.engine_reports import FACTS, IDLE, STEP, Clock

ROOT = Path(__file__).parents[3]
DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA)
CUMULATIVE = SamplingParams(output_kind=RequestOutputKind.CUMULATIVE)
FINAL_ONLY = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
# What dashboards made for vLLM read, and of which kind it is there.
VLLM = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info",
    "counter": "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens request_success "
    "external_prefix_cache_queries external_prefix_cache_hits "
    "spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
    "spec_decode_num_accepted_tokens_per_pos",
    "histogram": "request_prompt_tokens request_generation_tokens iteration_tokens_total request_params_n "
    "request_max_num_generation_tokens request_params_max_tokens time_to_first_token_seconds "
    "inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds",
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(histograms, "time", clock)
    return clock


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics("jaxvllm", "demo")
    metrics.of_engine(0).on_start(1, FACTS)
    return metrics


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What Prometheus would store: values by name and labels, without the labels that all have."""
    text = metrics.render()[0].decode()
    return {
        (sample.name, frozenset(sample.labels.items() - {("model_name", "demo"), ("engine", "0")})): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"jaxvllm:{name}", frozenset(labels.items())]


def times(**more: float) -> RequestMetrics:
    """Arrived at 10, first scheduled at 10.25, first token at 11.25, unless told otherwise."""
    return RequestMetrics(**{"arrival_time": 10.0, "first_scheduled_time": 10.25, "first_token_time": 11.25} | more)


def part(num_tokens: int, reason: FinishReasonName | None = None, index: int = 0) -> CompletionOutput:
    return CompletionOutput(index, "", list(range(num_tokens)), finish_reason=reason)


def output(*parts: CompletionOutput, finished: bool = False, name: str = "one") -> RequestOutput:
    end = {"finished_time": 13.25} if finished else {}
    return RequestOutput(name, None, [1] * 7, list(parts), finished, times(**end))


def everything(metrics: Metrics) -> None:
    """Makes every metric have samples."""
    metrics.of_engine(0).on_start(1, FACTS)
    metrics.of_engine(0).on_pulse(wire.Pulse(replace(IDLE, max_loras=1), [STEP]))
    metrics.of_engine(0).on_output(output(part(3, "stop"), finished=True), FINAL_ONLY)
    metrics.on_http("/v1/models", 200)


# ---- names ----


def test_vllm_names_kinds_and_labels(metrics: Metrics) -> None:
    everything(metrics)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render()[0].decode())}
    for kind, names in VLLM.items():
        for name in names.split():
            family = families[f"jaxvllm:{name}"]
            assert family.type == kind, name
            assert all(s.labels["model_name"] == "demo" and s.labels["engine"] == "0" for s in family.samples), name
    assert {s.labels["finished_reason"] for s in families["jaxvllm:request_success"].samples} == {
        "stop",
        "length",
        "repetition",
        "abort",
        "error",
    }


# What each gateway asks for, with the labels that it reads. For Kubernetes' inference extension and llm-d, the protocol
# of model servers says it (docs/model-server-protocol.md in llm-d/llm-d-router), for vLLM's production-stack its
# scraper (src/vllm_router/stats/engine_stats.py).
GATEWAYS = {
    "inference extension": {
        "vllm:num_requests_waiting": (),
        "vllm:num_requests_running": (),
        "vllm:kv_cache_usage_perc": (),
        "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
    },
    "production-stack": {
        "vllm:num_requests_waiting": (),
        "vllm:num_requests_running": (),
        "vllm:gpu_cache_usage_perc": (),
        "vllm:gpu_prefix_cache_hits_total": (),
        "vllm:gpu_prefix_cache_queries_total": (),
    },
}


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_gateways_find_what_they_read(gateway: str) -> None:
    metrics = Metrics("vllm", "demo")
    metrics.of_engine(0).on_start(1, FACTS)
    stats = replace(IDLE, num_running=3, num_waiting=2, num_pages=40, num_pages_owned=10)
    metrics.of_engine(0).on_pulse(wire.Pulse(replace(stats, num_prefix_queries=90, num_prefix_hits=30), []))
    families = text_string_to_metric_families(metrics.render()[0].decode())
    found = {sample.name: sample for family in families for sample in family.samples}
    expected = {"waiting": 2, "running": 3, "usage_perc": 0.25, "hits_total": 30, "queries_total": 90, "info": 1}
    for name, labels in GATEWAYS[gateway].items():
        [value] = [value for end, value in expected.items() if name.endswith(f"_{end}")]
        assert found[name].value == value, name
        for label in labels:
            assert int(found[name].labels[label]) > 0, label


def test_the_prefix_is_of_all_names() -> None:
    metrics = Metrics("vllm", 'a "name"\n\\')
    everything(metrics)
    families = list(text_string_to_metric_families(metrics.render()[0].decode()))
    assert len(families) > 20
    assert all(family.name.startswith("vllm:") for family in families)
    assert all(sample.labels["model_name"] == 'a "name"\n\\' for family in families for sample in family.samples)
    with pytest.raises(ValueError, match="letters, digits and underscores alone, not 'a-b'"):
        Metrics("a-b", "demo")


def test_two_have_nothing_in_common(metrics: Metrics) -> None:
    everything(Metrics("jaxvllm", "demo"))
    assert value(metrics, "engine_starts_total") == 1
    assert value(metrics, "num_steps_total") == 0


def test_buckets_of_tokens_end_at_the_context_length(metrics: Metrics) -> None:
    metrics.of_engine(0).on_output(output(part(100, "length"), finished=True), replace(FINAL_ONLY, max_tokens=100_000))
    bounds = [dict(labels)["le"] for name, labels in samples(metrics) if name == "jaxvllm:request_prompt_tokens_bucket"]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]
    assert value(metrics, "request_generation_tokens_bucket", le="50.0") == 0
    assert value(metrics, "request_generation_tokens_bucket", le="100.0") == 1  # a bound is in its bucket
    assert value(metrics, "request_params_max_tokens_bucket", le="200.0") == 0
    assert value(metrics, "request_params_max_tokens_bucket", le="+Inf") == 1
    unknown = Metrics("jaxvllm", "demo")
    assert not [name for name, _ in samples(unknown) if "request_prompt_tokens" in name]


def test_dashboard_and_document_name_what_there_is(metrics: Metrics) -> None:
    everything(metrics)
    known = {name.removeprefix("jaxvllm:") for name, _ in samples(metrics)}
    dashboard = (ROOT / "docs/grafana.json").read_text()
    used = set(re.findall(r"\$\{prefix\}:(\w+)", dashboard))
    assert len(used) > 15
    assert not used - known
    assert not re.search(r"jaxvllm:|vllm:", dashboard), "without the variable"
    families = {
        f.name.removeprefix("jaxvllm:") + "_total" * (f.type == "counter")
        for f in text_string_to_metric_families(metrics.render()[0].decode())
    }
    document = (ROOT / "docs/metrics.md").read_text()
    assert set(re.findall(r"^\| `(\w+)", document, re.MULTILINE)) == families


def test_dashboard_is_whole() -> None:
    """Panels have their own ids and places, and what they ask is balanced; variables are declared."""
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "prefix"} <= variables
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for left, right in ("()", "{}", "[]"):
                assert expression.count(left) == expression.count(right), expression
            assert set(re.findall(r"\$\{?(\w+)", expression)) <= variables | {"__rate_interval"}


# ---- requests ----


def test_a_stream(metrics: Metrics, clock: Clock) -> None:
    params = replace(DELTA, max_tokens=50)
    for _ in range(3):
        metrics.of_engine(0).on_output(output(part(1)), params)
        clock.now += 0.03
    metrics.of_engine(0).on_output(output(part(2, "length"), finished=True), params)
    expected = {
        "time_to_first_token_seconds": (1.25, 1),
        "inter_token_latency_seconds": (0.09, 4),  # the last two share theirs
        "request_time_per_output_token_seconds": (2 / 4, 1),
        "e2e_request_latency_seconds": (3.25, 1),
        "request_queue_time_seconds": (0.25, 1),
        "request_prefill_time_seconds": (1.0, 1),
        "request_decode_time_seconds": (2.0, 1),
        "request_inference_time_seconds": (3.0, 1),
        "request_prompt_tokens": (7, 1),
        "request_generation_tokens": (5, 1),
        "request_max_num_generation_tokens": (5, 1),
        "request_params_max_tokens": (50, 1),
        "request_params_n": (1, 1),
    }
    got = samples(metrics)
    for name, (total, count) in expected.items():
        assert got[f"jaxvllm:{name}_sum", frozenset()] == pytest.approx(total), name
        assert got[f"jaxvllm:{name}_count", frozenset()] == count, name
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.01") == 0
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.025") == 2
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.05") == 4


@pytest.mark.parametrize("params", [DELTA, CUMULATIVE, FINAL_ONLY], ids=lambda params: params.output_kind.name)
def test_completions_are_counted_once(metrics: Metrics, params: SamplingParams) -> None:
    """The first of two ends after 2 tokens, the second after 4, whatever the caller sees of them."""
    done = part(2, "stop")
    outputs = {
        "DELTA": [[part(2), part(2, index=1)], [part(0, "stop"), part(1, index=1)], [part(1, "length", index=1)]],
        "CUMULATIVE": [[part(2), part(2, index=1)], [done, part(3, index=1)], [done, part(4, "length", index=1)]],
        "FINAL_ONLY": [[done, part(4, "length", index=1)]],
    }[params.output_kind.name]
    for parts in outputs[:-1]:
        metrics.of_engine(0).on_output(output(*parts), replace(params, n=2))
    metrics.of_engine(0).on_output(output(*outputs[-1], finished=True), replace(params, n=2))
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_generation_tokens_sum") == 6
    assert value(metrics, "request_generation_tokens_count") == 2
    assert value(metrics, "request_max_num_generation_tokens_sum") == 4
    assert value(metrics, "request_params_n_sum") == 2
    assert value(metrics, "e2e_request_latency_seconds_count") == 1


def test_tokens_that_nobody_saw_come_count_their_mean(metrics: Metrics) -> None:
    metrics.of_engine(0).on_output(output(part(5, "stop"), finished=True), FINAL_ONLY)
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(2.0)
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.4") == 0
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.5") == 4


def test_one_token_has_no_time_after_the_first(metrics: Metrics) -> None:
    metrics.of_engine(0).on_output(output(part(1, "length"), finished=True), replace(FINAL_ONLY, max_tokens=None))
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "inter_token_latency_seconds_count") == 0
    assert value(metrics, "request_params_max_tokens_count") == 0


def test_each_completion_of_a_lost_request_counts_once() -> None:
    requests = RequestHistograms()
    three = replace(DELTA, n=3)
    requests.on_output(output(part(1, "stop"), finished=False, name="r"), three)
    requests.on_loss("r", three, "abort")
    requests.on_loss("never seen", three, "error")
    assert requests.num_ended == {"stop": 1, "length": 0, "repetition": 0, "abort": 2, "error": 3}


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["part", "end", "loss"])), max_size=40))
def test_no_request_is_kept(events: list[tuple[int, str]]) -> None:
    requests = RequestHistograms()
    live: set[int] = set()
    for index, event in events:
        if event == "loss":
            requests.on_loss(str(index), DELTA, "abort")
        else:
            is_end = event == "end"
            news = output(part(1, "stop" if is_end else None), finished=is_end, name=str(index))
            requests.on_output(news, DELTA)
        live = live | {index} if event == "part" else live - {index}
        assert len(requests._live) == len(live)
    ends = [event for _, event in events]
    counts = {"stop": ends.count("end"), "abort": ends.count("loss")}
    assert requests.num_ended == dict.fromkeys(("length", "repetition", "error"), 0) | counts


# ---- the engine ----


def test_gauges_are_of_now(metrics: Metrics) -> None:
    metrics.of_engine(0).on_pulse(wire.Pulse(replace(IDLE, num_running=3, num_waiting=2, num_pages_owned=20), []))
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_perc") == 0.25
    assert value(metrics, "cache_config_info", block_size="16", num_gpu_blocks="80") == 1
    metrics.of_engine(0).on_start(2, FACTS)
    assert value(metrics, "num_requests_running") == 0
    assert value(metrics, "kv_cache_usage_perc") == 0
    assert value(metrics, "engine_starts_total") == 2


def test_adapters_are_labels_of_the_time(metrics: Metrics) -> None:
    assert "jaxvllm:lora_requests_info" not in {name for name, _ in samples(metrics)}
    stats = replace(IDLE, max_loras=2, running_adapters=("a", "b"), waiting_adapters=("c",))
    metrics.of_engine(0).on_pulse(wire.Pulse(stats, []))
    labels = {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert value(metrics, "lora_requests_info", **labels) > 1e9, "gateways take the newest"


def test_steps(metrics: Metrics) -> None:
    metrics.of_engine(0).on_pulse(wire.Pulse(IDLE, [STEP, replace(STEP, replica=1, num_prefill=0, bucket_tokens=4)]))
    assert value(metrics, "iteration_tokens_total_sum") == 15
    assert value(metrics, "iteration_tokens_total_bucket", le="8.0") == 1
    assert value(metrics, "step_host_seconds_bucket", le="0.0005") == 2
    assert value(metrics, "step_device_seconds_sum") == pytest.approx(0.04)


def test_a_burst_counts_as_the_decode_steps_that_it_is(metrics: Metrics) -> None:
    metrics.of_engine(0).on_pulse(wire.Pulse(IDLE, [replace(STEP, num_prefill=0, bucket_tokens=4, num_steps=5)]))
    assert value(metrics, "iteration_tokens_total_sum") == 15
    assert value(metrics, "iteration_tokens_total_count") == 5
    assert value(metrics, "step_host_seconds_bucket", le="0.0001") == 5
    assert value(metrics, "step_device_seconds_sum") == pytest.approx(0.02)


def test_answers_of_other_processes_count(metrics: Metrics) -> None:
    other = Metrics("jaxvllm", "demo")
    metrics.on_http("/v1/models", 200)
    for _ in range(3):
        other.on_http("/v1/models", 200)
    other.on_http("/v1/models", 404)
    with other.http_stream():
        metrics.count_http(7, other.http_counts())
        metrics.count_http(7, other.http_counts())  # all that it has answered, not what is new
    assert value(metrics, "http_requests_total", path="/v1/models", status="200") == 4
    assert value(metrics, "num_http_streams") == 1
    metrics.http_ended(7)
    assert value(metrics, "http_requests_total", path="/v1/models", status="404") == 1
    assert value(metrics, "num_http_streams") == 0


def test_engine_counters(metrics: Metrics) -> None:
    counts = {name: number for number, name in enumerate(COUNTERS, 1)}
    metrics.of_engine(0).on_pulse(wire.Pulse(replace(IDLE, **counts), []))
    names = {
        "num_steps": "num_steps",
        "num_prompt_tokens": "prompt_tokens",
        "num_output_tokens": "generation_tokens",
        "num_preemptions": "num_preemptions",
        "num_prefix_queries": "prefix_cache_queries",
        "num_prefix_hits": "prefix_cache_hits",
        "num_external_queries": "external_prefix_cache_queries",
        "num_external_hits": "external_prefix_cache_hits",
        "num_failed_loads": "kv_failed_loads",
        "num_saved_pages": "kv_saved_pages",
        "num_programs": "num_compiles",
        "num_bucket_tokens": "bucket_tokens",
        "num_padding_tokens": "padding_tokens",
        "num_ended_tokens": "ended_row_tokens",
        "num_verifications": "spec_decode_num_drafts",
        "num_draft_tokens": "spec_decode_num_draft_tokens",
        "num_accepted_tokens": "spec_decode_num_accepted_tokens",
        "num_expert_placements": "expert_placements",
        "mean_expert_load": "expert_load_mean",
        "most_expert_load": "expert_load_most",
    }
    assert {name: value(metrics, f"{names[name]}_total") for name in COUNTERS} == counts


@given(
    st.lists(
        st.one_of(
            st.fixed_dictionaries({name: st.integers(0, 9) for name in COUNTERS}),
            st.sampled_from(["restart", "forgets preemptions"]),
        )
    )
)
def test_counters_never_go_back(events: list[dict[str, int] | str]) -> None:
    """An engine counts on, starts anew, or forgets one counter: what is told is what was counted in all its lives."""
    totals = EngineTotals()
    engine, counted = IDLE, dict.fromkeys(COUNTERS, 0)
    for event in events:
        if isinstance(event, dict):
            engine = replace(engine, **{name: getattr(engine, name) + more for name, more in event.items()})
            counted = {name: counted[name] + more for name, more in event.items()}
        elif event == "restart":
            engine = IDLE
            totals.restart()
            assert {name: totals[name] for name in COUNTERS} == counted
        else:
            engine = replace(engine, num_preemptions=0)
        totals.update(engine)
        assert {name: totals[name] for name in COUNTERS} == counted


def test_accepted_drafts_by_position(metrics: Metrics) -> None:
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    assert f"jaxvllm:{name}" not in {key for key, _ in samples(metrics)}, "an engine without drafts has no positions"
    metrics.of_engine(0).on_pulse(wire.Pulse(replace(IDLE, num_accepted_per_pos=(5, 3, 0)), []))
    metrics.of_engine(0).on_pulse(wire.Pulse(replace(IDLE, num_accepted_per_pos=(7, 3, 1)), []))
    assert [value(metrics, name, position=str(position)) for position in range(3)] == [7, 3, 1]
    metrics.of_engine(0).on_start(2, FACTS)
    assert [value(metrics, name, position=str(position)) for position in range(3)] == [7, 3, 1]
    metrics.of_engine(0).on_pulse(wire.Pulse(replace(IDLE, num_accepted_per_pos=(9, 0, 0)), []))
    assert [value(metrics, name, position=str(position)) for position in range(3)] == [16, 3, 1]
    assert [key for key, _ in samples(metrics)].count(f"jaxvllm:{name}") == 3


def test_a_restart_that_overtakes_the_last_pulse(metrics: Metrics) -> None:
    """The new engine has counted more when it is first heard than the old one ever did: only `on_start` tells."""
    metrics.of_engine(0).on_pulse(wire.Pulse(replace(IDLE, num_output_tokens=5), []))
    metrics.of_engine(0).on_start(2, FACTS)
    metrics.of_engine(0).on_pulse(wire.Pulse(replace(IDLE, num_output_tokens=8), []))
    assert value(metrics, "generation_tokens_total") == 13


# ---- HTTP ----


def test_answers_and_streams(metrics: Metrics) -> None:
    for status in (200, 200, 400):
        metrics.on_http("/v1/completions", status)
    assert value(metrics, "http_requests_total", path="/v1/completions", status="200") == 2
    assert value(metrics, "http_requests_total", path="/v1/completions", status="400") == 1
    with pytest.raises(ConnectionError), metrics.http_stream():
        assert value(metrics, "num_http_streams") == 1
        raise ConnectionError
    assert value(metrics, "num_http_streams") == 0
