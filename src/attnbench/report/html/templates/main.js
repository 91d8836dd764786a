// Puts tables, charts and filters together.
const VIEWS = [];

function families(section) {
  const found = new Map();
  for (const row of section.rows) {
    if (row.ns === undefined) continue;
    const one = found.get(row.family) || { lengths: new Set(), cells: 0 };
    one.lengths.add(row.len);
    one.cells += 1;
    found.set(row.family, one);
  }
  return [...found].sort(([, a], [, b]) => b.lengths.size - a.lengths.size || b.cells - a.cells).map(([name]) => name);
}

function setUp(element, section, view) {
  const charts = view.charts.map((chart) => new LazyChart(element.querySelector(`[data-chart="${chart.name}"]`), chart, section));
  const table = view.table ? new DataTable(element.querySelector(".table"), view.table, section) : null;
  const family = element.querySelector(".family");
  const made = { charts, table, family, section, legend: element.querySelector(".legend") };
  if (family) {
    section.families.forEach((name) => family.append(new Option(name, name)));
    family.addEventListener("change", () => show(made, currentFilter()));
  }
  element.querySelector(".baseline")?.addEventListener("change", (event) => {
    table.baseline = Number(event.target.value);
    table.show(currentFilter());
  });
  VIEWS.push(made);
}

// Families that the filters leave empty cannot be chosen; where the chosen one is empty, the next is shown.
function offerFamilies({ family, section, charts }, passes) {
  const left = new Set(section.rows.filter((row) => row.ns !== undefined && passes(row)).map((row) => row.family));
  for (const option of family.options) option.disabled = !left.has(option.value);
  const chosen = left.has(family.value) ? family.value : section.families.find((name) => left.has(name));
  if (chosen !== undefined) family.value = chosen;
  charts.forEach((chart) => { chart.family = family.value; });
}

function show(view, passes) {
  if (view.family) offerFamilies(view, passes);
  view.charts.forEach((chart) => { chart.passes = passes; chart.update(); });
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
  idle(() => waiting[0].draw().then(drawInIdleTime));
}

fillFilters();
document.querySelectorAll(".part").forEach((part) => {
  const section = SECTIONS[Number(part.dataset.section)];
  section.families = families(section);
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
DARK.addEventListener("change", () => {
  VIEWS.forEach((view) => { view.charts.forEach((chart) => chart.redraw()); if (view.legend) drawLegend(view.legend, view.charts); });
});
drawInIdleTime();
