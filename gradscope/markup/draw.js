"use strict";
// What all pages with charts share: short numbers, the page's colours, and how a chart is drawn.
const drawing = (() => {
  const short = (v) => {
    if (v === null || v === undefined || Number.isNaN(v)) return "-";
    const size = Math.abs(v);
    if (v === 0 || !Number.isFinite(v)) return String(v);
    if (size >= 1e-3 && size < 999.5) return v.toPrecision(3);
    if (size >= 999.5 && size < 99999.5) return v.toFixed(0);
    return v.toExponential(2).replace("e+", "e");
  };
  const whole = (n) => n.toLocaleString("en-US");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const config = () => {
    const [ink, soft, line] = ["ink", "soft", "edge"].map(colour);
    return { background: "transparent", view: { stroke: null }, font: "system-ui, sans-serif",
      axis: { labelColor: soft, titleColor: ink, gridColor: line, gridOpacity: 0.3, domainColor: line, tickColor: line },
      legend: { labelColor: soft, titleColor: ink }, title: { color: ink } };
  };
  const draw = async (element, spec, renderer) => {
    const compiled = charts.compile({ ...spec, config: config() }).spec;
    const view = new charts.View(charts.parse(compiled, undefined, { ast: true }),
      { expr: charts.expressionInterpreter, renderer, logLevel: charts.Error });
    view.initialize(element);
    await view.runAsync();
    return view;
  };
  return { short, whole, colour, draw };
})();
