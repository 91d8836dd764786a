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
