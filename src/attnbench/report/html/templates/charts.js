// Charts are drawn when they come near the screen, the rest when the browser has nothing else to do.
const DARK = matchMedia("(prefers-color-scheme: dark)");
const PAPER = matchMedia("print");
const MANY = 1500;
const PHONE = 480;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const near = new IntersectionObserver(
  (entries) => entries.forEach((entry) => { if (entry.isIntersecting) entry.target.chart.draw(); }),
  { rootMargin: "300px" },
);

// Paper is white, whatever the screen is.
function theme() {
  return DARK.matches && !PAPER.matches ? "dark" : "light";
}

function chartConfig() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const axis = { labelColor: colour("quiet"), titleColor: colour("quiet"), gridColor: colour("line"),
    domainColor: colour("line"), tickColor: colour("line"), titleFontWeight: "normal", gridOpacity: 0.6 };
  return { background: "transparent", font: FONT, range: DATA.ranges[theme()], axis, text: { color: colour("ink") },
    view: { stroke: null } };
}

class LazyChart {
  constructor(box, chart, section) {
    Object.assign(this, { box, chart, section, view: null, picker: null, drawing: null });
    this.all = chart.rows ? unpack(chart.rows) : section.rows;
    this.passes = () => true;
    box.chart = this;
    near.observe(box);
  }

  rows() {
    const { needs, map } = this.chart;
    return this.all.filter((row) => row[needs] !== undefined && (map === null || row.map === map) && this.passes(row) && (!this.picker || this.picker.accepts(row)));
  }

  // Vega writes on what it is given: each chart gets its own objects, which read through to the shared rows.
  values() {
    const minor = this.minor();
    return this.drawn().map((row) => Object.assign(Object.create(row), { minor: minor.has(row.label) }));
  }

  // A map shows one row of each shape.
  drawn() {
    return this.chart.map !== null ? DERIVED.winners(this.rows()) : this.rows();
  }

  // A chart of lines shows few of them firmly: those that its choice names.
  minor() {
    if (!this.chart.axes.lengths || !this.picker) return new Set();
    const named = new Set(this.picker.named);
    return new Set(this.rows().map((row) => row.label).filter((label) => !named.has(label)));
  }

  labels() {
    return this.drawn().map((row) => row.label);
  }

  // What an axis is made of: values of a field in their order.
  listed(field) {
    const places = new Map(this.rows().filter((row) => row[field] !== undefined).map((row) => [row[field], row[`${field}_place`] ?? row[field]]));
    return [...places.keys()].sort((a, b) => places.get(a) - places.get(b));
  }

  height() {
    const { lines, step, spec } = this.chart;
    const high = this.chart.map !== null && this.box.clientWidth < PHONE ? 2 * step : step;
    return lines ? high * Math.max(1, new Set(this.rows().map((row) => row[lines])).size) : spec.height;
  }

  draw() {
    near.unobserve(this.box);
    this.drawing ||= this.embed().catch(() => this.giveUp());
    return this.drawing;
  }

  // One chart that fails must not keep the others from being drawn.
  giveUp() {
    this.view = null;
    this.box.replaceChildren(make("p", "This chart could not be drawn.", "quiet"));
    this.box.dataset.drawn = "no";
  }

  // Whether titles of columns must stand upright to have room.
  tight() {
    const titles = this.chart.map === null ? [] : this.listed("column");
    const longest = Math.max(0, ...titles.map((title) => title.length));
    return titles.length * (10 + 5.5 * longest) > this.box.clientWidth - (this.box.clientWidth < PHONE ? 150 : 220);
  }

  async embed() {
    const spec = { ...fitted(this.chart.spec, this.box.clientWidth, this.tight()), datasets: { rows: this.values() } };
    spec.height = this.height();
    const renderer = this.section.rows.length > MANY ? "canvas" : "svg";
    const options = { actions: false, ast: true, logLevel: 1, renderer, config: chartConfig(), tooltip: { theme: theme() } };
    this.theme = this.box.dataset.theme = theme();
    const { axes } = this.chart;
    spec.params = spec.params.map((one) => (axes[one.name] ? { ...one, value: this.listed(axes[one.name]) } : one));
    this.view = (await window.vegaEmbed(this.box, spec, options)).view;
    this.box.dataset.drawn = "yes";
  }

  // A map of nothing is no map. One that comes back is drawn anew: while it was hidden it had no width.
  show(passes) {
    this.passes = passes;
    const figure = this.box.parentElement;
    const hidden = figure.hidden;
    figure.hidden = this.chart.map !== null && !this.rows().length;
    if (hidden && !figure.hidden) this.redraw();
    else this.update();
  }

  async update() {
    if (!this.drawing) return;
    await this.drawing;
    if (!this.view) return;
    for (const [name, field] of Object.entries(this.chart.axes)) this.view.signal(name, this.listed(field));
    await this.view.height(this.height()).data("rows", this.values()).runAsync();
  }

  async pick(label) {
    if (!this.drawing) return;
    await this.drawing;
    await this.view?.signal("picked", label).runAsync();
  }

  async redraw() {
    if (!this.drawing) return;
    await this.drawing;
    this.view?.finalize();
    this.drawing = this.embed().catch(() => this.giveUp());
  }
}

const TURNED = { labelAngle: [0, -90], labelAlign: ["center", "left"] };
const NARROW = { labelLimit: 150, labelAngle: -90 };

// The page has its own legends; on a phone, labels of axes must leave room for the chart.
function fitted(node, width, tight) {
  if (node === null || typeof node !== "object") return node;
  if (Array.isArray(node)) return node.map((one) => fitted(one, width, tight));
  const copy = {};
  for (const [key, value] of Object.entries(node)) {
    if (width < PHONE && key in NARROW && typeof value === "number") copy[key] = NARROW[key];
    else if (key in TURNED && typeof value === "object") copy[key] = TURNED[key][Number(tight)];
    else copy[key] = key === "legend" ? null : key === "values" ? value : fitted(value, width, tight);
  }
  return copy;
}

const SYMBOL_PATHS = { circle: "M6 1.5a4.5 4.5 0 1 0 .01 0z", square: "M2 2h8v8H2z", "triangle-up": "M6 1.5 11 10.5H1z", diamond: "M6 .5 11.5 6 6 11.5.5 6z" };

function symbol(label) {
  const place = DATA.labels.indexOf(label);
  const { category, symbol: shapes } = DATA.ranges[theme()];
  const space = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(space, "svg");
  picture.setAttribute("width", "12");
  picture.setAttribute("height", "12");
  picture.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", SYMBOL_PATHS[shapes[place]]);
  path.setAttribute("fill", category[place]);
  picture.append(path);
  return picture;
}

function drawLegend(list, charts) {
  const shown = new Set(charts.flatMap((chart) => chart.labels()));
  const minor = new Set(charts.flatMap((chart) => [...chart.minor()]));
  const pick = (label) => charts.forEach((chart) => chart.pick(label));
  list.replaceChildren(...DATA.labels.filter((label) => shown.has(label)).map((label) => {
    const button = make("button");
    button.type = "button";
    button.append(symbol(label), short(label));
    button.title = label;
    if (minor.has(label)) button.className = "minor";
    for (const event of ["mouseenter", "focus"]) button.addEventListener(event, () => pick(label));
    for (const event of ["mouseleave", "blur"]) button.addEventListener(event, () => pick(""));
    const item = make("li");
    item.append(button);
    return item;
  }));
}

// Charts that show one thing at a time: a family of shapes (all of its batches, or one), or the history of one cell.
class Picker {
  constructor(select, chart) {
    Object.assign(this, { select, choices: chart.chart.choices, rows: chart.all.filter((row) => row[chart.chart.needs] !== undefined) });
    this.choices.forEach(({ text }, place) => select.append(new Option(short(text, 2 * LONGEST_NAME), place)));
  }

  keys(row) {
    return row.series === undefined ? [row.family, `${row.family}\n${row.batch}`] : [row.series];
  }

  key({ family, batch, series }) {
    return series || (batch === null ? family : `${family}\n${batch}`);
  }

  // What the filters leave empty cannot be chosen; where the chosen one is empty, the next is shown.
  offer(passes) {
    const left = new Set(this.rows.filter(passes).flatMap(this.keys));
    const there = this.choices.map((choice) => left.has(this.key(choice)));
    there.forEach((one, place) => { this.select.options[place].disabled = !one; });
    if (!there[this.select.value]) this.select.value = Math.max(0, there.indexOf(true));
    this.chosen = this.key(this.choices[this.select.value]);
    this.named = this.choices[this.select.value].named;
  }

  accepts(row) {
    return this.keys(row).includes(this.chosen);
  }
}
