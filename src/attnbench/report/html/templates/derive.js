// Rows that depend on what passes the filters, or on the baseline that was chosen.
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
    return [...found.values()].map((one) => ({ ...one, mean_regret: Math.expm1(one.logs / one.shapes) }));
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
  errors: (rows) => rows.map((row) => ({ ...row, share: shareOfAllowed(row) })),
};

function shareOfAllowed(row) {
  const shares = [[row.error, row.allowed], [row.gradient, row.gradient_allowed]];
  const known = shares.filter(([error, allowed]) => error !== undefined && allowed).map(([error, allowed]) => error / allowed);
  return known.length ? Math.max(...known) : undefined;
}
