"use strict";
// The headings of a table become buttons that sort it.
for (const heading of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", () => {
    const table = heading.closest("table"), body = table.tBodies[0], column = heading.cellIndex;
    const up = heading.getAttribute("aria-sort") === "descending", sign = up ? 1 : -1;
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const order = (one, other) => {
      const a = one.cells[column], b = other.cells[column];
      const x = parseFloat(a.dataset.value), y = parseFloat(b.dataset.value);
      if (isNaN(x) && isNaN(y)) return sign * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
      return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) : sign * (x - y);
    };
    body.append(...[...body.rows].sort(order));
  });
}
