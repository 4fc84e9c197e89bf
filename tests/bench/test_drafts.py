"""The drafts of a run are those that the server counted meanwhile, and are told as vLLM tells them."""

import json
from dataclasses import replace

import pytest

from jaxvllm.bench import benchmark
from jaxvllm.bench.drafts import DraftTotals
from jaxvllm.bench.offline.drafts import drafts_between
from jaxvllm.cli.bench import main
from jaxvllm.server.metrics.prometheus import Metrics
from jaxvllm.worker import wire
from tests.server.metrics.engine_reports import FACTS, IDLE

BEFORE = replace(IDLE, num_verifications=10, num_draft_tokens=30, num_accepted_tokens=6, num_accepted_per_pos=(4, 1, 1))
AFTER = replace(
    IDLE, num_verifications=210, num_draft_tokens=530, num_accepted_tokens=256, num_accepted_per_pos=(154, 61, 41)
)
GAINED = DraftTotals(drafts=200, draft_tokens=500, accepted_tokens=250, accepted_per_pos=(150, 60, 40))
TABLE = """\
---------------Speculative Decoding---------------
Acceptance rate (%):                     50.00
Acceptance length:                       2.25
Drafts:                                  200
Draft tokens:                            500
Accepted tokens:                         250
Per-position acceptance (%):
  Position 0:                            75.00
  Position 1:                            30.00
  Position 2:                            20.00
==================================================
"""
# As vLLM answers, for two engines.
VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.2e+02
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7583e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 2.0
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
"""


def told(stats) -> str:
    metrics = Metrics("any_prefix", 'a "model"')
    metrics.of_engine(0).on_start(1, FACTS)
    metrics.of_engine(0).on_pulse(wire.Pulse(stats, []))
    return metrics.render()[0].decode()


def test_reads_what_vllm_and_our_own_server_say():
    assert DraftTotals.read(VLLM) == DraftTotals(123, 9, 4, (5, 1))
    assert DraftTotals.read(told(BEFORE)) == DraftTotals(10, 30, 6, (4, 1, 1))
    assert DraftTotals.read(told(IDLE)) == DraftTotals.read("") == DraftTotals(0, 0, 0, ())


def test_a_run_has_what_was_counted_since():
    assert DraftTotals.read(told(AFTER)).since(DraftTotals.read(told(BEFORE))) == GAINED
    assert drafts_between(BEFORE, AFTER) == GAINED
    assert drafts_between(IDLE, BEFORE).accepted_per_pos == (4, 1, 1), "positions are not told before the first pulse"


def test_the_line_and_the_record():
    assert GAINED.line() == (
        "Drafts: 50.0% of 500 draft tokens accepted, acceptance length 2.25, 200 drafts, "
        "by position 75.0%, 30.0%, 20.0%"
    )
    assert GAINED.record() == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.25,
        "spec_decode_num_drafts": 200,
        "spec_decode_draft_tokens": 500,
        "spec_decode_accepted_tokens": 250,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.3, 0.2],
    }


@pytest.mark.parametrize("speculates", [True, False])
def test_the_table_of_a_server_that_speculates_ends_with_its_drafts(speculates, server, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "SETTLE", 0.0)
    server.metrics = [told(BEFORE), told(AFTER)] if speculates else [told(IDLE), told(IDLE)]
    sizes = ["--random-input-len", "8", "--random-output-len", "6", "--random-vocab-size", "50", "--num-prompts", "4"]
    saved = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "all.json"]
    assert main(["serve", "--base-url", server.base_url, "--disable-tqdm", *sizes, *saved]) == 0
    table = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + "\n"
    result = json.loads((tmp_path / "all.json").read_text())
    assert table.endswith(TABLE) is speculates
    assert ("Speculative" in table) is speculates
    assert ("spec_decode_acceptance_length" in result) is speculates
    if speculates:
        assert GAINED.record().items() <= result.items()
    assert not server.metrics, "it was asked before and after"
