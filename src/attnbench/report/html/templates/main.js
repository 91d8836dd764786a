// The filters, and what puts tables, charts and filters together.
// What the reader wants to see. A row passes what it does not know (a table of shapes has no implementation), but every
// row knows its shape, or has `words` with a line for each of its shapes.
const form = document.getElementById("filters");

function unique(field) {
  return [...new Set(SECTIONS.flatMap((section) => section.rows.map((row) => row[field])))].filter((value) => value !== undefined).sort();
}

function fillFilters() {
  for (const field of ["framework", "pass"]) {
    for (const value of unique(field)) form.elements[field].append(new Option(value, value));
  }
  const box = document.getElementById("labels");
  for (const label of unique("label")) {
    const line = make("label");
    const tick = make("input");
    Object.assign(tick, { type: "checkbox", name: "label", value: label, defaultChecked: true });
    line.append(tick, " ", short(label));
    line.title = label;
    box.append(line);
  }
}

// Words that belong together, such as 1 x 512, are one.
function joined(text) {
  return text.toLowerCase().replace(/(\d) x (?=\d)/g, "$1x").replace(/\b(of|batch) (?=\d)/g, "$1")
    .replace(/(\d) (?=heads?\b|quer(?:y|ies)\b)/g, "$1");
}

const KNOWN_WORDS = new Map();

// Every word of a text, alone and with those it belongs to.
function wordsOf(text) {
  if (!KNOWN_WORDS.has(text)) {
    const parts = `${text.toLowerCase()} ${joined(text)}`.split(/[\s·,]+/);
    KNOWN_WORDS.set(text, [...new Set(parts.flatMap((part) => [part, ...part.split(/[-&]/)]))]);
  }
  return KNOWN_WORDS.get(text);
}

// A number is meant whole; of a name its beginning is enough.
function knows(words, wanted) {
  return words.some((word) => word === wanted || (/[a-z_:]$/.test(wanted) && word.startsWith(wanted)));
}

function currentFilter() {
  const { framework, pass, words } = form.elements;
  const ticks = [...form.querySelectorAll("input[name=label]")];
  const hidden = new Set(ticks.filter((tick) => !tick.checked).map((tick) => tick.value));
  const wanted = joined(words.value.replaceAll("·", " ").replace(/\s+/g, " ")).split(/[\s,]+/).filter(Boolean);
  return (row) => {
    if (framework.value && row.framework !== undefined && row.framework !== framework.value) return false;
    if (pass.value && row.pass !== undefined && row.pass !== pass.value) return false;
    if (row.label !== undefined && hidden.has(row.label)) return false;
    if (!wanted.length) return true;
    const shapes = (row.words ?? `${row.workload} ${row.shape} ${row.kind}`).split("\n");
    return shapes.some((shape) => wanted.every((word) => knows(wordsOf(shape), word)));
  };
}

function tellCount(passes) {
  const rows = SECTIONS.flatMap((section) => section.rows);
  const shown = rows.filter(passes).length;
  const noun = rows.length === 1 ? "cell" : "cells";
  document.getElementById("count").value = shown === rows.length ? `${shown} ${noun}` : `${shown} of ${rows.length} ${noun}`;
}

// Puts tables, charts and filters together.
const VIEWS = [];

function setUp(element, section, view) {
  const charts = view.charts.map((chart) => new LazyChart(element.querySelector(`[data-chart="${chart.name}"]`), chart, section));
  const table = view.table ? new DataTable(element.querySelector(".table"), view.table, section) : null;
  const select = element.querySelector(".pick");
  const picker = select ? new Picker(select, charts[0]) : null;
  const made = { charts, table, picker, section, legend: element.querySelector(".legend") };
  charts.forEach((chart) => { chart.picker = picker; });
  select?.addEventListener("change", () => show(made, currentFilter()));
  element.querySelector(".baseline")?.addEventListener("change", (event) => {
    table.baseline = Number(event.target.value);
    table.show(currentFilter());
  });
  VIEWS.push(made);
}

function show(view, passes) {
  view.picker?.offer(passes);
  view.charts.forEach((chart) => chart.show(passes));
  view.table?.show(passes);
  if (view.legend) drawLegend(view.legend, view.charts);
}

function showAll() {
  const passes = currentFilter();
  VIEWS.forEach((view) => show(view, passes));
  tellCount(passes);
}

function drawInIdleTime() {
  const waiting = VIEWS.flatMap((view) => view.charts).filter((chart) => !chart.drawing);
  if (!waiting.length) { document.body.dataset.ready = "yes"; return; }
  const idle = window.requestIdleCallback || ((work) => setTimeout(work, 50));
  idle(() => waiting[0].draw().finally(drawInIdleTime));
}

fillFilters();
document.querySelectorAll(".part").forEach((part) => {
  const section = SECTIONS[Number(part.dataset.section)];
  section.views.forEach((view) => setUp(part.querySelector(`[data-view="${view.name}"]`), section, view));
});
showAll();
form.addEventListener("input", showAll);
form.addEventListener("submit", (event) => event.preventDefault());
form.querySelector("[type=reset]").addEventListener("click", (event) => {
  event.preventDefault();
  form.reset();
  showAll();
});
function recolour() {
  for (const view of VIEWS) {
    view.charts.filter((chart) => chart.theme !== theme()).forEach((chart) => chart.redraw());
    if (view.legend) drawLegend(view.legend, view.charts);
  }
}

DARK.addEventListener("change", recolour);
PAPER.addEventListener("change", () => { VIEWS.forEach((view) => view.table?.draw()); recolour(); });
drawInIdleTime();
