"""`jaxvllm plan`, as a user types it."""

import json
import re
from pathlib import Path

import pytest

from jaxvllm.cli.plan import main
from jaxvllm.planner import capacity_plan as planning
from jaxvllm.planner.compiler import Findings, Refusal, StepFindings
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.hlo import Collective
from tests.commands import exit_code_of

MIB = 2**20
COLLECTIVES = (Collective("all-reduce", 65, 2 * MIB, False), Collective("all-to-all", 2, 16 * MIB, True))


def compiled(deployment: Deployment) -> Findings:
    """What a compiler would find, without its minute."""
    shapes = {"largest": (2048, 256), "decode": (256, 256)}
    steps = {
        name: StepFindings(tokens, rows, 12.3, 0, 300 * MIB, 290 * MIB, 0, COLLECTIVES if deployment.size > 1 else ())
        for name, (tokens, rows) in shapes.items()
    }
    return Findings(**steps, pool_bytes=0, versions={"jax": "0.11.2"})


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(planning, "compile_in_child", compiled)


@pytest.mark.usefixtures("compiler")
def test_the_report_of_a_model_that_fits(capsys):
    assert main(["--model", "llama-3.1-8b-instruct", "--device", "v5e", "--mesh", "2x8"]) == 0
    out = capsys.readouterr().out
    for line in (
        "meta-llama/Llama-3.1-8B on 2x8 v5e: fits",
        "  8.03 billion parameters, bfloat16, attention by tpu",
        "  weights         1.87",
        "  step            0.29   2048 tokens x 256 rows: temporaries and outputs",
        "  in all         15.75",
        "      65 all-reduce              2.0 MiB each    130.0 MiB in all",
        "       2 all-to-all             16.0 MiB each     32.0 MiB in all   if a row samples or wants logprobs",
        "compiled in 12.3 and 12.3 s here (jax 0.11.2)",
    ):
        assert line in out.splitlines()
    assert "a floor by published rates, not a forecast" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("  decode, ", "  prefill, "))]
    assert [row[1] for row in rows] == ["1", "8", "32", "64", "128", "256", "2048"]
    for row in rows:
        memory, compute, links, seconds, rate, of_both = (float(cell.replace(",", "")) for cell in row[-6:])
        assert seconds == pytest.approx(max(memory, compute) + links, abs=2e-3)
        assert rate == pytest.approx(int(row[1]) / seconds * 1e3, rel=2e-3)
        assert of_both == pytest.approx(2 * rate, rel=1e-3)


@pytest.mark.usefixtures("compiler")
def test_the_report_of_stages(capsys):
    assert main(["--model", "gemma-2-27b", "--device", "v5p", "--mesh", "2x1x4"]) == 0
    out = capsys.readouterr().out
    assert "gemma-2-27b on 2x1x4 v5p: fits" in out
    # In each stage there is one layer with a window more, or one without.
    assert "  stages differ: they have 23, 23 layers, and 0.00 GiB of the weights' memory and " in out
    assert "  links are those within a stage" in out
    assert main(["--model", "Llama-3.1-8B", "--device", "v5e", "--mesh", "4x1x8"]) == 2
    assert "mesh 4x1x8 has 32 devices to a replica, more than the 16 that can be planned" in capsys.readouterr().err


@pytest.mark.usefixtures("compiler")
def test_json_has_all_of_it(capsys):
    argv = ["--model", "Llama-3.1-8B", "--device", "v5e", "--mesh", "1x8", "--json"]
    assert main([*argv, "--context", "100", "--request-tokens", "1000"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["advice"] == "" and plan["mesh"] == {"data": 1, "model": 8, "stages": 1}
    memory = plan["memory"]
    assert sum(memory[part] for part in ("weights", "state", "step", "kv", "unused")) == memory["total"]
    assert memory["num_requests"] == memory["num_tokens"] // 16 // 63, "pages of 16"
    assert plan["findings"]["decode"]["collectives"][0]["kind"] == "all-reduce"
    assert plan["decode"][0]["tokens_per_second"] > 0 and plan["context"] == 100


@pytest.mark.usefixtures("compiler")
def test_the_model_may_stand_without_a_flag_as_in_serve(capsys):
    assert main(["Llama-3.2-1B", "--device", "v5e"]) == 0
    assert "Llama-3.2-1B on 1x1 v5e: fits" in capsys.readouterr().out
    assert main(["Llama-3.2-1B", "--model", "Llama-3.1-8B", "--device", "v5e"]) == 2
    assert "the model is Llama-3.2-1B and --model Llama-3.1-8B: give one" in capsys.readouterr().err


def test_a_model_that_does_not_fit_names_a_mesh_that_would(capsys):
    # Nothing is compiled: the weights alone are too many.
    assert main(["--model", "Llama-3.1-70B", "--device", "v6e"]) == 1
    captured = capsys.readouterr()
    assert "Llama-3.1-70B on 1x1 v6e: does not fit" in captured.out
    assert "missing" in captured.out and "roofline" not in captured.out
    assert "does not fit on 1x1 v6e: about 1x8 of v6e would hold it" in captured.err
    assert captured.err.count("\n") == 1
    assert main(["--model", "Llama-3.1-70B", "--device", "v5e", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"] is None
    assert "about 1x16 of v5e would hold it" in captured.err and "plan that mesh to be sure" in captured.err


def test_virtual_devices_are_no_larger_when_they_are_more(capsys, monkeypatch):
    monkeypatch.setattr("jaxvllm.planner.target._host_bytes_available", lambda: 2**30)
    assert main(["--model", "Llama-3.2-1B", "--device", "cpu", "--mesh", "2x8"]) == 1
    assert "share the memory of this machine: choose a smaller model" in capsys.readouterr().err


@pytest.mark.usefixtures("compiler")
def test_devices_of_one_chip_need_no_links(capsys):
    assert main(["--model", "Llama-3.2-1B", "--device", "v7x", "--mesh", "1x2"]) == 0
    assert "no links: a replica is one chip" in capsys.readouterr().out


def test_what_a_step_takes_counts(capsys, monkeypatch):
    # Weights of 15 GiB in 22.5, of which 20.2 may be taken.
    argv = ["--model", "Llama-3.1-8B", "--device", "l4"]
    monkeypatch.setattr(planning, "compile_in_child", compiled)
    assert main(argv) == 0
    small = compiled

    def hungry(deployment: Deployment) -> Findings:
        found = small(deployment)
        object.__setattr__(found.largest, "step_bytes", 6 * 2**30)
        return found

    monkeypatch.setattr(planning, "compile_in_child", hungry)
    assert main(argv) == 1
    assert "about 1x2 of l4 would hold it (with this step's temporaries)" in capsys.readouterr().err
    monkeypatch.setattr(planning, "compile_in_child", lambda deployment: Refusal("memory", "RESOURCE_EXHAUSTED"))
    assert main(argv) == 1
    assert "about 1x2 of l4" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "code"), [("usage", 2), ("compiler", 1)])
def test_a_refusal_is_one_line(kind, code, capsys, monkeypatch):
    monkeypatch.setattr(planning, "compile_in_child", lambda deployment: Refusal(kind, "no compiler for v5e"))
    assert main(["--model", "Llama-3.2-1B", "--device", "v5e"]) == code
    captured = capsys.readouterr()
    assert captured.err == "jaxvllm plan: no compiler for v5e\n" and not captured.out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--mesh", "1x32", "--model", "Llama-3.1-70B"], "mesh 1x32 has 32 devices to a replica, more than the 16"),
        (["--model", "~nouser/x"], "give the whole path"),
        (["--model", "Lama-3.1-8B"], "did you mean meta-llama/Llama-3.1-8B"),
        (["--device", "h300"], "'h300': known are v5e"),
        (["--mesh", "8"], "mesh '8' is not DxM"),
        (["--mesh", "0x1"], "0x1"),
        (["--mesh", "1x9"], "1x1, 1x2, 1x4"),
        (
            ["--memory-utilization", "2"],
            "memory-utilization: must be a number from 0.001 to 1, not 2",
        ),
        (["--request-tokens", "0"], "--request-tokens: must be an integer from 1 to"),
        (["--context", "999999"], "--context must be between"),
        (["--plot", "memory.pdf"], "must be a .png"),
        (["--plot", "/no/such/place/memory.png"], "must be a .png file in a directory that exists"),
    ],
)
def test_mistakes_cost_one_line_and_exit_code_2(argv, said, capsys):
    assert exit_code_of(main, ["--model", "Llama-3.1-8B", "--device", "v5e", *argv]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1 and not captured.out


@pytest.mark.usefixtures("compiler")
def test_the_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    assert main(["--model", "Llama-3.1-8B", "--device", "v5e", "--mesh", "1x8", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_is_refused_first(capsys, monkeypatch):
    monkeypatch.setattr("jaxvllm.planner.plot.find_spec", lambda name: None)
    assert main(["--model", "Llama-3.1-8B", "--device", "v5e", "--plot", "memory.png"]) == 2
    assert re.search("pip install .*matplotlib>=", capsys.readouterr().err)
