// Stages of a call, in their order, each with its color in every bar.
export const STAGES: Record<string, { color: string; means: string }> = {
  parse: { color: "series-5", means: "reading and checking the body" },
  auth: { color: "series-4", means: "the key and its permissions" },
  fetch: { color: "series-8", means: "loading pictures and recordings" },
  quota: { color: "series-6", means: "reserving and settling quotas" },
  queue: { color: "series-2", means: "waiting for a free replica" },
  cache: { color: "series-7", means: "looking up vectors computed before" },
  upstream: { color: "series-1", means: "computing at the replica" },
  encode: { color: "series-3", means: "writing the reply" },
  other: { color: "line", means: "all else, such as the network to the caller" },
};

export interface StagePart {
  name: string;
  seconds: number;
  // Of the whole bar, from 0 to 1.
  share: number;
}

const SHOWN_SHARE = 0.005;

// The parts of a call's time. Stages of slices that ran side by side may take longer together than the call.
export function stageParts(stages: Record<string, number>, durationS: number): StagePart[] {
  const known = Object.keys(STAGES)
    .filter((name) => (stages[name] ?? 0) > 0)
    .map((name) => ({ name, seconds: stages[name] ?? 0 }));
  const sum = known.reduce((total, { seconds }) => total + seconds, 0);
  const parts = durationS - sum > durationS * SHOWN_SHARE ? [...known, { name: "other", seconds: durationS - sum }] : known;
  const whole = Math.max(sum, durationS) || 1;
  return parts.map((part) => ({ ...part, share: part.seconds / whole }));
}
