/* What a page does: a map by bytes to zoom, a table to search and sort, details of a tensor. Its
   parts are joined to one script, in the order of `assets.SCRIPTS`.

   Here: elements and text. Text from a checkpoint gets in as textContent and as values of
   attributes, never as HTML. */

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_";
const CODES = new Uint8Array(128);
for (let i = 0; i < 64; i++) CODES[LETTERS.charCodeAt(i)] = i;
const isPair = data.pairs !== null;

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
