/* The map by bytes: groups of names as boxes in boxes, to zoom into (`pages.treemap`). */

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
      width: Math.max(cell.w - GAP, 0.3).toFixed(2),
      height: Math.max(cell.h - GAP, 0.3).toFixed(2),
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
    const tint = cell.isGroup ? "onGroup"
      : cell.isDark ? "onDark" : `on-${cell.className || "ramp"}`;
    const label = { x: cell.x + 5, y: cell.y + 13, class: `label ${tint}` };
    const small = { x: cell.x + 5, y: cell.y + 27, class: `label small ${tint}` };
    const drawn = [box, draw("text", label, text)];
    const sizeText = size(cell.bytes);
    if (!cell.isGroup && cell.h > 34 && sizeText.length <= room) {
      drawn.push(draw("text", small, sizeText));
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
      : cell.rest ? `${count(cell.rest.length)} parts` : `${count(cell.node.tensors)} tensors`;
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
