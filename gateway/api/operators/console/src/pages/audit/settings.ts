// Settings of a stored tenant by the names that records have: limits.tokens_per_day, model_limits.bge.requests_per_day.
const ofMap = (map: unknown, name: string): unknown =>
  typeof map === "object" && map !== null && Object.hasOwn(map, name) ? ((map as Record<string, unknown>)[name] ?? null) : null;

// Null for what is not set.
export function presentValue(settings: Record<string, unknown>, field: string): unknown {
  const at = field.indexOf(".");
  if (at < 0) {
    const value = settings[field] ?? null;
    // A record has null for a list of no certificates.
    return field === "certificates" && Array.isArray(value) && !value.length ? null : value;
  }
  const [map, rest] = [settings[field.slice(0, at)], field.slice(at + 1)];
  if (field.slice(0, at) !== "model_limits") return ofMap(map, rest);
  // The name of a model may contain dots, that of a limit none.
  const end = rest.lastIndexOf(".");
  return ofMap(ofMap(map, rest.slice(0, end)), rest.slice(end + 1));
}
