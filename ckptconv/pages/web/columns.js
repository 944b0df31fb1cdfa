/* The data of the page, as `pages.columns` writes it: tensors by place, pairs of a comparison. */

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
    dtype, numel, bytes, shape: `[${shape.join(", ")}]`,
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
