// Columns of the data element -> rows. Text of run files stays text: it only ever becomes textContent or chart data.
const DATA = JSON.parse(document.getElementById("data").textContent);

function unpack(packed) {
  const rows = Array.from({ length: packed.count }, () => ({}));
  for (const [name, column] of Object.entries(packed.columns)) {
    const values = column.words ? column.codes.map((code) => (code === null ? null : column.words[code])) : column;
    values.forEach((value, place) => { if (value !== null) rows[place][name] = value; });
  }
  return rows;
}

const SECTIONS = DATA.sections.map((section) => ({ ...section, rows: unpack(section.cells) }));

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

// Numbers as the terminal prints them; what was not measured is a dash.
const DASH = "–";

function significant(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return Math.round(value).toLocaleString("en");
  if (size >= 0.01 || !size) return value.toFixed(size >= 9.995 ? 1 : size >= 0.1 || !size ? 2 : 3);
  return size >= 1e-6 ? value.toFixed(1 - Math.floor(Math.log10(size))) : value.toExponential(1);
}

function withUnit(value, units) {
  const [unit, size] = units.find(([, least]) => value >= least) || units[units.length - 1];
  return `${significant(value / size)} ${unit}`;
}

const TIMES = [["s", 1e9], ["ms", 1e6], ["us", 1e3], ["ns", 1]];
const SIZES = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];
const LONGEST_NAME = 48;
const NUMERIC = new Set(["of", "ns", "bytes", "number", "ratio", "percent", "half", "error", "gain", "interval"]);

// Beyond 1000 % as a multiple; never -0.0.
function percentText(share) {
  if (Math.abs(share) >= 10) return `${significant(share)}x`;
  const text = (100 * share).toFixed(Math.abs(share) < 0.1 ? 1 : 0);
  return `${Number(text) === 0 ? text.replace("-", "") : text} %`;
}

// Never -0.00.
function twoDigits(value) {
  return value.toFixed(2).replace(/^-(?=0\.00$)/, "");
}

// A long name without its middle; where it stands, its title is the whole.
function short(name, longest = LONGEST_NAME) {
  const half = longest / 2;
  return name.length > longest ? `${name.slice(0, half - 1)}…${name.slice(-half)}` : name;
}

const FORMATS = {
  text: (value) => value,
  label: (value) => short(value),
  of: (value, row) => `${value} of ${row.of}`,
  list: (value) => value,
  ns: (value) => withUnit(value, TIMES),
  bytes: (value) => withUnit(value, SIZES),
  number: (value) => (Number.isInteger(value) ? value.toLocaleString("en") : significant(value)),
  ratio: (value) => (Math.abs(value) < 0.005 ? "0.00" : significant(value)),
  percent: percentText,
  half: (value) => (value > 1 ? ">100 %" : `±${percentText(value)}`),
  error: (value) => (value > 1e300 ? "inf" : value.toExponential(1)),
  interval: (value, row, field) => `${twoDigits(value)} to ${twoDigits(row[field.replace("_low", "_high")])}`,
  gain: (value, row) => row.gain_text,
};

function formatted(column, row) {
  const value = row[column.field];
  return value === undefined ? DASH : FORMATS[column.kind](value, row, column.field);
}
