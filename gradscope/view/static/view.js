"use strict";
// The page's data are strangers' texts: they are set as textContent only, never as markup.
(() => {
  const DOTS = 5000, CARDS = 48, PARAMETERS = 200, BARS = 40, NEAR = 14;
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const ARRAYS = { f8: Float64Array, f4: Float32Array, i4: Int32Array };
  const unpack = (packed) => {
    const [[kind, text]] = Object.entries(packed);
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    return new ARRAYS[kind](bytes.buffer);
  };
  const columns = Object.fromEntries(Object.entries(data.columns).map(([k, v]) => [k, unpack(v)]));
  const { index, norm, loss } = columns, count = data.samples;
  const COUNTED = data.noun === "sample" ? "position" : "row";  // what index says of each
  const every = Array.from({ length: count }, (_, place) => place);
  const positive = Float64Array.from(norm).sort();
  const median = count ? (positive[(count - 1) >> 1] + positive[count >> 1]) / 2 : NaN;

  // ---- words -------------------------------------------------------------------------------
  const { short, whole, colour, draw } = drawing;
  const label = (value) => {
    if (value === undefined || Number.isNaN(value)) return null;
    const name = data.classes && data.classes[String(value)];
    if (name !== undefined && name !== null && name !== String(value)) return `${name} (${value})`;
    return data.classes || Number.isInteger(value) ? String(value) : short(value);
  };
  const isWrong = (place, second = "") => {
    const found = columns[`prediction${second}`];
    return Boolean(data.classes && found && columns.target && found[place] !== columns.target[place]
      && !Number.isNaN(found[place]));
  };
  const predicted = (place, second = "") =>
    `${label(columns[`prediction${second}`][place]) ?? "-"}${isWrong(place, second) ? data.wrong : ""}`;
  const hasChanged = (place) => columns.prediction2 !== undefined
    && !Number.isNaN(columns.prediction2[place])
    && columns.prediction[place] !== columns.prediction2[place];
  const nameOf = (place) => (data.ids ? data.ids[place] : String(index[place]));
  const make = (tag, parts = {}, ...children) => {
    const { dataset, ...rest } = parts, made = Object.assign(document.createElement(tag), rest);
    if (dataset) Object.assign(made.dataset, dataset);
    made.append(...children.filter((child) => child !== null));
    return made;
  };
  const told = (place) => {
    const lines = [];
    if (columns.target) lines.push(`target ${label(columns.target[place])}`);
    if (columns.prediction && label(columns.prediction[place]) !== null)
      lines.push(`predicted ${predicted(place)}`);
    lines.push(`norm ${short(norm[place])}`, `loss ${short(loss[place])}`);
    return lines;
  };

  // ---- what samples are --------------------------------------------------------------------
  const details = new Map(); // place -> { set, k }
  const take = (set) => {
    set.norms = unpack(set.norms);
    for (const side of ["aligned", "opposed"])
      if (set[side]) set[side] = { places: unpack(set[side].places), cosines: unpack(set[side].cosines) };
    if (set.scores) {
      set.scores.places = unpack(set.scores.places);
      for (const name of ["index", "target", "prediction"])
        if (set.scores[name]) set.scores[name] = unpack(set.scores[name]);
      prepare(set.scores.album);
    }
    prepare(set.album);
    unpack(set.places).forEach((place, k) => details.set(place, { set, k }));
  };
  const prepare = (album) => {
    if (!album.sheet) return;
    album.slots = new Map(album.sheet.of.map((k, slot) => [k, slot]));
    album.image = new Image();
    album.image.src = album.sheet.source;
    album.ready = album.image.decode();
  };
  const need = async (places) => {
    const missing = places.filter((place) => !details.has(place));
    if (!data.served || !missing.length) return;
    const answer = await fetch(`details?places=${missing.join(",")}`);
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    take(await answer.json());
  };
  const picture = (album, k, text) => {
    const slot = album.slots && album.slots.get(k);
    if (slot !== undefined) {
      const { side, across, size, sizes } = album.sheet, [w, h] = size || sizes[slot];
      const canvas = make("canvas", { className: "picture", width: w, height: h });
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", text);
      const draw = () => canvas.getContext("2d").drawImage(
        album.image, (slot % across) * side, Math.floor(slot / across) * side, w, h, 0, 0, w, h);
      if (album.image.complete && album.image.naturalWidth) draw();
      else album.ready.then(draw, () => {});
      return canvas;
    }
    const written = album.texts && album.texts[k];
    return typeof written === "string" ? make("span", { className: "excerpt", textContent: written }) : null;
  };
  const shown = (place, text) => {
    const found = details.get(place);
    return found ? picture(found.set.album, found.k, text) : null;
  };
  const card = (tag, content, title, lines, wrong) => {
    const kinds = ["card", content && content.className === "excerpt" ? "text" : "", wrong ? "wrong" : ""];
    return make(tag, { className: kinds.filter(Boolean).join(" ") }, content,
      make("strong", { textContent: title }), ...lines.map((line) => make("span", { textContent: line })));
  };
  const sampleCard = (tag, place, more = []) => {
    const title = `${data.noun} ${nameOf(place)}`, lines = [...told(place), ...more];
    const made = card(tag, shown(place, `${title}, ${lines.join(", ")}`), title, lines, isWrong(place));
    made.dataset.index = index[place];
    if (tag === "button") {
      made.type = "button";
      made.addEventListener("click", () => open(place));
    }
    return made;
  };

  // ---- which samples -----------------------------------------------------------------------
  const WRONG_FIRST = [["predicted wrongly, then loss", (p) => (isWrong(p) ? -1e300 : 0) - loss[p]]];
  const SORTS = [
    ...(data.scored && data.classes && columns.prediction ? WRONG_FIRST : []),
    ["largest norm", (p) => -norm[p]], ["largest loss", (p) => -loss[p]],
    ["most opposed", columns.cosine && ((p) => columns.cosine[p])],
    ["smallest margin", columns.margin && ((p) => columns.margin[p])],
    ["largest rise of the norm", columns.norm2 && ((p) => norm[p] - columns.norm2[p])],
    ["largest rise of the loss", columns.loss2 && ((p) => loss[p] - columns.loss2[p])],
    [COUNTED, (p) => index[p]],
  ].filter(([, key]) => key);
  let order = every, first = 0, current = null;
  const number = (id) => ($(id).value === "" ? NaN : Number($(id).value));
  const filtered = () => {
    const low = number("low"), high = number("high"), wanted = $("class").value;
    const text = $("find").value.trim().toLowerCase();
    return every.filter((p) =>
      !(norm[p] < low) && !(norm[p] > high)
      && (wanted === "" || String(columns.target[p]) === wanted)
      && (!$("wrong").checked || isWrong(p))
      && (!$("opposed").checked || columns.cosine[p] < 0)
      && (!$("changed").checked || hasChanged(p))
      && (text === "" || String(index[p]) === text || (data.ids && data.ids[p].toLowerCase().includes(text))));
  };
  const refresh = () => {
    const [, key] = SORTS[Number($("sort").value) || 0];
    const keys = new Float64Array(count);
    order = filtered();
    for (const p of order) keys[p] = Number.isNaN(key(p)) ? Infinity : key(p);
    order.sort((a, b) => keys[a] - keys[b] || a - b);
    first = 0;
    $("count").textContent = `${whole(order.length)} of ${whole(count)} ${data.noun}s`;
    list();
    dots();
  };
  const list = async () => {
    const places = order.slice(first, first + CARDS), asked = first;
    try { await need(places); } catch (error) { $("list-note").textContent = error.message; }
    if (asked !== first) return;
    $("list").replaceChildren(...places.map((p) => make("li", {}, sampleCard("button", p))));
    $("page").textContent = order.length
      ? `${whole(first + 1)} to ${whole(Math.min(first + CARDS, order.length))} of ${whole(order.length)}` : "none";
    $("before").disabled = first === 0;
    $("after").disabled = first + CARDS >= order.length;
  };
  const turn = (by) => { first += by * CARDS; list(); $("list-title").scrollIntoView(); };
  const save = () => {
    const quoted = (text) => `"${(/^[=+\-@\t]/.test(text) ? "'" : "") + text.replaceAll('"', '""')}"`;
    const rows = order.map((p) => (data.ids ? `${index[p]},${quoted(data.ids[p])}` : `${index[p]}`));
    const text = [data.ids ? "index,id" : "index", ...rows, ""].join("\n");
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: "samples.csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  // ---- charts ------------------------------------------------------------------------------
  const CHARTS = [
    ["norm against loss", "loss", "norm", loss, norm],
    ["norm before and after", "norm, first file", "norm, second file", norm, columns.norm2],
    ["loss before and after", "loss, first file", "loss, second file", loss, columns.loss2],
    ["norm against margin", "margin", "norm", columns.margin, norm],
    ["norm against cosine with the mean", "cosine", "norm", columns.cosine, norm],
  ].filter(([, , , x, y]) => x && y);
  let scatter = null, drawn = [];
  const least = (values) => {
    let found = Infinity;
    for (const p of every) if (values[p] > 0 && values[p] < found) found = values[p];
    return found;
  };
  const axis = (values) => {
    let negative = false;
    for (const p of every) negative ||= values[p] < 0;
    const floor = least(values), isLog = $("log").checked && !negative && Number.isFinite(floor);
    return { isLog, of: (p) => (isLog && values[p] <= 0 ? floor : values[p]) };
  };
  let axes = null;
  const thinned = () => {
    if (order.length <= DOTS) return order;
    const byNorm = [...order].sort((a, b) => norm[b] - norm[a]), half = DOTS / 2, chosen = byNorm.slice(0, half);
    const step = (byNorm.length - half) / half;
    for (let k = 0; k < half; k += 1) chosen.push(byNorm[half + Math.floor(k * step)]);
    return chosen;
  };
  const rowsOf = (places) => places.map((p) => ({ p, x: axes.x.of(p), y: axes.y.of(p),
    kind: isWrong(p) ? "predicted wrongly" : "other" })).filter((r) => Number.isFinite(r.x) && Number.isFinite(r.y));
  const plot = async () => {
    const [name, across, up, x, y] = CHARTS[Number($("what").value) || 0];
    axes = { x: axis(x), y: axis(y) };
    const scale = (one) => ({ padding: 8, ...(one.isLog ? { type: "log", nice: false } : { zero: false, nice: true }) });
    const point = (title, field, one) => ({ field, type: "quantitative", title, scale: scale(one) });
    const sides = { x: point(across, "x", axes.x), y: point(up, "y", axes.y) };
    const kinds = ["other", "predicted wrongly"];
    if (scatter) scatter.finalize();
    $("chart").replaceChildren();
    $("chart").setAttribute("aria-label", `Chart of ${name}, a dot a ${data.noun}`);
    const values = rowsOf(every.length <= DOTS ? every : thinned());
    scatter = await draw($("chart"), {
      width: "container", height: Math.max(260, Math.min(420, window.innerHeight * 0.5)),
      autosize: { type: "fit", contains: "padding" },
      layer: [
        { data: { name: "dots", values }, mark: { type: "point", filled: true, opacity: 0.75, size: 34 },
          encoding: { ...sides,
            color: { field: "kind", type: "nominal", title: null, scale: { domain: kinds, range: [colour("right"), colour("wrong")] },
              legend: data.classes && columns.prediction ? { orient: "top" } : null },
            shape: { field: "kind", type: "nominal", title: null, scale: { domain: kinds, range: ["circle", "triangle-up"] } } } },
        { data: { name: "current", values: [] }, mark: { type: "point", filled: false, size: 190, strokeWidth: 2.5, stroke: colour("ink") },
          encoding: sides },
      ],
    }, "canvas");
    dots();
  };
  const dots = () => {
    if (!scatter) return;
    const places = thinned();
    drawn = rowsOf(places);
    $("chart-note").textContent = order.length > DOTS
      ? `${whole(drawn.length)} of ${whole(order.length)} ${data.noun}s are drawn: those with the largest norms, and others evenly spread.` : "";
    scatter.data("dots", drawn);
    mark(current);
  };
  const mark = (place) => {
    scatter.data("current", place === null ? [] : rowsOf([place]));
    scatter.runAsync();
  };
  const corner = () => {
    const box = $("chart").querySelector("canvas").getBoundingClientRect();
    const [x, y] = scatter.origin(), pad = scatter.padding();
    return [box.left + x + (pad.left ?? pad), box.top + y + (pad.top ?? pad)];
  };
  const where = (place) => {
    const [row] = rowsOf([place]), [left, top] = corner();
    return row ? [left + scatter.scale("x")(row.x), top + scatter.scale("y")(row.y)] : null;
  };
  const nearest = (event) => {
    const [left, top] = corner(), x = scatter.scale("x"), y = scatter.scale("y");
    let best = null, least = NEAR * NEAR;
    for (const row of drawn) {
      const away = (left + x(row.x) - event.clientX) ** 2 + (top + y(row.y) - event.clientY) ** 2;
      if (away < least) { least = away; best = row.p; }
    }
    return best;
  };
  let asked = null;
  const hover = async (place, at, speak) => {
    if (place !== current) { current = place; mark(place); }
    asked = place;
    if (place === null) { $("hover").hidden = true; return; }
    try { await need([place]); } catch { /* the numbers are here */ }
    if (asked !== place) return;
    const made = sampleCard("div", place), box = $("hover");
    box.className = made.className;
    box.dataset.index = made.dataset.index;
    box.replaceChildren(...made.childNodes);
    box.hidden = false;
    const [x, y] = at || where(place) || [0, 0];
    box.style.left = `${Math.max(4, Math.min(x + 16, window.innerWidth - box.offsetWidth - 8))}px`;
    box.style.top = `${Math.max(4, Math.min(y + 16, window.innerHeight - box.offsetHeight - 8))}px`;
    if (speak) $("spoken").textContent = `${data.noun} ${nameOf(place)}, ${told(place).join(", ")}`;
  };
  const keys = (event) => {
    const at = current === null ? -1 : order.indexOf(current), last = order.length - 1;
    const moves = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last };
    if (event.key in moves && order.length) {
      event.preventDefault();
      hover(order[Math.max(0, Math.min(last, moves[event.key]))], null, true);
    } else if ((event.key === "Enter" || event.key === " ") && current !== null) {
      event.preventDefault();
      open(current);
    } else if (event.key === "Escape") hover(null);
  };

  // ---- one sample --------------------------------------------------------------------------
  let opened = null;
  const open = async (place) => {
    opened = place;
    hover(null);
    const title = `${data.noun[0].toUpperCase()}${data.noun.slice(1)} ${nameOf(place)}`;
    $("sample-title").textContent = data.ids ? `${title} (${COUNTED} ${index[place]})` : title;
    $("sample").dataset.index = index[place];
    const body = $("sample-body");
    try { await need([place]); } catch (error) { body.replaceChildren(make("p", { textContent: error.message })); }
    if (opened !== place) return;
    const found = details.get(place), parts = [about(place, title)];
    if (found) {
      const { set, k } = found;
      const beside = ["aligned", "opposed"].flatMap((side) => (set[side] ? beside_(set, side, k) : []));
      try { await need(beside); } catch { /* cards without pictures */ }
      if (opened !== place) return;
      parts.push(...neighbours(set, k), ...helpers(set, k), ...layers(set, k));
    } else parts.push(make("p", { className: "soft",
      textContent: `This page has no details of this ${data.noun}. Run gradscope view --serve to see the details of every ${data.noun}.` }));
    body.replaceChildren(...parts);
    if (!$("sample").open) $("sample").showModal();
    $("sample").scrollTop = 0;
    $("sample-title").focus();
    if (found) bars(found.set, found.k);
  };
  const about = (place, title) => {
    const rows = [[COUNTED, String(index[place])]];
    if (columns.target) rows.push(["target", label(columns.target[place])]);
    if (columns.prediction) rows.push(["prediction", predicted(place)]);
    rows.push(["norm", `${short(norm[place])}, ${short(norm[place] / median)} times the median`], ["loss", short(loss[place])]);
    if (columns.size) rows.push(["size", whole(columns.size[place])]);
    if (columns.margin) rows.push(["margin", `${short(columns.margin[place])}, probability of the target ${short(1 / (1 + Math.exp(-columns.margin[place])))}`]);
    if (columns.cosine) rows.push(["cosine with the mean gradient", short(columns.cosine[place])]);
    if (data.second) {
      rows.push(["norm, second file", short(columns.norm2[place])], ["loss, second file", short(columns.loss2[place])]);
      if (columns.prediction2) rows.push(["prediction, second file", predicted(place, "2")]);
    }
    const list = table(rows, [], "facts");
    const found = details.get(place), content = shown(place, title);
    if (content && content.className === "excerpt") { content.tabIndex = 0; content.setAttribute("role", "region"); content.setAttribute("aria-label", title); }
    const values = found && found.set.album.numbers && found.set.album.numbers[found.k];
    return make("div", { className: "whole" }, content, list, values ? numbers(found.set.album.names, values) : null);
  };
  const table = (rows, heads, className) => {  // each row begins with its name
    const title = (name) => (className && data.terms[name] ? term(name) : name);
    const cells = ([name, ...values]) => make("tr", {}, make("th", { scope: "row" }, title(name)),
      ...values.map((textContent) => make("td", { textContent, className: heads.length ? "number" : "" })));
    const head = make("tr", {}, ...heads.map((textContent, k) => make("th", { scope: "col", textContent, className: k ? "number" : "" })));
    return make("table", { className }, heads.length ? make("thead", {}, head) : null, make("tbody", {}, ...rows.map(cells)));
  };
  const term = (name) => make("abbr", { title: data.terms[name], tabIndex: 0, textContent: name });
  const numbers = (names, values) => table(names.map((name, k) => [name, short(values[k])]), [], "");
  const beside_ = (set, side, k) => [...set[side].places.subarray(k * set.beside, (k + 1) * set.beside)].filter((p) => p >= 0);
  const neighbours = (set, k) => ["aligned", "opposed"].flatMap((side) => {
    if (!set[side]) return side === "aligned" ? [make("p", { className: "soft", textContent: `The nearest ${data.noun}s are not known: ${data.why.neighbours}.` })] : [];
    const cards = beside_(set, side, k).map((p, j) => {
      const cosine = set[side].cosines[k * set.beside + j];
      return make("li", {}, sampleCard("button", p, [`cosine ${short(cosine)}`]));
    });
    const title = side === "aligned" ? "Nearest: gradients in the same direction" : "Most opposed: gradients in the opposite direction";
    return [make("h3", { textContent: title }), make("ul", { className: "cards", dataset: { side } }, ...cards)];
  });
  const helpers = (set, k) => {
    const lists = set.scores && set.scores.of[String(k)];
    if (!lists) return [];
    const { scores } = set, slot = new Map([...scores.places].map((p, j) => [p, j]));
    const one = ([p, score]) => {
      const j = slot.get(p), lines = [];
      if (scores.target) lines.push(`target ${label(scores.target[j])}`);
      if (scores.prediction) lines.push(`predicted ${label(scores.prediction[j])}`);
      lines.push(`score ${short(score)}`);
      const title = `training ${scores.noun} ${(scores.ids ?? scores.index ?? [])[j] ?? p}`;
      return make("li", {}, card("div", picture(scores.album, j, title), title, lines, false));
    };
    const titles = ["Helped most: without them, the loss would be higher", "Harmed most: without them, the loss would be lower"];
    const shown = titles.flatMap((title, side) =>
      [make("h3", { textContent: title }), make("ul", { className: "cards", dataset: { scored: String(side) } }, ...lists[side].map(one))]);
    return [...shown, make("p", { textContent: `A score is ${scores.unit}.` })];
  };
  const normsOf = (set, k) => {
    const size = data.parameters.length, row = set.norms.subarray(k * size, (k + 1) * size);
    return data.parameters.map((name, j) => ({ name, norm: row[j] })).filter((one) => one.norm !== undefined);
  };
  const layers = (set, k) => {
    const rows = normsOf(set, k);
    if (!rows.length) return [];
    return [make("h3", { textContent: "Norm of the gradient by parameter" }), make("div", { className: "chart", id: "bars" }),
      make("details", {}, make("summary", { textContent: "In numbers" }), numbers(rows.map((r) => r.name), rows.map((r) => r.norm)))];
  };
  const bars = async (set, k) => {
    const rows = normsOf(set, k);
    if (!rows.length) return;
    const largest = [...rows].sort((a, b) => b.norm - a.norm).slice(0, BARS), kept = new Set(largest);
    const values = rows.filter((row) => kept.has(row)).map((row, j) => ({ ...row, j }));
    const element = $("bars");
    element.setAttribute("role", "img");
    element.setAttribute("aria-label", `Norm by parameter, the largest ${largest[0].name}`);
    await draw(element, { width: "container", height: { step: 15 }, data: { values },
      mark: { type: "bar", color: colour("right") }, encoding: {
        y: { field: "name", type: "nominal", sort: { field: "j" }, title: null, axis: { labelLimit: 200 } },
        x: { field: "norm", type: "quantitative", title: rows.length > BARS ? `norm, the ${BARS} largest of ${rows.length} parameters` : "norm" } } }, "svg");
  };

  // ---- parameters by class -----------------------------------------------------------------
  const heat = async () => {
    const found = data.heat;
    $("layers").hidden = !found;
    if (!found) return;
    const which = $("number").value, cells = found[which], title = which === "norm" ? "mean norm" : "signal to noise";
    const means = found.parameters.map((_, j) => Math.max(...found.norm.map((row) => row[j] ?? 0)));
    const largest = found.parameters.map((_, j) => j).sort((a, b) => means[b] - means[a]).slice(0, PARAMETERS);
    const kept = new Set(largest), values = [];
    found.classes.forEach((one, c) => found.parameters.forEach((name, j) => {
      if (kept.has(j) && cells[c][j] !== null) values.push({ class: label(one), name, j, c, value: cells[c][j] });
    }));
    const flat = values.map((row) => row.value), isLog = flat.length && Math.min(...flat) > 0;
    $("layers-note").textContent = (found.parameters.length > PARAMETERS ? `The ${PARAMETERS} parameters with the largest norms of ${whole(found.parameters.length)}. ` : "")
      + (found.snr ? "" : "Signal to noise needs the gradients: compute with -t identity.");
    $("heat").replaceChildren();
    $("heat").setAttribute("aria-label", `Heat map of the ${title} by class and parameter; the numbers are below`);
    const view = await draw($("heat"), { data: { values }, width: { step: 22 }, height: { step: 22 }, mark: "rect", encoding: {
      x: { field: "name", type: "nominal", sort: { field: "j" }, title: null, axis: { labelAngle: -60, labelLimit: 160 } },
      y: { field: "class", type: "nominal", sort: { field: "c" }, title: "class" },
      color: { field: "value", type: "quantitative", title, scale: { type: isLog ? "log" : "linear", scheme: "viridis" } } } }, "svg");
    view.addEventListener("mousemove", (_, item) => {
      const row = item && item.datum;
      if (row && row.name !== undefined && row.value !== undefined) $("cell").textContent = `class ${row.class}, ${row.name}: ${title} ${short(row.value)}`;
    });
    const rows = largest.sort((a, b) => a - b).map((j) => [found.parameters[j], ...cells.map((row) => short(row[j]))]);
    $("heat-table").replaceChildren(table(rows, ["parameter", ...found.classes.map(label)], ""));
  };

  // ---- the page ----------------------------------------------------------------------------
  const options = (id, names, values) => $(id).replaceChildren(...names.map((text, k) => make("option", { textContent: text, value: values ? values[k] : String(k) })));
  const hide = (id) => { $(id).closest("label").hidden = true; };
  const start = async () => {
    take(data);
    options("sort", SORTS.map(([name]) => name));
    options("what", CHARTS.map(([name]) => name));
    options("number", data.heat && data.heat.snr ? ["mean norm", "signal to noise"] : ["mean norm"], ["norm", "snr"]);
    if (data.classes) options("class", ["all", ...Object.keys(data.classes).map((c) => label(Number(c)))], ["", ...Object.keys(data.classes)]);
    else hide("class");
    if (!data.classes || !columns.prediction) hide("wrong");
    if (!columns.cosine) hide("opposed");
    if (!columns.prediction2) hide("changed");
    const notes = [];
    if (data.left_out) notes.push(`${whole(data.left_out)} ${data.noun}s without a finite loss and gradient are left out.`);
    if (data.why.samples) notes.push(`The ${data.noun}s themselves cannot be shown: ${data.why.samples}.`);
    if (!data.served && details.size < count) notes.push(`This page has the details of ${whole(details.size)} of ${whole(count)} ${data.noun}s, first those with the largest norms and losses. gradscope view --serve has all.`);
    $("list-note").textContent = notes.join(" ");
    for (const id of ["class", "low", "high", "wrong", "opposed", "changed", "sort", "find"]) $(id).addEventListener("input", refresh);
    $("filters").addEventListener("reset", () => setTimeout(refresh));
    for (const id of ["filters", "chart-options", "layer-options"]) $(id).addEventListener("submit", (event) => event.preventDefault());
    for (const id of ["what", "log"]) $(id).addEventListener("input", plot);
    $("number").addEventListener("input", heat);
    $("export").addEventListener("click", save);
    $("before").addEventListener("click", () => turn(-1));
    $("after").addEventListener("click", () => turn(1));
    const chart = $("chart");
    chart.where = where;
    chart.addEventListener("mousemove", (event) => hover(nearest(event), [event.clientX, event.clientY]));
    chart.addEventListener("mouseleave", () => hover(null));
    chart.addEventListener("click", (event) => { const place = nearest(event); if (place !== null) open(place); });
    chart.addEventListener("keydown", keys);
    chart.addEventListener("blur", () => hover(null));
    $("sample").addEventListener("close", () => { opened = null; });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { plot(); heat(); });
    refresh();
    await plot();
    await heat();
    document.documentElement.dataset.ready = "yes";
  };
  start();
})();
