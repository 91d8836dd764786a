// Rows that depend on what passes the filters, or on the baseline that was chosen.
const MOST_NAMES = 8;
const LONGEST_REASON = 400;

function grouped(rows, keyOf) {
  const groups = new Map();
  for (const row of rows) {
    const key = keyOf(row);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  return groups;
}

// Rows of each shape in the order of its standing. The page ranks nothing: order, kernels and who cannot be told apart are
// data, so that it only looks up who is left when a filter hides the first.
function placed(rows) {
  const shapes = grouped(rows.filter((row) => row.place !== undefined), (row) => row.workload);
  return [...shapes.values()].map((field) => field.sort((a, b) => a.place - b.place));
}

const DERIVED = {
  // Extra time over the first that is left of each shape, among those timed together.
  regret(rows) {
    const shapes = placed(rows);
    const found = new Map();
    for (const field of shapes) {
      for (const row of field) {
        const one = found.get(row.label) || { label: row.label, shapes: 0, wins: 0, logs: 0, worst_regret: -1 };
        const regret = Math.max(0, row.ratio / field.find(({ group }) => group === row.group).ratio - 1);
        one.shapes += 1;
        one.wins += row.kernel === field[0].kernel ? 1 : 0;
        one.logs += Math.log1p(regret);
        if (regret > one.worst_regret) Object.assign(one, { worst_regret: regret, worst_shape: row.shape });
        found.set(row.label, one);
      }
    }
    return [...found.values()]
      .map((one) => ({ ...one, of: shapes.length, mean_regret: Math.expm1(one.logs / one.shapes) }))
      .sort((a, b) => a.mean_regret - b.mean_regret);
  },
  // The first that is left of each shape, the other names of its kernel, and the next kernel.
  winners(rows) {
    return placed(rows).map(([first, ...others]) => {
      const same = others.filter((row) => row.kernel === first.kernel).map((row) => row.label).join(", ") || undefined;
      const next = others.find((row) => row.kernel !== first.kernel && row.group === first.group);
      const close = others.some((row) => first.near?.includes(row.place));
      const certain = close ? "no, too close to call" : next ? "yes" : "only one measured";
      const regret = next ? Math.max(0, next.ratio / first.ratio - 1) : undefined;
      return { ...first, same, next_label: next?.label, regret, close, certain, field: others.length + 1 };
    });
  },
  kernels: (rows) => [...grouped(rows, (row) => `${row.label}\n${row.pass}\n${row.kernels}`).values()]
    .map((group) => ({ ...group[0], shapes: group.length })),
  skipped(rows) {
    const lost = rows.filter((row) => row.status !== "ok");
    return [...grouped(lost, (row) => `${row.status}\n${row.reason}`).values()].map((group) => {
      const names = [...new Set(group.map((row) => row.label))];
      const { status, reason, shape } = group[0];
      const more = names.length > MOST_NAMES ? [`and ${names.length - MOST_NAMES} more`] : [];
      return { status: status.replaceAll("_", " "), cells: group.length, where: shape,
        labels: [...names.slice(0, MOST_NAMES).map(short), ...more].join(", "), all_labels: names.join(", "),
        reason: reason.length > LONGEST_REASON ? `${reason.slice(0, LONGEST_REASON - 1)}…` : reason };
    });
  },
  speedups(rows, baseline) {
    const field = `gain${baseline}`;
    return rows.map((row) => ({
      ...row,
      half: row.low === undefined ? undefined : (row.high - row.low) / 2 / row.ns,
      gain: row[field], gain_text: row[`${field}_text`], gain_is: row[`${field}_is`],
    }));
  },
  memory: (rows) => rows.map((row) => ({ ...row, over: row.theory ? row.peak / row.theory : undefined })),
  tails: (rows) => rows.map((row) => ({ ...row, tail: row.p99 / row.ns })),
};

// One kind of table for everything: sorts by its headings, shows a first page, hides what the filters hide.
const PAGE = 50;
const ON_PAPER = 20;

class DataTable {
  constructor(box, table, section) {
    this.box = box;
    this.table = table;
    this.own = table.rows ? unpack(table.rows) : null;
    this.section = section;
    this.baseline = 0;
    this.sort = table.sort;
    this.descending = Boolean(table.descending);
    this.all = false;
    this.element = make("table");
    this.head = this.element.createTHead();
    this.body = this.element.createTBody();
    this.more = make("div", "", "more");
    box.append(this.element, this.more);
  }

  show(passes) {
    const needs = this.table.needs;
    let rows = (this.own || this.section.rows).filter((row) => passes(row) && (!needs || row[needs] !== undefined));
    if (this.table.made_by) rows = DERIVED[this.table.made_by](rows, this.baseline);
    this.rows = rows;
    this.columns = this.table.columns.filter(({ field }) => rows.some((row) => row[field] !== undefined));
    this.draw();
  }

  draw() {
    this.rows.sort(this.order());
    this.drawHead();
    const shown = this.rows.slice(0, PAPER.matches ? ON_PAPER : this.all ? Infinity : PAGE);
    this.body.replaceChildren(...shown.map((row) => this.line(row)));
    this.drawMore(shown.length);
  }

  order() {
    const sign = this.descending ? -1 : 1;
    return (a, b) => {
      const [x, y] = [a[this.sort], b[this.sort]];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      return sign * (typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
    };
  }

  drawHead() {
    const line = make("tr");
    for (const column of this.columns) {
      const cell = make("th", undefined, NUMERIC.has(column.kind) ? "number" : "");
      cell.scope = "col";
      if (column.field === this.sort) cell.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      const button = make("button", column.title);
      button.type = "button";
      button.addEventListener("click", () => this.sortBy(column.field));
      cell.append(button);
      line.append(cell);
    }
    this.head.replaceChildren(line);
  }

  sortBy(field) {
    this.descending = this.sort === field ? !this.descending : false;
    this.sort = field;
    this.draw();
    const place = this.columns.findIndex((column) => column.field === field);
    this.head.querySelectorAll("button")[place].focus();
  }

  line(row) {
    const line = make("tr");
    for (const column of this.columns) {
      const text = formatted(column, row);
      const cell = make("td", text, NUMERIC.has(column.kind) ? "number" : column.kind);
      if (column.field === "shape") cell.className = "shape";
      else if (column.kind === "text" && text.length > 40) cell.className = "long";
      if (column.field === "shape" && row.workload) cell.title = row.workload;
      if (column.kind === "label" && text !== row[column.field]) cell.title = row[column.field] ?? "";
      if (column.field === "labels" && row.all_labels) cell.title = row.all_labels;
      if (column.field === "gain_is") cell.dataset.word = text;
      line.append(cell);
    }
    return line;
  }

  drawMore(shown) {
    this.more.replaceChildren();
    this.more.hidden = shown === this.rows.length && shown > 0;
    if (!this.rows.length) this.more.append("Nothing passes the filters.");
    else if (shown < this.rows.length) {
      const button = make("button", "Show all");
      button.type = "button";
      button.addEventListener("click", () => { this.all = true; this.draw(); });
      this.more.append(`${shown} of ${this.rows.length} rows `, button);
    }
  }
}
