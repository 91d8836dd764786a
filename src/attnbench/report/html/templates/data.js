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
