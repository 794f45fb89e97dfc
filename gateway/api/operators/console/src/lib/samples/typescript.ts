// TypeScript: fetch, as Node 20, Deno, Bun and browsers have it.
import type { CallRequest } from "../../docs/request.ts";
import { fieldsOf } from "./form.ts";

const indented = (text: string) => text.replaceAll("\n", "\n  ");

export function typescript(request: CallRequest): string {
  const headers: string[] = [];
  if (request.needsKey) headers.push("authorization: `Bearer ${process.env.GATEWAY_API_KEY}`");
  if (request.body !== null) headers.push('"content-type": "application/json"');
  const options = [`method: ${JSON.stringify(request.method)},`];
  if (headers.length) options.push(`headers: { ${headers.join(", ")} },`);
  let before = "";
  if (request.body !== null) options.push(`body: JSON.stringify(${indented(request.body)}),`);
  if (request.form) {
    const { texts, file } = fieldsOf(request.form);
    before = `import { openAsBlob } from "node:fs";

const form = new FormData();
${texts.map(([name, value]) => `form.append(${JSON.stringify(name)}, ${JSON.stringify(value)});\n`).join("")}form.append(${JSON.stringify(file[0])}, await openAsBlob(${JSON.stringify(file[1])}), ${JSON.stringify(file[1])});

`;
    options.push("body: form,");
  }
  options.push("signal: AbortSignal.timeout(120_000),");
  return `${before}const reply = await fetch(${JSON.stringify(request.base + request.path)}, {
  ${options.join("\n  ")}
});
if (!reply.ok) throw new Error(\`\${reply.status} \${await reply.text()}\`);
console.log(await reply.text());

export {};`;
}
