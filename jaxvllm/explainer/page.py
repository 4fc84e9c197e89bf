"""Reports as one HTML page. The playground's own modules draw them, so that both look the same."""

import html
import re
from pathlib import Path

_HERE = Path(__file__).parent
_PLAYGROUND = _HERE.parent / "server" / "playground"
# In the order in which they need each other: in one script, they import nothing.
_SCRIPTS = (_PLAYGROUND / "dom.js", _PLAYGROUND / "explanation.js", _HERE / "page.js")
_STYLES = (_HERE / "page.css", _PLAYGROUND / "explanation.css")
# Nothing is loaded, whatever a model's text says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"


def page(data: bytes, fallback: str) -> str:
    """Returns the page of a report in JSON. Browsers without scripts show `fallback`."""
    # In a script element only `<` could end the data; JSON may write it as an escape.
    safe = data.decode().replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>One request, step by step</title>
<style>
{"".join(path.read_text(encoding="utf-8") for path in _STYLES)}</style>
</head>
<body>
<main id="report"></main>
<noscript><pre>{html.escape(fallback)}</pre></noscript>
<script id="data" type="application/json">{safe}</script>
<script type="module">
{"".join(map(_inlined, _SCRIPTS))}</script>
</body>
</html>
"""


def _inlined(path: Path) -> str:
    """Returns a module without the words that import and export."""
    text = re.sub(r"^import .*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.sub(r"^export ", "", text, flags=re.MULTILINE)
