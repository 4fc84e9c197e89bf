"""Puts what the documents link to outside `docs` on the web site too: `make docs`.

On GitHub and in an editor, links are paths in the repository. mkdocs knows files of `docs` alone. So every linked file
outside goes below `repository/` on the site, and links are changed accordingly. Sources become pages. What such a page
links to is treated likewise.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS, OUTSIDE = "docs/", "repository/"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|[#/])([^)#\s]+)")
_SOURCE = ".py"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds every file outside `docs` that a page links to."""
    pages = [DOCS + file.src_uri for file in files.documentation_pages()]
    for path in outside(pages):
        if path.endswith(_SOURCE):
            content = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n```python\n{(ROOT / path).read_text()}\n```\n"
            file = File.generated(config, site_path(path), content=content)
        else:
            file = File.generated(config, site_path(path), abs_src_path=str(ROOT / path))
        file.inclusion = InclusionLevel.NOT_IN_NAV  # without a complaint if the navigation has no place for it
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Changes the links of a page. Links that lead nowhere stay, and mkdocs reports them."""
    here = repository_path(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path = target(here, match[1])
        return match[0] if path is None else posixpath.relpath(site_path(path), folder or ".")

    return markdown if here.endswith(_SOURCE) else _LINK.sub(moved, markdown)


def outside(pages: Iterable[str]) -> list[str]:
    """Returns the files outside `docs` that pages link to, and that those which are pages link to, and so on."""
    seen, todo = set(pages), list(pages)
    while todo:
        new = set(linked(todo.pop())) - seen
        seen |= new
        todo += new
    return sorted(path for path in seen if not path.startswith(DOCS))


def linked(page: str) -> Iterator[str]:
    """Yields the paths in the repository that a page links to, without those that lead nowhere."""
    if page.endswith(".md"):
        paths = (target(page, link) for link in _LINK.findall((ROOT / page).read_text()))
        yield from (path for path in paths if path is not None)


def target(page: str, link: str) -> str | None:
    """Returns the path in the repository that `link` on `page` means, or None if there is no such file.

    A folder means its README.md.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    path = posixpath.join(path, "README.md") if (ROOT / path).is_dir() else path
    return path if (ROOT / path).is_file() else None


def site_path(path: str) -> str:
    """Returns the place on the site of a file of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return OUTSIDE + path + (".md" if path.endswith(_SOURCE) else "")


def repository_path(site_path: str) -> str:
    """Is the opposite of `site_path`."""
    if not site_path.startswith(OUTSIDE):
        return DOCS + site_path
    path = site_path.removeprefix(OUTSIDE)
    return path.removesuffix(".md") if path.endswith(f"{_SOURCE}.md") else path
