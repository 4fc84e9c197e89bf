"""docs/http.md and `/docs` say what the application does."""

import re

import pytest

from jaxvllm.server.http_doc import EXAMPLES, STREAMS
from tools import http_doc


def test_the_file_is_current():
    assert http_doc.FILE.read_text(encoding="utf-8") == http_doc.text(), "run python -m tools.http_doc"


def test_every_link_leads_somewhere():
    text = http_doc.FILE.read_text(encoding="utf-8")
    titles = {title.lower() for title in re.findall(r"^#+ (\w+)$", text, re.M)}
    links = set(re.findall(r"\]\(#(\w+)\)", text))
    assert links <= titles
    assert len(links) > 20


def test_every_endpoint_is_there_and_no_status_of_others(server):
    document = server.client.get("/openapi.json").json()
    text = http_doc.FILE.read_text(encoding="utf-8")
    for path, methods in document["paths"].items():
        for method, endpoint in methods.items():
            assert f"## {method.upper()} {path}\n" in text
            assert "422" not in endpoint["responses"]
            assert endpoint["description"]


@pytest.mark.parametrize("path", EXAMPLES)
def test_every_example_works(server, path):
    body = EXAMPLES[path]
    assert server.post(path, **body).status_code == 200
    if path in STREAMS:
        assert server.events(path, **body)


def test_the_page_needs_nothing_from_elsewhere(server):
    response = server.client.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in response.text
    assert not re.search(r"(src|href)=\"(?!#)", response.text)
    assert response.text.count("<table>") == response.text.count("</table>") > 20
    anchors = set(re.findall(r'id="([^"]+)"', response.text))
    assert set(re.findall(r'href="#([^"]+)"', response.text)) <= anchors
