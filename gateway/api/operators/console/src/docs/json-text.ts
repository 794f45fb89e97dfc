// JSON for people: indented, with each list of numbers on one line.
export const jsonText = (value: unknown) =>
  JSON.stringify(value, null, 2)
    // No text in JSON contains a line break, so that this changes lists only.
    .replace(/\[\n\s*(-?\d[\d.eE+-]*(?:,\n\s*-?\d[\d.eE+-]*)*)\n\s*\]/g, (_, numbers: string) => `[${numbers.replace(/\n\s*/g, " ")}]`);
