// Go: net/http.
import type { CallRequest } from "../../docs/request.ts";
import { fieldsOf } from "./form.ts";

// A raw string is easier to read; it cannot contain a backtick.
const literal = (text: string) => (text.includes("`") || text.includes("\r") ? JSON.stringify(text) : `\`${text}\``);

const CHECK = "\tif err != nil {\n\t\tpanic(err)\n\t}\n";

function formLines(request: CallRequest) {
  const { texts, file } = fieldsOf(request.form ?? {});
  const fields = texts.map(([name, value]) => `\tform.WriteField(${JSON.stringify(name)}, ${JSON.stringify(value)})\n`);
  return `\tcontent, err := os.ReadFile(${JSON.stringify(file[1])})
${CHECK}\tvar body bytes.Buffer
\tform := multipart.NewWriter(&body)
${fields.join("")}\tpart, err := form.CreateFormFile(${JSON.stringify(file[0])}, ${JSON.stringify(file[1])})
${CHECK}\tpart.Write(content)
\tform.Close()
`;
}

export function go(request: CallRequest): string {
  const imports = ["fmt", "io", "net/http", "time"];
  if (request.needsKey || request.form) imports.push("os");
  let before = "";
  let body = "nil";
  const headers: string[] = [];
  if (request.needsKey) headers.push('\trequest.Header.Set("Authorization", "Bearer "+os.Getenv("GATEWAY_API_KEY"))\n');
  if (request.body !== null) {
    imports.push("strings");
    before = `\tbody := strings.NewReader(${literal(request.body)})\n`;
    body = "body";
    headers.push('\trequest.Header.Set("Content-Type", "application/json")\n');
  }
  if (request.form) {
    imports.push("bytes", "mime/multipart");
    before = formLines(request);
    body = "&body";
    headers.push('\trequest.Header.Set("Content-Type", form.FormDataContentType())\n');
  }
  const names = imports.sort().map((name) => `\t"${name}"\n`);
  return `package main

import (
${names.join("")})

func main() {
${before}\trequest, err := http.NewRequest(${JSON.stringify(request.method)}, ${JSON.stringify(request.base + request.path)}, ${body})
${CHECK}${headers.join("")}\tclient := http.Client{Timeout: 2 * time.Minute}
\treply, err := client.Do(request)
${CHECK}\tdefer reply.Body.Close()
\ttext, err := io.ReadAll(reply.Body)
${CHECK}\tfmt.Println(reply.Status)
\tfmt.Println(string(text))
}`;
}
