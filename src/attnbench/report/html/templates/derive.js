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

// Rows of each shape that have a place in its standing, in that order.
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
        const regret = Math.max(0, row.ns / field.find(({ group }) => group === row.group).ns - 1);
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
  // The first of each shape, other names of its kernel and the next kernel: places, ties and kernels are data.
  winners(rows) {
    return placed(rows).map((field) => {
      const [first, ...others] = field;
      const same = others.filter((row) => row.kernel === first.kernel).map((row) => row.label).join(", ") || undefined;
      const left = others.filter((row) => row.kernel !== first.kernel);
      const next = left.find((row) => row.group === first.group);
      const tie = others.every((row) => row.framework === first.framework) ? "within" : "tie";
      const close = left.some((row) => row[tie] === first[tie]);
      const certain = close ? "no, too close to call" : next ? "yes" : "only one measured";
      const regret = next ? Math.max(0, next.ns / first.ns - 1) : undefined;
      return { ...first, same, next_label: next?.label, regret, close, certain, field: field.length };
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
      gain: row[field], gain_low: row[`${field}_low`], gain_high: row[`${field}_high`], gain_is: row[`${field}_is`],
    }));
  },
  memory: (rows) => rows.map((row) => ({ ...row, over: row.theory ? row.peak / row.theory : undefined })),
  tails: (rows) => rows.map((row) => ({ ...row, tail: row.p99 / row.ns })),
};
