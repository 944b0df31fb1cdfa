"use strict";
/* What a page does: a map by bytes to zoom, a table to search and sort, details of a tensor.
   Text from a checkpoint gets in as textContent and as attributes of its own, never as HTML. */
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_";
  const CODES = new Uint8Array(128);
  for (let i = 0; i < 64; i++) CODES[LETTERS.charCodeAt(i)] = i;
  const isPair = data.pairs !== null;

  // ------------------------------------------------------------------------------ elements, text

  function make(tag, attributes, ...inner) {
    const made = document.createElement(tag);
    return filled(made, attributes, inner);
  }
  function draw(tag, attributes, ...inner) {
    return filled(document.createElementNS(SVG, tag), attributes, inner);
  }
  function filled(made, attributes, inner) {
    for (const name in attributes) made.setAttribute(name, attributes[name]);
    made.append(...inner); // strings become text
    return made;
  }
  const clear = (node) => node.replaceChildren();

  const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
  function size(bytes) {
    let unit = 0;
    while (bytes >= 999.5 && unit < UNITS.length - 1) { bytes /= 1000; unit++; }
    return (unit ? bytes.toFixed(1) : String(bytes)) + " " + UNITS[unit];
  }
  const whole = new Intl.NumberFormat("en-US");
  const count = (value) => whole.format(value);
  function number(value, digits) {
    if (Number.isNaN(value)) return "–";
    if (value === 0) return "0";
    if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
    const magnitude = Math.abs(value);
    let text;
    if (Number.isInteger(value) && magnitude < 1e7) text = String(value);
    else if (magnitude >= 1e6 || magnitude < 1e-4) {
      text = value.toExponential((digits || 4) - 1).replace(/\.?0+e/, "e").replace("e+", "e");
    } else text = String(Number(value.toPrecision(digits || 4)));
    return text.replace("-", "−").replace("e-", "e−");
  }

  // ---------------------------------------------------------------------------------- the columns

  function unpacked(text, letters) {
    const view = new DataView(new ArrayBuffer(8));
    const made = new Float64Array(text.length / letters);
    const scale = 2 ** (32 - 6 * letters);
    for (let i = 0, at = 0; i < made.length; i++) {
      let bits = 0;
      for (let k = 0; k < letters; k++) bits = bits * 64 + CODES[text.charCodeAt(at++)];
      view.setUint32(0, bits * scale);
      made[i] = view.getFloat64(0);
    }
    return made;
  }

  function loaded(file, side) {
    const names = [];
    let before = "";
    for (let i = 0; i < file.kind.length; i++) {
      before = before.slice(0, file.names.keep[i]) + file.names.words[file.names.word[i]];
      names.push(before);
    }
    const kinds = file.kinds.map(([dtype, shape, numel, bytes]) => ({
      dtype, numel, bytes, shape: shape.join("×") || "scalar",
    }));
    const group = new Int32Array(names.length).fill(-1);
    file.shared.forEach(([, , members], at) => members.forEach((one) => { group[one] = at; }));
    const made = {
      side, names, kinds, kind: file.kind, group, shared: file.shared, same: file.same,
      device: (i) => file.devices[file.device[i]], length: names.length, values: null,
      bytes: (i) => kinds[file.kind[i]].bytes,
      area: (i) => (i in file.same ? 0 : kinds[file.kind[i]].bytes),
    };
    if (file.values) made.values = loadedValues(file.values);
    return made;
  }

  function loadedValues(values) {
    const figures = unpacked(values.figures, 5);
    const quantiles = unpacked(values.quantiles, 4);
    const bins = values.bins, per = data.quantiles.length;
    const none = new Set(values.none), magnitudes = new Set(values.magnitudes);
    return {
      has: (i) => !none.has(i),
      isMagnitude: (i) => magnitudes.has(i),
      min: (i) => figures[4 * i], max: (i) => figures[4 * i + 1],
      mean: (i) => figures[4 * i + 2], std: (i) => figures[4 * i + 3],
      absMax: (i) => Math.max(Math.abs(figures[4 * i]), Math.abs(figures[4 * i + 1])),
      exact: (i) => values.exact[i],
      zeros: (i) => values.zeros[i],
      nan: (i) => values.nan[i] || 0,
      infinite: (i) => values.infinite[i] || 0,
      quantiles: (i) => quantiles.subarray(per * i, per * i + per),
      bars: (i) => Array.from(values.histograms.slice(bins * i, bins * i + bins),
        (letter) => CODES[letter.charCodeAt(0)]),
    };
  }

  const files = data.files.map(loaded);
  const main = files[0];
  const hasValues = files.some((file) => file.values);
  const pairs = isPair ? loadedPairs(data.pairs) : null;
  const rowCount = isPair ? pairs.length : main.length;

  function loadedPairs(found) {
    const places = (steps) => {
      let expected = 0;
      return Int32Array.from(steps, (step) => {
        if (step === null) return -1;
        const place = expected + step;
        expected = place + 1;
        return place;
      });
    };
    const length = found.state.length;
    const measures = unpacked(found.measures, 5);
    const far = new Map(found.differing.map((row, at) => [row, {
      relL2: measures[3 * at], cosine: measures[3 * at + 1], maxAbs: measures[3 * at + 2],
      counts: found.counts[at],
    }]));
    const made = { length, places: [places(found.a), places(found.b)], state: found.state, far };
    made.rowOf = made.places.map((all, side) => {
      const rows = new Int32Array(files[side].length).fill(-1);
      all.forEach((place, row) => { if (place >= 0) rows[place] = row; });
      return rows;
    });
    return made;
  }

  /** The file and the place of a row's tensor: that of A, where it has one. */
  function tensorOf(row) {
    if (!isPair) return [main, row];
    const first = pairs.places[0][row];
    return first >= 0 ? [files[0], first] : [files[1], pairs.places[1][row]];
  }
  const rowOf = (file, i) => (isPair ? pairs.rowOf[file.side][i] : i);
  const nameOf = (row) => { const [file, i] = tensorOf(row); return file.names[i]; };
  const kindOf = (row) => { const [file, i] = tensorOf(row); return file.kinds[file.kind[i]]; };

  /** What both sides of a row say; one text where they say the same. */
  function both(row, say) {
    if (!isPair) return say(main, row);
    const said = [0, 1].filter((side) => pairs.places[side][row] >= 0)
      .map((side) => say(files[side], pairs.places[side][row]));
    return said.length === 2 && said[0] !== said[1] ? said.join(" → ") : said[0];
  }

  // ------------------------------------------------------------------------------------ the table

  const value = (get) => (row) => {
    const [file, i] = tensorOf(row);
    return file.values && file.values.has(i) ? get(file.values, i) : NaN;
  };
  const measure = (name) => (row) => {
    const far = pairs.far.get(row);
    return far ? far[name] : NaN;
  };
  /** What tells the worse of two: NaN on one side only, then the relative L2. */
  const badness = (row) => {
    const far = pairs.far.get(row);
    if (!far) return pairs.state[row] ? -2 : NaN;
    return far.counts[2] ? Infinity : Number.isNaN(far.relL2) ? -1 : far.relL2;
  };
  const dtypeText = (row) => both(row, (file, i) => file.kinds[file.kind[i]].dtype);
  const shapeText = (row) => both(row, (file, i) => file.kinds[file.kind[i]].shape);
  const deviceText = (row) => both(row, (file, i) => file.device(i));
  const odd = value((v, i) => v.nan(i) + v.infinite(i));
  const stateText = (row) => data.states[pairs.state[row]];

  const figure = (key, title, get, hint) => (
    { key, title, width: 100, right: true, get, text: (row) => number(get(row)), hint });
  const counted = (key, title, get, hint, width) => (
    { key, title, width: width || 92, right: true, get, hint,
      text: (row) => { const v = get(row); return Number.isNaN(v) ? "–" : count(v); } });

  // by falling importance: as many are shown as there is room for
  const inOrder = (text) => text.replace(/\d+/g, (digits) => digits.padStart(8, "0")); // 2 before 10
  const name = { key: "name", title: "Name", width: 0, get: (row) => inOrder(nameOf(row)),
    text: nameOf };
  const dtype = { key: "dtype", title: "Dtype", width: 88, get: dtypeText, text: dtypeText };
  const shape = { key: "shape", title: "Shape", width: isPair ? 150 : 116, get: (row) => kindOf(row).numel,
    text: shapeText, hint: "sorted by the number of values" };
  const device = { key: "device", title: "Device", width: 76, get: deviceText, text: deviceText };
  const bytes = { key: "bytes", title: "Size", width: 96, right: true,
    get: (row) => kindOf(row).bytes, text: (row) => size(kindOf(row).bytes) };
  const numel = counted("numel", "Values", (row) => kindOf(row).numel, "", 104);
  const std = figure("std", "Std", value((v, i) => v.std(i)));
  const figures = [
    std, figure("min", "Min", value((v, i) => v.min(i))),
    figure("max", "Max", value((v, i) => v.max(i))),
    figure("mean", "Mean", value((v, i) => v.mean(i))),
    counted("zeros", "Zeros", value((v, i) => v.zeros(i))),
    counted("nan", "NaN, Inf", odd, "NaN and infinite values", 84),
  ];
  const columns = isPair
    ? [name, { ...figure("relL2", "Rel. L2", measure("relL2"), "‖a − b‖ / ‖b‖; NaN first"),
      get: badness, text: (row) => {
        const far = pairs.far.get(row);
        return far && far.counts[2] ? "NaN" : number(measure("relL2")(row));
      } },
      { key: "state", title: "State", width: 136, get: stateText, text: stateText },
      bytes, figure("cosine", "Cosine", measure("cosine")),
      figure("maxAbs", "Max |a−b|", measure("maxAbs")), dtype, shape, device,
      ...(hasValues ? figures : [])]
    : [name, bytes, ...(hasValues ? figures.slice(0, 1) : []), dtype, shape,
      ...(hasValues ? figures.slice(1) : []), numel, device];
  const SHOWN_ORDER = ["name", "state", "dtype", "shape", "device", "numel", "bytes", "relL2",
    "cosine", "maxAbs", "min", "max", "mean", "std", "zeros", "nan"];

  const ROW = 30, MOST = 500000; // pixels; rows that a browser can scroll through
  const grid = $("grid"), body = $("rows"), head = $("head"), inner = $("inner");
  const state = {
    sort: null, falling: false, order: [], active: -1, opened: -1, zoom: [], words: [],
    shown: [name], color: null,
  };

  function fittingColumns() {
    const room = grid.clientWidth;
    let left = room - Math.min(Math.max(150, room * 0.3), 420);
    const taken = new Set(["name"]);
    for (const column of columns.slice(1)) {
      if (left < column.width) break;
      left -= column.width;
      taken.add(column.key);
    }
    const known = columns.filter((column) => taken.has(column.key));
    known.sort((a, b) => SHOWN_ORDER.indexOf(a.key) - SHOWN_ORDER.indexOf(b.key));
    return known;
  }

  function drawHead() {
    state.shown = fittingColumns();
    const widths = state.shown.map((c) => (c.width ? c.width + "px" : "minmax(0, 1fr)")).join(" ");
    grid.style.setProperty("--columns", widths);
    head.style.paddingRight = `${body.offsetWidth - body.clientWidth}px`; // the scroll bar
    clear(head);
    for (const column of state.shown) {
      const isSorted = state.sort === column;
      const arrow = isSorted ? (state.falling ? " ↓" : " ↑") : "";
      const button = make("button", { type: "button", class: "sort", "data-key": column.key },
        column.title + arrow);
      if (column.hint) button.title = column.hint;
      button.addEventListener("click", () => sortBy(column));
      head.append(make("div", {
        role: "columnheader", class: column.right ? "cell right" : "cell",
        "aria-sort": isSorted ? (state.falling ? "descending" : "ascending") : "none",
      }, button));
    }
    grid.setAttribute("aria-colcount", state.shown.length);
  }

  function sortBy(column) {
    const first = column.right || column.key === "shape"; // numbers: the largest first
    if (state.sort !== column) { state.sort = column; state.falling = Boolean(first); }
    else if (state.falling === Boolean(first)) state.falling = !state.falling;
    else state.sort = null;
    drawHead();
    choose();
    const again = head.querySelector(`[data-key="${column.key}"]`);
    if (again) again.focus();
  }

  const prefixOf = (path) => (path.length ? path.join(".") : "");
  const isUnder = (text, prefix) => (
    !prefix || text === prefix || (text.startsWith(prefix) && text[prefix.length] === "."));

  let haystacks = null;
  function haystack(row) {
    if (!haystacks) haystacks = new Array(rowCount);
    if (haystacks[row] === undefined) {
      const parts = [nameOf(row), dtypeText(row), shapeText(row), deviceText(row)];
      if (isPair) parts.push(stateText(row));
      haystacks[row] = parts.join(" ").toLowerCase();
    }
    return haystacks[row];
  }

  /** The rows to show, in order. */
  function choose() {
    const prefix = prefixOf(state.zoom);
    const order = [];
    for (let row = 0; row < rowCount; row++) {
      if (prefix && !isUnder(nameOf(row), prefix)) continue;
      if (state.words.length && !state.words.every((word) => haystack(row).includes(word))) continue;
      order.push(row);
    }
    if (state.sort) sorted(order, state.sort, state.falling);
    state.order = order;
    state.active = -1;
    const shownRows = Math.min(order.length, MOST);
    inner.style.height = `${shownRows * ROW}px`;
    body.scrollTop = 0;
    grid.setAttribute("aria-rowcount", order.length + 1);
    const all = order.length === rowCount ? "" : ` of ${count(rowCount)}`;
    const cut = order.length > MOST ? `; the first ${count(MOST)} are shown` : "";
    const noun = isPair ? "key" : "tensor";
    $("found").textContent =
      `${count(order.length)}${all} ${noun}${rowCount === 1 ? "" : "s"}${cut}`;
    $("within").textContent = prefix;
    $("within-zoom").hidden = !prefix;
    $("nothing").hidden = order.length > 0;
    drawRows();
  }

  function sorted(order, column, falling) {
    const keys = new Map(order.map((row) => [row, column.get(row)]));
    const sign = falling ? -1 : 1;
    const missing = (key) => typeof key === "number" && Number.isNaN(key);
    order.sort((a, b) => {
      const x = keys.get(a), y = keys.get(b);
      if (missing(x) || missing(y)) return missing(x) - missing(y) || a - b;
      return (x < y ? -sign : x > y ? sign : 0) || a - b;
    });
  }

  let printing = false;
  function drawRows() {
    const height = body.clientHeight || 600;
    const rows = Math.min(state.order.length, MOST);
    let from = Math.max(0, Math.floor(body.scrollTop / ROW) - 8);
    let to = Math.min(rows, Math.ceil((body.scrollTop + height) / ROW) + 8);
    if (printing) { from = 0; to = Math.min(rows, 400); }
    const made = document.createDocumentFragment();
    for (let at = from; at < to; at++) made.append(drawnRow(at));
    inner.replaceChildren(made);
    const active = state.active >= from && state.active < to ? `row-${state.active}` : "";
    if (active) body.setAttribute("aria-activedescendant", active);
    else body.removeAttribute("aria-activedescendant");
  }

  function drawnRow(at) {
    const row = state.order[at];
    const flags = (at === state.active ? " active" : "") + (row === state.opened ? " opened" : "");
    const made = make("div", {
      role: "row", id: `row-${at}`, class: "row" + flags + (odd(row) > 0 ? " odd" : ""),
      "aria-rowindex": at + 2, "data-at": at,
    });
    if (!printing) made.style.transform = `translateY(${at * ROW}px)`;
    for (const column of state.shown) {
      const text = column.text(row);
      const cell = make("div", {
        role: "cell", class: "cell" + (column.right ? " right" : "") + ` c-${column.key}`,
      }, column.key === "name" ? make("bdi", { dir: "ltr" }, text) : text);
      if (column.key === "state") cell.classList.add(`s${pairs.state[row]}`);
      if (column.key === "name" || text.length > 14) cell.title = text;
      made.append(cell);
    }
    return made;
  }

  function activate(at) {
    if (!state.order.length) return;
    state.active = Math.max(0, Math.min(at, Math.min(state.order.length, MOST) - 1));
    const top = state.active * ROW, height = body.clientHeight;
    if (top < body.scrollTop) body.scrollTop = top;
    else if (top + ROW > body.scrollTop + height) body.scrollTop = top + ROW - height;
    drawRows();
  }

  let waits = false;
  body.addEventListener("scroll", () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => { waits = false; drawRows(); });
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("[data-at]");
    if (!row) return;
    state.active = Number(row.dataset.at);
    open(state.order[state.active]);
  });
  body.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(body.clientHeight / ROW) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    if (event.key in steps) activate(state.active + steps[event.key]);
    else if (event.key === "Home") activate(0);
    else if (event.key === "End") activate(state.order.length - 1);
    else if (event.key === "Enter" && state.active >= 0) open(state.order[state.active], body);
    else return;
    event.preventDefault();
  });

  let typing = 0;
  const search = $("search");
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      state.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      choose();
    }, 60);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && search.value) {
      search.value = "";
      search.dispatchEvent(new Event("input"));
      event.stopPropagation();
    } else if (event.key === "ArrowDown") { body.focus(); activate(0); event.preventDefault(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/INPUT|SELECT/.test(document.activeElement.tagName)) {
      search.focus();
      event.preventDefault();
    }
    if (event.key === "Escape" && !$("detail").hidden) close();
  });

  // ----------------------------------------------------------------------------------- one tensor

  let cameFrom = null;
  function open(row, from) {
    cameFrom = from || cameFrom || body;
    state.opened = row;
    const panel = $("detail-body");
    clear(panel);
    panel.append(make("h3", {}, make("bdi", {}, nameOf(row))));
    if (isPair) panel.append(pairFacts(row));
    const sides = isPair
      ? [0, 1].filter((side) => pairs.places[side][row] >= 0)
        .map((side) => [files[side], pairs.places[side][row]])
      : [[main, row]];
    for (const [file, i] of sides) {
      if (isPair) panel.append(make("h4", {}, "AB"[file.side]));
      panel.append(tensorFacts(file, i));
      if (file.values) panel.append(...valueFacts(file.values, i, file.kinds[file.kind[i]]));
    }
    $("detail").hidden = false;
    panel.scrollTop = 0;
    drawRows();
    $("close").focus({ preventScroll: true });
  }

  function close() {
    $("detail").hidden = true;
    state.opened = -1;
    drawRows();
    if (cameFrom) cameFrom.focus({ preventScroll: true });
    cameFrom = null;
  }
  $("close").addEventListener("click", close);

  function list(entries) {
    const made = make("dl", {});
    for (const [label, text] of entries) {
      made.append(make("dt", {}, label), make("dd", {}, make("bdi", {}, text)));
    }
    return made;
  }

  function pairFacts(row) {
    const entries = [["state", stateText(row)]];
    const far = pairs.far.get(row);
    if (far) {
      const [differing, all, nans] = far.counts;
      entries.push(["differing", `${count(differing)} of ${count(all)} values`]);
      entries.push(["relative L2", number(far.relL2, 6)], ["cosine", number(far.cosine, 6)],
        ["largest |a − b|", number(far.maxAbs, 6)]);
      if (nans) entries.push(["with NaN", count(nans)]);
    }
    return list(entries);
  }

  function tensorFacts(file, i) {
    const kind = file.kinds[file.kind[i]];
    const entries = [["dtype", kind.dtype], ["shape", kind.shape], ["values", count(kind.numel)],
      ["size", `${size(kind.bytes)} (${count(kind.bytes)} bytes)`], ["device", file.device(i)]];
    if (i in file.same) entries.push(["the same as", file.names[file.same[i]]]);
    const group = file.group[i];
    if (group >= 0) {
      const [stored, used, members] = file.shared[group];
      const others = members.filter((one) => one !== i).map((one) => file.names[one]);
      if (others.length) {
        const more = others.length > 5 ? ` and ${count(others.length - 5)} more` : "";
        entries.push(["shares memory with", others.slice(0, 5).join(", ") + more]);
      }
      if (used < stored) {
        entries.push(["its storage", `${size(stored)}, of which ${size(used)} are used`]);
      }
    }
    return list(entries);
  }

  function valueFacts(values, i, kind) {
    if (!values.has(i)) return [make("p", { class: "note" }, "Its numbers are not read.")];
    const exact = values.exact(i);
    const entries = [
      ["smallest", exact ? exact[0] : number(values.min(i), 5)],
      ["largest", exact ? exact[1] : number(values.max(i), 5)],
      ["mean", number(values.mean(i), 5)], ["std", number(values.std(i), 5)],
      ["zeros", share(values.zeros(i), kind.numel)],
      ["NaN", share(values.nan(i), kind.numel)],
      ["infinite", share(values.infinite(i), kind.numel)]];
    const made = [list(entries)];
    if (values.isMagnitude(i)) {
      made.push(make("p", { class: "note" }, "Complex: all figures are of the magnitudes."));
    }
    if (!Number.isNaN(values.min(i))) made.push(histogram(values, i), quantileTable(values, i));
    return made;
  }

  function share(part, all) {
    return part && all ? `${count(part)} (${number(100 * part / all, 3)} %)` : count(part);
  }

  function histogram(values, i) {
    const bars = values.bars(i), wide = 320, high = 96;
    const low = number(values.min(i)), top = number(values.max(i));
    const picture = draw("svg", {
      viewBox: `0 0 ${wide} ${high + 18}`, class: "histogram", role: "img",
      "aria-label": `Histogram from ${low} to ${top}, ${bars.length} bars`,
    });
    const step = wide / bars.length;
    bars.forEach((bar, at) => {
      const tall = bar / 63 * high;
      if (bar) {
        picture.append(draw("rect", {
          x: at * step + 0.5, y: high - tall, width: Math.max(step - 1, 0.5), height: tall,
        }));
      }
    });
    picture.append(
      draw("line", { x1: 0, x2: wide, y1: high + 0.5, y2: high + 0.5 }),
      draw("text", { x: 0, y: high + 14 }, low),
      draw("text", { x: wide, y: high + 14, "text-anchor": "end" }, top));
    return picture;
  }

  function quantileTable(values, i) {
    const labels = make("tr", {}), numbers = make("tr", {});
    values.quantiles(i).forEach((one, at) => {
      labels.append(make("th", { scope: "col" }, `${Math.round(1000 * data.quantiles[at]) / 10}%`));
      numbers.append(make("td", {}, number(one, 3)));
    });
    return make("table", { class: "quantiles" },
      make("caption", {}, "Quantiles"), make("tbody", {}, labels, numbers));
  }

  // -------------------------------------------------------------------------------------- colours

  const OTHER = 8; // the last of the colours of page.css
  function categories(labelOf) {
    const weights = new Map();
    for (const file of files) {
      for (let i = 0; i < file.length; i++) {
        const label = labelOf(file, i);
        weights.set(label, (weights.get(label) || 0) + file.area(i));
      }
    }
    const labels = [...weights.keys()].sort((a, b) => weights.get(b) - weights.get(a));
    return { labels, weights };
  }

  function categorical(title, labelOf, fixed) {
    return () => {
      const { labels, weights } = categories(labelOf);
      const number = new Map(
        fixed ? fixed.map((label, at) => [label, at]) : labels.map((label, at) => [label, at]));
      const paint = (label) => `c${Math.min(number.get(label), OTHER)}`;
      return {
        title,
        of(file, places) {
          const sums = new Map();
          for (const i of places) {
            const label = labelOf(file, i);
            sums.set(label, (sums.get(label) || 0) + file.area(i));
          }
          let best = null;
          for (const [label, sum] of sums) if (best === null || sum > sums.get(best)) best = label;
          return { className: paint(best), text: best };
        },
        legend(box) {
          const seen = fixed ? fixed.filter((label) => weights.has(label)) : labels;
          seen.slice(0, 9).forEach((label) => {
            box.append(make("span", { class: "entry" },
              make("i", { class: `swatch ${paint(label)}`, "aria-hidden": "true" }),
              make("bdi", {}, label), make("small", {}, size(weights.get(label)))));
          });
          if (seen.length > 9) box.append(make("span", { class: "entry" }, "…"));
        },
      };
    };
  }

  // cividis, which colour-blind readers see as others do
  const RAMP = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
    [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
  function ramp(part) {
    const at = Math.max(0, Math.min(1, part)) * (RAMP.length - 1);
    const low = Math.min(Math.floor(at), RAMP.length - 2);
    const mixed = RAMP[low].map((one, k) => Math.round(one + (RAMP[low + 1][k] - one) * (at - low)));
    return { fill: `rgb(${mixed.join(",")})`, isDark: part < 0.45 };
  }

  function sequential(title, valueOf, isLinear) {
    return () => {
      const scale = isLinear ? (x) => x : (x) => Math.log10(x);
      const known = [];
      for (const file of files) {
        for (let i = 0; i < file.length; i++) {
          const at = scale(valueOf(file, i));
          if (Number.isFinite(at)) known.push(at);
        }
      }
      known.sort((a, b) => a - b);
      const part = (q) => known[Math.round(q * (known.length - 1))];
      let low = isLinear ? 0 : part(0.02), high = isLinear ? 1 : part(0.98);
      if (!(low < high)) { low = (low || 0) - 0.5; high = low + 1; }
      return {
        title,
        of(file, places) {
          let sum = 0, weight = 0;
          for (const i of places) {
            const one = valueOf(file, i);
            if (Number.isNaN(one)) continue;
            sum += one * file.area(i);
            weight += file.area(i);
          }
          const mean = weight ? sum / weight : NaN;
          const at = scale(mean);
          if (Number.isNaN(at)) return { className: "none", text: "none" };
          return { ...ramp((at - low) / (high - low)), text: number(mean) };
        },
        legend(box) {
          if (!known.length) { box.append("no values"); return; }
          const back = isLinear ? (x) => x : (x) => 10 ** x;
          const bar = draw("svg", { class: "ramp", viewBox: "0 0 100 8", "aria-hidden": "true",
            preserveAspectRatio: "none" });
          for (let k = 0; k < 50; k++) {
            bar.append(draw("rect", {
              x: 2 * k, y: 0, width: 2.5, height: 8, fill: ramp(k / 49).fill,
              "shape-rendering": "crispEdges",
            }));
          }
          box.append(make("span", { class: "entry" }, number(back(low), 2)), bar,
            make("span", { class: "entry" }, number(back(high), 2)),
            make("span", { class: "entry" },
              make("i", { class: "swatch none", "aria-hidden": "true" }), "none"));
        },
      };
    };
  }

  const ofValues = (get) => (file, i) => (
    file.values && file.values.has(i) ? get(file.values, i, file.kinds[file.kind[i]]) : NaN);
  const SHARING = ["its own storage", "shared storage", "storage partly used"];
  function sharing(file, i) {
    const group = file.group[i];
    if (group < 0) return SHARING[0];
    const [stored, used, members] = file.shared[group];
    return used < stored ? SHARING[2] : members.length > 1 ? SHARING[1] : SHARING[0];
  }
  const FINITE = ["all finite", "NaN or infinite", "not read"];
  const finite = (file, i) => {
    if (!file.values || !file.values.has(i)) return FINITE[2];
    return file.values.nan(i) + file.values.infinite(i) ? FINITE[1] : FINITE[0];
  };
  const stateOf = (file, i) => data.states[pairs.state[pairs.rowOf[file.side][i]]];

  const colorings = {
    dtype: categorical("dtype", (file, i) => file.kinds[file.kind[i]].dtype),
    device: categorical("device", (file, i) => file.device(i)),
    sharing: categorical("sharing", sharing, SHARING),
  };
  if (isPair) {
    colorings.state = categorical("state", stateOf, data.states);
    colorings.relL2 = sequential("relative L2", (file, i) => {
      const row = pairs.rowOf[file.side][i];
      const far = pairs.far.get(row);
      return far ? far.relL2 : NaN;
    });
  }
  if (hasValues) {
    colorings.std = sequential("std", ofValues((v, i) => v.std(i)));
    colorings.absMax = sequential("abs-max", ofValues((v, i) => v.absMax(i)));
    colorings.zeros = sequential("zeros",
      ofValues((v, i, kind) => (kind.numel ? v.zeros(i) / kind.numel : NaN)), true);
    colorings.finite = categorical("finite", finite, FINITE);
  }

  // -------------------------------------------------------------------------------------- the map

  function treeOf(file) {
    const root = { label: "", path: [], bytes: 0, tensors: 0, inner: new Map(), own: [] };
    for (let i = 0; i < file.length; i++) {
      const area = file.area(i);
      let node = root;
      node.bytes += area;
      node.tensors++;
      for (const label of file.names[i].split(".")) {
        let next = node.inner.get(label);
        if (!next) {
          next = { label, path: null, bytes: 0, tensors: 0, inner: new Map(), own: [], up: node };
          node.inner.set(label, next);
        }
        node = next;
        node.bytes += area;
        node.tensors++;
      }
      node.own.push(i);
    }
    return root;
  }
  function pathOf(node) {
    const path = [];
    for (let at = node; at.up; at = at.up) path.push(at.label);
    return path.reverse();
  }
  function* placesIn(node) {
    yield* node.own;
    for (const one of node.inner.values()) yield* placesIn(one);
  }
  /** The parts of a node, the largest first; names in between that lead to one part only are one. */
  function partsOf(node) {
    const made = [];
    for (const i of node.own) {
      made.push({ label: node.label, bytes: node.file.area(i), leaf: i, node });
    }
    for (const one of node.inner.values()) {
      let at = one, label = one.label;
      while (at.inner.size === 1 && !at.own.length) {
        at = at.inner.values().next().value;
        label += `.${at.label}`;
      }
      at.file = node.file;
      if (at.own.length === 1 && !at.inner.size) {
        made.push({ label, bytes: at.bytes, leaf: at.own[0], node: at });
      } else made.push({ label, bytes: at.bytes, leaf: -1, node: at });
    }
    for (const part of made) part.order = inOrder(part.label);
    made.sort((a, b) => b.bytes - a.bytes || (a.order < b.order ? -1 : 1));
    return made;
  }

  /** Boxes for weights in falling order, as square as may be (Bruls, Huizing, van Wijk 2000). */
  function squarified(weights, x, y, w, h) {
    const boxes = [];
    let total = weights.reduce((sum, one) => sum + one, 0), at = 0;
    while (at < weights.length && total > 0 && w > 0 && h > 0) {
      const short = Math.min(w, h), scale = w * h / total;
      let sum = 0, end = at, worst = Infinity;
      while (end < weights.length) {
        const next = sum + weights[end], thick = next * scale / short;
        const ratio = Math.max(
          weights[at] * scale / (thick * thick), thick * thick / (weights[end] * scale));
        if (ratio > worst) break;
        worst = ratio; sum = next; end++;
      }
      const thick = end === weights.length ? Math.max(w, h) : sum * scale / short;
      let along = 0;
      for (; at < end; at++) {
        const long = weights[at] / sum * short;
        boxes.push(w >= h ? [x, y + along, thick, long] : [x + along, y, long, thick]);
        along += long;
      }
      if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
      total -= sum;
    }
    return boxes;
  }

  const HEAD = 17, GAP = 1;
  function treemap(file, box) {
    const root = treeOf(file);
    root.file = file;
    const picture = draw("svg", {
      class: "map", role: "group", tabindex: 0,
      "aria-label": `Map of the tensors by bytes${isPair ? ` of ${"AB"[file.side]}` : ""}. ` +
        "Arrows move, Enter zooms in or opens a tensor, Escape zooms out.",
    });
    box.replaceChildren(picture); // that of Python, which is for readers without scripts
    let cells = [], active = -1, wide = 0, high = 0;

    function nodeAt(path) {
      let node = root;
      for (const label of path) {
        node = node.inner.get(label);
        if (!node) return null;
      }
      node.file = file;
      return node;
    }

    function drawMap() {
      wide = Math.max(box.clientWidth, 200);
      high = Math.round(Math.min(Math.max(wide * 0.42, 260), 520));
      picture.setAttribute("viewBox", `0 0 ${wide} ${high}`);
      picture.setAttribute("height", high);
      cells = [];
      active = -1;
      clear(picture);
      const node = nodeAt(state.zoom);
      if (!node || !node.bytes) {
        picture.append(draw("text", { x: 12, y: 24, class: "empty" },
          node ? "No bytes here." : "This side has no such names."));
        return;
      }
      fill(node, 0, 0, wide, high, 0);
      const made = document.createDocumentFragment();
      cells.forEach((cell, at) => made.append(...drawnCell(cell, at)));
      picture.append(made);
    }

    function fill(node, x, y, w, h, depth) {
      const parts = partsOf(node).filter((part) => part.bytes > 0);
      const sum = parts.reduce((all, part) => all + part.bytes, 0);
      // what would be smaller than a few pixels is one box
      const least = 10 * sum / Math.max(w * h, 1);
      let shown = parts.findIndex((part) => part.bytes < least);
      if (shown < 0 || shown >= parts.length - 1) shown = parts.length;
      const rest = parts.slice(shown);
      const weights = parts.slice(0, shown).map((part) => part.bytes);
      if (rest.length) weights.push(rest.reduce((all, part) => all + part.bytes, 0));
      const order = weights.map((_, at) => at).sort((a, b) => weights[b] - weights[a] || a - b);
      const boxes = squarified(order.map((at) => weights[at]), x, y, w, h);
      boxes.forEach(([bx, by, bw, bh], k) => {
        const at = order[k];
        if (at === shown) {
          cells.push({ x: bx, y: by, w: bw, h: bh, node, rest, depth,
            label: `${count(rest.length)} more`, bytes: weights[at] });
          return;
        }
        const part = parts[at];
        const cell = { x: bx, y: by, w: bw, h: bh, depth, ...part };
        const opens = part.leaf < 0 && bw * bh > 900 && bw > 14 && bh > 14;
        cell.isGroup = opens;
        cells.push(cell);
        if (!opens) return;
        cell.head = bw > 46 && bh > 40 ? HEAD : 2;
        fill(part.node, bx + 2, by + cell.head, bw - 4, bh - cell.head - 2, depth + 1);
      });
    }

    function* placesOf(cell) {
      if (cell.rest) {
        for (const part of cell.rest) {
          if (part.leaf >= 0) yield part.leaf;
          else yield* placesIn(part.node);
        }
      } else if (cell.leaf >= 0) yield cell.leaf;
      else yield* placesIn(cell.node);
    }

    function drawnCell(cell, at) {
      const box = draw("rect", {
        x: (cell.x + GAP / 2).toFixed(2), y: (cell.y + GAP / 2).toFixed(2),
        width: Math.max(cell.w - GAP, 0.3).toFixed(2), height: Math.max(cell.h - GAP, 0.3).toFixed(2),
        "data-at": at, class: "box", "data-bytes": cell.bytes,
      });
      if (cell.isGroup) box.classList.add("group", `d${Math.min(cell.depth, 3)}`);
      else {
        const color = state.coloring.of(file, placesOf(cell));
        cell.color = color.text;
        if (color.className) box.classList.add(color.className);
        if (color.fill) box.setAttribute("fill", color.fill);
        cell.isDark = color.isDark;
        cell.className = color.className;
        if (cell.rest) box.classList.add("rest");
      }
      const room = Math.floor((cell.w - 8) / 6.3);
      const fits = cell.isGroup ? cell.head === HEAD : cell.h > 15;
      if (!fits || room < 3) return [box];
      const words = [...cell.label];
      const text = words.length > room ? `${words.slice(0, room - 1).join("")}…` : cell.label;
      const tint = cell.isGroup ? "onGroup" : cell.isDark ? "onDark" : `on-${cell.className || "ramp"}`;
      const drawn = [box, draw("text", { x: cell.x + 5, y: cell.y + 13, class: `label ${tint}` }, text)];
      const sizeText = size(cell.bytes);
      if (!cell.isGroup && cell.h > 34 && sizeText.length <= room) {
        drawn.push(draw("text", { x: cell.x + 5, y: cell.y + 27, class: `label small ${tint}` }, sizeText));
      } else if (cell.isGroup && words.length + sizeText.length + 3 < room) {
        drawn.push(draw("text", { x: cell.x + cell.w - 6, y: cell.y + 13, "text-anchor": "end",
          class: `label small ${tint}` }, sizeText));
      }
      return drawn;
    }

    function nameOfCell(cell) {
      if (cell.leaf >= 0) return file.names[cell.leaf];
      const path = prefixOf(pathOf(cell.node));
      return cell.rest ? `${cell.label} in ${path || "all"}` : path;
    }
    function about(cell) {
      const kind = cell.leaf >= 0 ? file.kinds[file.kind[cell.leaf]] : null;
      const what = kind ? `${kind.dtype} ${kind.shape}`
        : `${count(cell.rest ? cell.rest.length : cell.node.tensors)} ${cell.rest ? "parts" : "tensors"}`;
      const part = root.bytes ? `, ${number(100 * cell.bytes / root.bytes, 3)} %` : "";
      const color = cell.color ? ` · ${state.coloring.title}: ${cell.color}` : "";
      return [nameOfCell(cell), `${size(cell.bytes)}${part} · ${what}${color}`];
    }

    function enter(cell) {
      if (cell.leaf >= 0) { open(rowOf(file, cell.leaf), picture); return; }
      const path = pathOf(cell.node);
      if (path.length > state.zoom.length) zoomTo(path);
    }
    function point(at) {
      active = at;
      picture.querySelectorAll(".pointed").forEach((one) => one.classList.remove("pointed"));
      const cell = cells[at];
      if (!cell) return;
      picture.querySelector(`rect[data-at="${at}"]`).classList.add("pointed");
      $("spoken").textContent = about(cell).join(": ");
    }
    const cellAt = (event) => {
      const box = event.target.closest("rect[data-at]");
      return box ? Number(box.dataset.at) : -1;
    };
    picture.addEventListener("click", (event) => {
      const at = cellAt(event);
      if (at >= 0) enter(cells[at]);
    });
    picture.addEventListener("pointermove", (event) => {
      const at = cellAt(event);
      const tip = $("tip");
      tip.hidden = at < 0;
      if (at < 0) return;
      const [first, second] = about(cells[at]);
      tip.replaceChildren(make("b", {}, make("bdi", {}, first)), make("span", {}, second));
      const room = document.documentElement.clientWidth - tip.offsetWidth - 12;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, room))}px`;
      const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
      tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
    });
    picture.addEventListener("pointerleave", () => { $("tip").hidden = true; });
    picture.addEventListener("keydown", (event) => {
      const ways = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
      if (event.key in ways) point(nearest(ways[event.key]));
      else if (event.key === "Enter" && active >= 0) enter(cells[active]);
      else if ((event.key === "Escape" || event.key === "Backspace") && state.zoom.length) {
        zoomTo(state.zoom.slice(0, -1));
      } else return;
      event.preventDefault();
      event.stopPropagation();
    });
    /** The box in a direction whose middle is nearest, groups apart from what is in them. */
    function nearest([dx, dy]) {
      if (active < 0 || !cells[active]) return 0;
      const from = cells[active];
      const cx = from.x + from.w / 2, cy = from.y + (from.isGroup ? 8 : from.h / 2);
      let best = active, shortest = Infinity;
      cells.forEach((cell, at) => {
        const x = cell.x + cell.w / 2 - cx, y = cell.y + (cell.isGroup ? 8 : cell.h / 2) - cy;
        const ahead = x * dx + y * dy, aside = Math.abs(x * dy) + Math.abs(y * dx);
        if (at === active || ahead <= 0.5) return;
        const far = ahead + 2 * aside;
        if (far < shortest) { shortest = far; best = at; }
      });
      return best;
    }
    return { draw: drawMap, has: (path) => nodeAt(path) !== null };
  }

  const maps = files.map((file, side) => treemap(file, $(`map-${side}`)));
  /** Names in between that lead to one part only are gone through, up or down. */
  function zoomTo(path) {
    while (path.length && !maps.some((one) => one.has(path))) path = path.slice(0, -1);
    state.zoom = path;
    drawMaps();
    choose();
    $("spoken").textContent = `Zoomed to ${prefixOf(path) || "all tensors"}`;
  }

  function drawMaps() {
    for (const one of maps) one.draw();
    const crumbs = $("crumbs");
    clear(crumbs);
    const steps = ["all", ...state.zoom];
    steps.forEach((label, at) => {
      const isLast = at === steps.length - 1;
      const words = [...label];
      const text = words.length > 40 ? `${words.slice(0, 39).join("")}…` : label;
      const button = make("button", { type: "button", class: "crumb" }, make("bdi", {}, text));
      if (isLast) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => zoomTo(state.zoom.slice(0, at)));
      crumbs.append(button);
    });
    const legend = $("legend");
    clear(legend);
    state.coloring.legend(legend);
  }

  const picker = $("coloring");
  function recolor() {
    state.coloring = colorings[picker.value]();
    drawMaps();
  }
  picker.addEventListener("change", recolor);
  if (!isPair && main.values && new Set(main.kinds.map((kind) => kind.dtype)).size === 1) {
    picker.value = "std"; // there is nothing to see in one dtype
  }

  // ------------------------------------------------------------------------------------- the rest

  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", () => {
      const code = button.parentElement.querySelector("code");
      const done = () => {
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      };
      const select = () => {
        getSelection().selectAllChildren(code);
        if (document.execCommand("copy")) done();
      };
      if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(done, select);
      else select();
    });
  }

  window.addEventListener("beforeprint", () => { printing = true; drawRows(); });
  window.addEventListener("afterprint", () => { printing = false; drawRows(); });
  let width = 0, resizing = 0;
  new ResizeObserver(() => {
    if (grid.clientWidth === width || printing) return;
    width = grid.clientWidth;
    clearTimeout(resizing);
    resizing = setTimeout(() => { drawHead(); drawRows(); drawMaps(); }, 80);
  }).observe(grid);

  if (isPair) { state.sort = columns[1]; state.falling = true; }
  width = grid.clientWidth;
  drawHead();
  recolor();
  choose();
  document.documentElement.dataset.ready = "yes";
})();
