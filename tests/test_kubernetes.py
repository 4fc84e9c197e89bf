"""The manifests of docs/kubernetes are valid, fit together, and start a server that exists."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxvllm.cli import serve
from jaxvllm.config import EngineConfig
from jaxvllm.core.kv_events_config import KVEventsConfig
from jaxvllm.server.config import ServerConfig
from jaxvllm.worker.data_parallel_config import DataParallelConfig
from jaxvllm.worker.engine_process import STOP_SECONDS

FOLDER = Path(__file__).parents[1] / "docs/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
VARIANTS = ("gpu", "tpu")
# Kinds that Kubernetes itself has, and where `lightkube_models` declares them.
MODELS = {"Deployment": "apps_v1", "Service": "core_v1", "NetworkPolicy": "networking_v1"}
# Of the other kinds, the fields of `spec` and of what is in it, by the API reference of each.
FIELDS = {
    "InferencePool": {"selector", "targetPorts", "endpointPickerRef"},
    "HTTPRoute": {"parentRefs", "hostnames", "rules"},
    "endpointPickerRef": {"group", "kind", "name", "port", "failureMode"},
    "rules": {"name", "matches", "filters", "backendRefs", "timeouts"},
    "backendRefs": {"group", "kind", "name", "namespace", "port", "weight", "filters"},
}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def by_kind(name: str) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in documents(FOLDER / f"{name}.yaml")}


def pod_of(variant: str) -> dict[str, Any]:
    return by_kind(variant)["Deployment"]["spec"]["template"]


def container_of(variant: str) -> dict[str, Any]:
    [container] = pod_of(variant)["spec"]["containers"]
    return container


def configs_of(variant: str) -> tuple[EngineConfig, ServerConfig, DataParallelConfig]:
    return serve._configs(serve._parser().parse_args(container_of(variant)["args"]))


def as_the_schema_reads(document: dict[str, Any]) -> dict[str, Any]:
    """What is left of a manifest where names that the schema does not have are dropped. Wrong types are errors."""
    kind = document["kind"]
    model = getattr(importlib.import_module(f"lightkube.models.{MODELS[kind]}"), kind)
    return model.from_dict(document).to_dict()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_manifests_are_what_the_schema_says(path: Path) -> None:
    for document in documents(path):
        assert document["metadata"]["name"]
        if document["kind"] in MODELS:
            assert as_the_schema_reads(document) == document
        else:
            assert document["spec"].keys() <= FIELDS[document["kind"]]


def test_a_wrong_name_and_a_wrong_type_are_seen() -> None:
    document = by_kind("gpu")["Deployment"]
    document["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    assert as_the_schema_reads(document) != document
    document["spec"]["replicas"] = "two"
    with pytest.raises(ValueError, match="replicas"):
        as_the_schema_reads(document)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_command_line_is_valid(variant: str) -> None:
    engine, server, _ = configs_of(variant)
    container = container_of(variant)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (server.host, server.port, server.metrics_prefix) == ("0.0.0.0", ports["http"], "vllm")
    assert engine.kv_events is not None
    endpoint, replay = engine.kv_events.of_replica(0)
    assert (endpoint, replay) == (f"tcp://*:{ports['kv-events']}", f"tcp://*:{ports['kv-replay']}")
    assert engine.kv_events.topic == f"kv@$(POD_IP):{server.port}@{server.served_model_name[0]}"
    assert "POD_IP" in [variable["name"] for variable in container["env"]]
    [devices] = [count for name, count in container["resources"]["limits"].items() if name.endswith(variant)]
    assert engine.mesh_shape.num_devices == int(devices)
    assert engine.mesh_shape.data == 1, "the ports of other replicas are not declared"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(Path(engine.model).parent), str(engine.cache_directory.parent)} <= mounts  # type: ignore[union-attr]


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_what_there_is_and_need_no_key(variant: str) -> None:
    container = container_of(variant)
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/ready", "liveness": "/live", "readiness": "/ready"}
    assert all(container[f"{name}Probe"]["httpGet"]["port"] == "http" for name in paths)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pod_has_the_time_to_drain(variant: str) -> None:
    _, server, _ = configs_of(variant)
    pause = container_of(variant)["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = pod_of(variant)["spec"]["terminationGracePeriodSeconds"]
    assert grace >= pause + server.shutdown_timeout + STOP_SECONDS


def test_selectors_find_the_pods() -> None:
    pool, route = (by_kind("gateway")[kind] for kind in ("InferencePool", "HTTPRoute"))
    service, policy = (by_kind("service")[kind] for kind in ("Service", "NetworkPolicy"))
    selectors = [
        pool["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        policy["spec"]["podSelector"]["matchLabels"],
    ]
    for variant in VARIANTS:
        deployment, labels = by_kind(variant)["Deployment"], pod_of(variant)["metadata"]["labels"]
        for selector in (*selectors, deployment["spec"]["selector"]["matchLabels"]):
            assert selector.items() <= labels.items()
        ports = {port["name"]: port["containerPort"] for port in container_of(variant)["ports"]}
        assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
        allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert allowed == ports.keys()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
    others = [rule for rule in policy["spec"]["ingress"] if {"port": "http"} not in rule["ports"]]
    assert all(rule["from"] for rule in others), "everybody may read the tokens of prompts"
    [rule] = route["spec"]["rules"]
    [backend] = rule["backendRefs"]
    group, _ = pool["apiVersion"].split("/")
    assert backend == {"group": group, "kind": "InferencePool", "name": pool["metadata"]["name"]}
    assert rule.keys() <= FIELDS["rules"]
    assert pool["spec"]["endpointPickerRef"].keys() <= FIELDS["endpointPickerRef"]
    assert int(rule["timeouts"]["request"].removesuffix("s")) > configs_of("gpu")[1].request_timeout


def test_variants_differ_only_in_the_device() -> None:
    texts = [
        re.sub("gpu|tpu", "DEVICE", json.dumps(_without_devices(by_kind(name)["Deployment"]))) for name in VARIANTS
    ]
    assert texts[0] == texts[1]


def _without_devices(deployment: dict[str, Any]) -> dict[str, Any]:
    spec = deployment["spec"]["template"]["spec"]
    for name in ("nodeSelector", "tolerations"):
        spec.pop(name, None)
    limits = spec["containers"][0]["resources"]["limits"]
    spec["containers"][0]["resources"]["limits"] = {"memory": limits["memory"]}
    return deployment


def test_the_config_of_events_is_vllms() -> None:
    given = next(arg for arg in container_of("gpu")["args"] if arg.startswith("--kv-events-config="))
    assert json.loads(given.partition("=")[2]).keys() <= vars(KVEventsConfig()).keys()
