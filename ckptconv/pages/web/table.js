/* The table: which rows, in which order; only those in sight are elements. */

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
/** A text by which names sort as their numbers do: 2 before 10. */
const inOrder = (text) => text.replace(/\d+/g, (digits) => digits.padStart(8, "0"));
const name = { key: "name", title: "Name", width: 0, get: (row) => inOrder(nameOf(row)),
  text: nameOf };
const longestDtype = Math.max(...files.flatMap((file) => file.kinds.map((k) => k.dtype.length)), 0);
const dtype = { key: "dtype", title: "Dtype", width: Math.min(Math.max(88, 24 + 7.5 * longestDtype), 150), get: dtypeText, text: dtypeText };
const shape = { key: "shape", title: "Shape", width: isPair ? 150 : 116,
  get: (row) => kindOf(row).numel, text: shapeText, hint: "sorted by the number of values" };
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

const ROW = 30, PAPER = 660; // pixels: the height of a row, the width of a sheet
const MOST = 500000, PRINTED = 400; // rows that a browser can scroll through, that are printed
let printing = false;
const grid = $("grid"), body = $("rows"), head = $("head"), inner = $("inner");
const state = {
  sort: null, falling: false, order: [], active: -1, opened: -1, zoom: [], words: [],
  shown: [name], color: null,
};

function fittingColumns() {
  const room = printing ? PAPER : grid.clientWidth;
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

function drawRows() {
  const height = body.clientHeight || 600;
  const rows = Math.min(state.order.length, MOST);
  let from = Math.max(0, Math.floor(body.scrollTop / ROW) - 8);
  let to = Math.min(rows, Math.ceil((body.scrollTop + height) / ROW) + 8);
  if (printing) { from = 0; to = Math.min(rows, PRINTED); }
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
