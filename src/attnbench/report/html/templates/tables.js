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
