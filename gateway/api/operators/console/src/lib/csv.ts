// Tables as CSV files. A cell that a spreadsheet would run as a formula begins with an apostrophe.
const DANGEROUS = /^[=+\-@\t\r\n]/;

function cell(value: string | number | null) {
  if (value === null) return "";
  if (typeof value === "number") return String(value);
  const text = DANGEROUS.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const csvOf = (rows: (string | number | null)[][]) => rows.map((row) => row.map(cell).join(",")).join("\r\n");

// Lets the browser write a text to a file.
export function saveFile(text: string, type: string, name: string) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
