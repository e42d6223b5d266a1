"""The frame of the page: style and the few lines of script that sort tables."""

from collections.abc import Sequence

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #ffffff; --line: #d5d9de;
  --soft: #59636e; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #15181c; --line: #3a4048; --soft: #a3acb7; --link: #7ab8f5; }
}
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1.5rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; color: var(--ink); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.6rem; text-align: left; }
.number { text-align: right; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible, .wide:focus-visible { outline: 2px solid var(--link); }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
"""

_SCRIPT = """
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement, table = heading.closest("table");
    const up = heading.getAttribute("aria-sort") === "descending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const sign = up ? 1 : -1, column = heading.cellIndex, body = table.tBodies[0];
    const key = (row) => row.cells[column];
    const order = (a, b) => {
      const x = parseFloat(key(a).dataset.value), y = parseFloat(key(b).dataset.value);
      if (isNaN(x) && isNaN(y)) return sign * key(a).textContent.localeCompare(key(b).textContent);
      if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
      return sign * (x - y);
    };
    body.append(...[...body.rows].sort(order));
  });
}
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, heading: str, sections: Sequence[str]) -> str:
    """Return a whole HTML document; the arguments are already escaped."""
    body = "\n".join(section for section in sections if section)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{heading}</h1>
{body}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""
