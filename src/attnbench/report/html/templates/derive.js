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

const PLAIN = ["torch.eager", "jax.einsum", "numpy.float32"];
const MOST_FEATURED = 6;

// Labels that a chart of lines names: plain ones, and those that lose least time to the fastest; names of one kernel once.
function featured(rows) {
  const labels = grouped(rows, (row) => row.label);
  if (labels.size <= MOST_FEATURED) return new Set(labels.keys());
  const timed = rows.filter((row) => row.exact);
  const best = new Map();
  for (const row of timed) best.set(row.workload, Math.min(row.ns, best.get(row.workload) ?? Infinity));
  const loss = new Map([...grouped(timed, (row) => row.label)].map(([label, mine]) => [label,
    mine.reduce((sum, row) => sum + Math.log(row.ns / best.get(row.workload)), 0) / mine.length + (mine.length <= best.size / 2)]));
  const kernels = (label) => new Map(labels.get(label).map((row) => [row.workload, row.kernel]));
  const alike = (a, b) => {
    const both = [...a.keys()].filter((key) => b.has(key));
    return both.length > 0 && both.every((key) => a.get(key) !== undefined && a.get(key) === b.get(key));
  };
  const chosen = PLAIN.filter((label) => labels.has(label));
  const order = (a, b) => (loss.get(a) ?? Infinity) - (loss.get(b) ?? Infinity) || (a < b ? -1 : 1);
  for (const label of [...labels.keys()].filter((one) => !chosen.includes(one)).sort(order)) {
    if (chosen.length < MOST_FEATURED && !chosen.some((one) => alike(kernels(label), kernels(one)))) chosen.push(label);
  }
  return new Set(chosen);
}

const DERIVED = {
  regret(rows) {
    const best = new Map();
    const exact = rows.filter((row) => row.ns !== undefined && row.exact);
    for (const row of exact) best.set(row.workload, Math.min(row.ns, best.get(row.workload) ?? Infinity));
    const found = new Map();
    for (const row of exact) {
      const one = found.get(row.label) || { label: row.label, shapes: 0, wins: 0, logs: 0, worst_regret: -1 };
      const regret = row.ns / best.get(row.workload) - 1;
      one.shapes += 1;
      one.wins += regret === 0 ? 1 : 0;
      one.logs += Math.log1p(regret);
      if (regret > one.worst_regret) Object.assign(one, { worst_regret: regret, worst_shape: row.shape });
      found.set(row.label, one);
    }
    return [...found.values()]
      .map((one) => ({ ...one, of: best.size, mean_regret: Math.expm1(one.logs / one.shapes) }))
      .sort((a, b) => a.mean_regret - b.mean_regret);
  },
  // Names of one kernel that are as fast are one, by the plainest of them.
  winners(rows) {
    return [...grouped(rows.filter((row) => row.exact), (row) => row.workload).values()].map((field) => {
      const kernelOf = (row) => (row.kernel === undefined ? row.label : `${row.kernel} ${row.rank}`);
      const names = [...grouped(field.sort((a, b) => a.plain - b.plain), kernelOf).values()].sort(([a], [b]) => a.ns - b.ns);
      const [[first, ...same], [next] = []] = names;
      const certain = !next ? "only one measured" : first.rank === next.rank ? "no, too close to call" : "yes";
      const regret = next ? next.ns / first.ns - 1 : undefined;
      const others = same.length ? same.map((row) => row.label).join(", ") : undefined;
      return { ...first, same: others, next_label: next?.label, regret, certain, field: field.length };
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
