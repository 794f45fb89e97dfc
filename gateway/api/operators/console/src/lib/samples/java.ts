// Java 17: java.net.http. Run it with `java Call.java`.
import type { CallRequest } from "../../docs/request.ts";
import { fieldsOf } from "./form.ts";

const INDENT = "        ";

// A block of text; its end decides about indentation and the last line.
function block(text: string) {
  const escaped = text.replaceAll("\\", "\\\\").replaceAll('"""', '\\"\\"\\"');
  return `"""\n${escaped.replace(/^/gm, `${INDENT}    `)}"""`;
}

function formLines(request: CallRequest) {
  const { texts, file } = fieldsOf(request.form ?? {});
  const head = (name: string, more = "") => `"--part\\r\\nContent-Disposition: form-data; name=\\"${name}\\"${more}\\r\\n\\r\\n"`;
  const parts = texts.map(([name, value]) => `${head(name)} + ${JSON.stringify(`${value}\r\n`)}`);
  const named = head(file[0], `; filename=\\"${file[1].replaceAll(/["\\]/g, "_")}\\"`);
  return `${INDENT}var body = new java.io.ByteArrayOutputStream();
${[...parts, named].map((part) => `${INDENT}body.writeBytes((${part}).getBytes());\n`).join("")}${INDENT}body.writeBytes(java.nio.file.Files.readAllBytes(java.nio.file.Path.of(${JSON.stringify(file[1])})));
${INDENT}body.writeBytes("\\r\\n--part--\\r\\n".getBytes());
`;
}

export function java(request: CallRequest): string {
  let before = "";
  let body = "HttpRequest.BodyPublishers.noBody()";
  const headers: string[] = [];
  if (request.needsKey) headers.push('.header("Authorization", "Bearer " + System.getenv("GATEWAY_API_KEY"))');
  if (request.body !== null) {
    before = `${INDENT}var body = ${block(request.body)};\n`;
    body = "HttpRequest.BodyPublishers.ofString(body)";
    headers.push('.header("Content-Type", "application/json")');
  }
  if (request.form) {
    before = formLines(request);
    body = "HttpRequest.BodyPublishers.ofByteArray(body.toByteArray())";
    headers.push('.header("Content-Type", "multipart/form-data; boundary=part")');
  }
  // java.net.URI takes no braces, which stand for a name that is not typed yet.
  const address = (request.base + request.path).replaceAll("{", "%7B").replaceAll("}", "%7D");
  const calls = [".timeout(Duration.ofMinutes(2))", ...headers, `.method(${JSON.stringify(request.method)}, ${body})`, ".build();"];
  return `import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;

public class Call {
    public static void main(String[] args) throws Exception {
${before}${INDENT}var request = HttpRequest.newBuilder(URI.create(${JSON.stringify(address)}))
${calls.map((call) => `${INDENT}    ${call}\n`).join("")}${INDENT}var reply = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
${INDENT}System.out.println(reply.statusCode());
${INDENT}System.out.println(reply.body());
    }
}`;
}
