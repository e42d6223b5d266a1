"""The frame of the page: style and the few lines of script that sort tables."""

from collections.abc import Sequence

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #ffffff; --line: #d5d9de;
  --soft: #59636e; --link: #0b5cad; --shade: #f4f6f8; --warn: #a4161a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #15181c; --line: #3a4048; --soft: #a3acb7; --link: #7ab8f5;
    --shade: #1d2127; --warn: #ff9b94; }
}
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 0.5rem; }
p { margin: 0.3rem 0; }
.warning { color: var(--warn); font-weight: 600; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: 0.2rem 1.5rem;
  margin: 0.5rem 0; }
dt { color: var(--soft); grid-column: 1; }
dd { margin: 0; overflow-wrap: anywhere; grid-column: 2; }
.pairs { display: flex; flex-wrap: wrap; gap: 0.2rem 1.8rem; }
.pairs dd { font-variant-numeric: tabular-nums; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; align-items: start; }
figure { margin: 0; }
svg { width: 100%; height: auto; color: var(--ink); display: block; }
.wide { overflow-x: auto; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; white-space: nowrap;
  clip-path: inset(50%); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 24rem; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.7rem; text-align: left;
  vertical-align: bottom; }
tbody th { font-weight: 400; overflow-wrap: anywhere; min-width: 8rem; }
tbody tr:hover { background: var(--shade); }
.number, th.number { text-align: right; }
th button { all: unset; cursor: pointer; font-weight: 600; }
summary { cursor: pointer; color: var(--link); width: max-content; padding: 0.2rem 0; }
details ul { margin: 0.2rem 0 0.8rem; padding-left: 1.2rem; }
pre { overflow: auto; max-height: 24rem; background: var(--shade); padding: 0.7rem;
  font-size: 0.8rem; }
:focus-visible, th button:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
@media (max-width: 34rem) {
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { grid-column: 1; margin-bottom: 0.4rem; }
}
@media print { details { display: none; } }
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
      if (isNaN(x) && isNaN(y))
        return sign * key(a).textContent.localeCompare(key(b).textContent, "en", { numeric: true });
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
