// A command for a shell.
import type { CallRequest } from "../../docs/request.ts";
import { fieldsOf } from "./form.ts";

const quoted = (text: string) => `'${text.replaceAll("'", "'\\''")}'`;

export function curl(request: CallRequest): string {
  // --globoff: braces and brackets of an address are no patterns.
  const parts = [`curl --globoff --fail-with-body -X ${request.method} ${quoted(request.base + request.path)}`];
  if (request.needsKey) parts.push('-H "Authorization: Bearer $GATEWAY_API_KEY"');
  if (request.body !== null) parts.push("-H 'Content-Type: application/json'", `-d ${quoted(request.body)}`);
  if (request.form) {
    const { texts, file } = fieldsOf(request.form);
    for (const [name, value] of texts) parts.push(`-F ${quoted(`${name}=${value}`)}`);
    parts.push(`-F ${quoted(`${file[0]}=@${file[1]}`)}`);
  }
  return parts.join(" \\\n  ");
}
