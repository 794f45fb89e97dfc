// Rates between two snapshots of /admin/status, which have counters only.

// A counter that is smaller than before belongs to a restarted gateway and counts from zero.
const increase = (earlier, later) => (later >= earlier ? later - earlier : later);

// What `later` has in addition to `earlier`.
function histogramBetween(earlier, later) {
  const total = (histogram) => histogram?.counts.at(-1) ?? 0;
  if (!earlier || earlier.bounds_s.length !== later.bounds_s.length || total(earlier) > total(later)) return later;
  return { bounds_s: later.bounds_s, counts: later.counts.map((value, index) => value - earlier.counts[index]) };
}

// Durations of calls that are not of class bulk.
const interactiveOf = (calls) => histogramBetween(calls.bulk, calls.durations);

export function quantile(durations, share) {
  const rank = share * (durations.counts.at(-1) ?? 0);
  if (!rank) return null;
  let lowerS = 0;
  let below = 0;
  for (const [index, boundS] of durations.bounds_s.entries()) {
    const reached = durations.counts[index];
    if (reached >= rank) return lowerS + ((boundS - lowerS) * (rank - below)) / (reached - below);
    [lowerS, below] = [boundS, reached];
  }
  return lowerS;
}

export function ratesBetween(previous, snapshot) {
  const seconds = previous ? snapshot.at_s - previous.at_s : 0;
  if (seconds <= 0) return null;
  const earlierTenants = new Map(previous.tenants.map((tenant) => [tenant.name, tenant]));
  const earlierLanes = new Map(previous.lanes.map((lane) => [lane.upstream, lane]));
  const outcomes = Object.entries(snapshot.calls.outcomes).map(([kind, value]) => [
    kind,
    increase(previous.calls.outcomes[kind] ?? 0, value) / seconds,
  ]);
  const tenants = new Map(
    snapshot.tenants.map((tenant) => {
      const earlier = earlierTenants.get(tenant.name) ?? { calls: 0, tokens: 0, refused: 0 };
      const rateOf = (field) => increase(earlier[field], tenant[field]) / seconds;
      return [tenant.name, { calls: rateOf("calls"), tokens: rateOf("tokens"), refused: rateOf("refused") }];
    }),
  );
  return {
    calls: outcomes.reduce((sum, [, value]) => sum + value, 0),
    tokens: [...tenants.values()].reduce((sum, tenant) => sum + tenant.tokens, 0),
    failures: outcomes.filter(([kind, value]) => kind !== "ok" && value > 0),
    durations: histogramBetween(interactiveOf(previous.calls), interactiveOf(snapshot.calls)),
    attempts: new Map(
      snapshot.lanes.map((lane) => [
        lane.upstream,
        histogramBetween(earlierLanes.get(lane.upstream)?.attempts, lane.attempts),
      ]),
    ),
    tenants,
  };
}
