"""`make docs` builds every page without a warning, and the pages load nothing from other hosts."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import jaxvllm
from jaxvllm.router.config import RouterConfig
from jaxvllm.server.config import ServerConfig
from tests.waiting import PATIENCE
from tools.docs_comments import comment_of
from tools.docs_hooks import outside, repository_path, site_path, target

ROOT = Path(__file__).parent.parent
# What a browser fetches by itself. A link that a reader follows is not among them.
FETCHED = {
    "audio": "src", "embed": "src", "iframe": "src", "img": "src", "input": "src", "link": "href", "object": "data",
    "script": "src", "source": "src", "track": "src", "video": "src",
}  # fmt: skip
URL_OF_CSS = re.compile(r"(?:url\(|@import)\s*[\"']?([^\"')\s;]+)")


class Page(HTMLParser):
    """Collects what a page fetches, what it links to, and its anchors."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value is not None}
        if FETCHED.get(tag) in values:
            self.fetched.append(values[FETCHED[tag]])
        self.fetched += [part.split()[0] for part in values.get("srcset", "").split(",") if part.strip()]
        self.fetched += URL_OF_CSS.findall(values.get("style", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if "id" in values:
            self.anchors.add(values["id"])


def lost(page: Page) -> Iterator[str]:
    """Yields what a page fetches from elsewhere, and the links to files that are not there."""
    for address in (*page.fetched, *page.links):
        parts = urlsplit(address)
        if parts.scheme == "data" or (parts.scheme and address not in page.fetched):
            continue
        if parts.scheme or parts.netloc or not (page.path.parent / unquote(parts.path)).exists():
            yield f"{page.path.name}: {address}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    # `-o`: this process's environment is as good as .venv, which may not be there.
    command = ["make", "docs", "-o", ".venv/.stamp", f"PY={sys.executable}", f"SITE={directory}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return directory


@pytest.mark.slow
def test_pages_are_whole_and_load_nothing_from_other_hosts(site: Path) -> None:
    # Only the server's root knows where the page for wrong addresses is shown.
    pages = [Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(pages) >= len(list((ROOT / "docs").rglob("*.md")))
    assert not [one for page in pages for one in lost(page)]
    for path in (*site.rglob("*.css"), *site.rglob("*.svg")):
        addresses = URL_OF_CSS.findall(path.read_text())
        assert not [address for address in addresses if not address.startswith(("data:", "#", "."))], path
    assert (site / "engine.svg").is_file()


@pytest.mark.slow
def test_the_reference_has_every_public_name_and_option(site: Path) -> None:
    anchors = {anchor for path in (site / "api").glob("*.html") for anchor in Page(path).anchors}
    names = {f"jaxvllm.{name}" for name in jaxvllm.__all__}
    names |= {f"jaxvllm.EngineConfig.{field.name}" for field in fields(jaxvllm.EngineConfig)}
    names |= {f"jaxvllm.server.config.ServerConfig.{field.name}" for field in fields(ServerConfig)}
    names |= {f"jaxvllm.router.config.RouterConfig.{field.name}" for field in fields(RouterConfig)}
    names |= {"jaxvllm.LLM.generate", "jaxvllm.AsyncLLM.generate", "jaxvllm.SamplingParams.temperature"}
    assert not names - anchors


def test_what_is_lost_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        '<script src="https://a.example/x.js"></script><link href="//b.example/y.css"><img src="gone.png">'
        '<img srcset="https://c.example/z.png 2x"><p style="background: url(https://d.example/w)"></p>'
        '<a href="https://fine.example"></a><a href="page.html#x"></a><a href="#y"></a><a href="nowhere.html"></a>'
        '<img src="data:image/png;base64,AA==">'
    )
    assert sorted(lost(Page(path))) == [
        "page.html: //b.example/y.css",
        "page.html: gone.png",
        "page.html: https://a.example/x.js",
        "page.html: https://c.example/z.png",
        "page.html: https://d.example/w",
        "page.html: nowhere.html",
    ]


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("docs/guides/kernel.md", "guides/kernel.md"),
        ("README.md", "repository/README.md"),
        ("jaxvllm/config.py", "repository/jaxvllm/config.py.md"),
        ("benchmarks/results/a.json", "repository/benchmarks/results/a.json"),
    ],
)
def test_every_file_has_one_place_on_the_site(path: str, there: str) -> None:
    assert site_path(path) == there
    assert repository_path(there) == path


def test_links_are_read_as_paths_in_the_repository() -> None:
    assert target("docs/index.md", "../README.md") == "README.md"
    assert target("README.md", "docs/kubernetes") == "docs/kubernetes/README.md"
    assert target("docs/index.md", "gone.md") is None
    files = outside(["docs/index.md"])
    # The README is linked from the index, and the file of figures from the README.
    assert "README.md" in files and any(file.startswith("benchmarks/results/") for file in files)
    assert not [file for file in files if file.startswith("docs/")]


def test_comments_document_fields() -> None:
    lines = [
        "class A:",
        "    a: int  # tokens",
        "    # One line,",
        "    # and another.",
        "    b: str | None = (",
        "",
        "    )",
    ]
    assert comment_of(lines, 2, 2) == "tokens"
    assert comment_of(lines, 5, 7) == "One line, and another."
    assert comment_of(["    a: int", "    b: int"], 2, 2) == ""
