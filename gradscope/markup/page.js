"use strict";
// The headings of a table become buttons that sort it.
for (const heading of document.querySelectorAll("thead th")) {
  const button = document.createElement("button"), term = heading.querySelector("abbr");
  button.type = "button";
  button.append(...heading.childNodes);
  if (term) {  // the button explains it
    button.title = term.title;
    term.replaceWith(...term.childNodes);
  }
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
// Hover, focus and touch show the explanation of a term, also of terms that a script adds later.
{
  const tip = document.createElement("div");
  let term = null;
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  const place = () => {
    if (tip.hidden) return;
    const at = term.getBoundingClientRect(), right = document.documentElement.clientWidth - tip.offsetWidth - 4;
    const isBelow = at.bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.left = `${Math.max(4, Math.min(at.left, right))}px`;
    tip.style.top = `${isBelow ? at.bottom + 4 : at.top - tip.offsetHeight - 4}px`;
  };
  const hide = () => { tip.hidden = true; };
  const show = (event) => {
    term = event.target.closest?.("[title], [data-tip]");
    if (!term) return hide();
    if (term.title) {  // the browser shows a title to a mouse alone
      term.dataset.tip = term.title;
      term.removeAttribute("title");
      term.setAttribute("aria-describedby", "tip");
    }
    tip.textContent = term.dataset.tip;
    (term.closest("dialog") ?? document.querySelector("main") ?? document.body).append(tip);  // a landmark
    tip.hidden = false;
    place();
  };
  for (const name of ["mouseover", "focusin", "click"]) document.addEventListener(name, show);
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", place, true);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
}
