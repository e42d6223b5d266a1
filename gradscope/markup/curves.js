"use strict";
// Draws the curves of a page. Pointing at one chart shows the values of all at that step.
(() => {
  const { short, whole, colour, draw } = drawing;
  const pictures = JSON.parse(document.getElementById("curves").textContent);
  const figures = [...document.querySelectorAll("figure.curves")];
  let drawn = [];
  const decades = (low, high) => {  // the ticks of a logarithmic axis
    const every = [];
    for (let ten = 10 ** Math.floor(Math.log10(low)); ten <= high; ten *= 10) every.push(ten, 2 * ten, 5 * ten);
    const round = every.filter((_, k) => high < 300 * low || k % 3 === 0), found = round.filter((v) => v >= low && v <= high);
    return found.length > 1 ? found : [low, high];
  };
  const spec = (picture, width) => {
    const names = Object.keys(picture.curves), several = names.some((name) => name !== "");
    const values = names.flatMap((name) => picture.curves[name].map(([x, y]) => ({ name, x, y })));
    const flat = values.map((row) => row.y), least = Math.min(...flat), largest = Math.max(...flat);
    const bands = Object.entries(picture.bands).flatMap(([name, band]) => band.map(([x, low, high]) => ({ name, x, low, high })));
    const top = Math.max(largest, ...bands.map((row) => row.high ?? 0));
    for (const row of bands) row.high ??= 2 * top;  // the interval has no upper end
    const isLog = least > 0 && (bands.length > 0 || largest > 100 * least);
    const domain = isLog ? [Math.min(least, ...bands.map((row) => row.low)), top] : null;
    const longest = Math.max(...names.map((name) => name.length));
    const across = Math.max(1, Math.min(names.length, Math.floor((width - 60) / (6 * longest + 40))));
    const rows = several ? Math.ceil(names.length / across) : 0;
    const color = { field: "name", type: "nominal", title: null, sort: null,
      scale: several ? { domain: names, scheme: names.length > 10 ? "tableau20" : "tableau10" } : { range: [colour("right")] },
      legend: several ? { orient: "top", columns: across, symbolType: "stroke", symbolOpacity: 1, symbolStrokeWidth: 2, labelLimit: width - 70 } : null };
    const x = { field: "x", type: "quantitative", title: picture.across, scale: { zero: false, nice: false },
      axis: { tickMinStep: 1, format: ",d", tickCount: Math.max(2, Math.round(width / 90)), grid: false } };
    const y = { field: "y", type: "quantitative", title: null, axis: isLog ? { values: decades(...domain) } : { tickCount: 5 },
      scale: isLog ? { type: "log", nice: false, domain } : { zero: false } };
    const layer = [
      { data: { values }, mark: { type: "line", point: { size: 18 }, strokeWidth: 1.6 },
        params: several ? [{ name: "shown", select: { type: "point", fields: ["name"] }, bind: "legend" }] : [],
        encoding: { x, y, color, opacity: several ? { condition: { param: "shown", value: 1 }, value: 0.12 } : { value: 1 } } },
      { data: { name: "at", values: [] }, mark: { type: "rule", color: colour("soft"), strokeDash: [3, 3] }, encoding: { x } },
    ];
    if (bands.length) {
      layer.unshift({ data: { values: bands }, mark: { type: "area", opacity: 0.2, clip: true },
        encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color } });
    }
    return { width: "container", height: 210 + 13 * rows, autosize: { type: "fit", contains: "padding" }, layer };
  };
  const point = (x) => {
    for (const { view, picture, values } of drawn) {
      const found = x === null ? [] : Object.entries(picture.curves).flatMap(([name, curve]) =>
        curve.filter((one) => one[0] === x).map(([, y]) => `${name}${name && " "}${short(y)}`));
      values.textContent = found.length ? `${picture.across} ${whole(x)}: ${found.join(", ")}` : "";
      view.data("at", found.length ? [{ x }] : []);
      view.runAsync();
    }
  };
  const nearest = (event, { view, element, picture }) => {
    const left = element.querySelector("svg").getBoundingClientRect().left + view.origin()[0];
    const steps = Object.values(picture.curves).flatMap((curve) => curve.map(([x]) => x)), scale = view.scale("x");
    const away = (x) => Math.abs(left + scale(x) - event.clientX);
    return steps.reduce((best, x) => (away(x) < away(best) ? x : best), steps[0]);
  };
  const start = async () => {
    for (const { view } of drawn) view.finalize();
    drawn = await Promise.all(figures.map(async (figure, k) => {
      const [element, values] = [figure.querySelector(".chart"), figure.querySelector(".values")], picture = pictures[k];
      element.replaceChildren();
      const one = { element, values, picture, view: await draw(element, spec(picture, element.clientWidth), "svg") };
      element.onmousemove = (event) => point(nearest(event, one));
      element.onmouseleave = () => point(null);
      return one;
    }));
    document.documentElement.dataset.ready = "yes";
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", start);
  addEventListener("resize", start);
  start();
})();
