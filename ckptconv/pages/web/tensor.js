/* The details of one tensor: facts, statistics, histogram, quantiles. */

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
