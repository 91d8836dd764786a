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
