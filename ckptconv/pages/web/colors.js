/* The colours of the map: of categories, and of figures on a ramp. */

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
    // what lies beyond the ends of the scale has the colours of the ends
    const ends = [known[0] < low ? "≤ " : "", known[known.length - 1] > high ? "≥ " : ""];
    const lacks = files.some((file) => Array.from({ length: file.length }, (_, i) => i)
      .some((i) => file.area(i) && !Number.isFinite(scale(valueOf(file, i)))));
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
        box.append(make("span", { class: "entry" }, ends[0] + number(back(low), 2)), bar,
          make("span", { class: "entry" }, ends[1] + number(back(high), 2)));
        if (lacks) {
          box.append(make("span", { class: "entry" },
            make("i", { class: "swatch none", "aria-hidden": "true" }), "none"));
        }
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
