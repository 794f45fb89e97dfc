// Tests of what the console computes, without a browser. Pages are tested in one: tests/browser.
import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { build } from "esbuild";

process.env.TZ = "Asia/Kathmandu";
globalThis.location = { origin: "http://gateway:8080", hash: "" };
globalThis.addEventListener = () => {};
globalThis.sessionStorage = { getItem: () => null };

const SOURCES = `
  export * from "./lib/csv.ts";
  export * from "./lib/format.ts";
  export { zoomOf } from "./lib/range.ts";
  export * from "./lib/samples/calls.ts";
  export { fieldProblems } from "./lib/field-problems.ts";
  export { affectedOf } from "./pages/models/affected.tsx";
  export { fieldsOf, formOf, settingsOf } from "./pages/upstreams/form.ts";
`;
const folder = mkdtempSync(join(tmpdir(), "console-"));
const outfile = join(folder, "console.mjs");
await build({
  stdin: { contents: SOURCES, resolveDir: join(import.meta.dirname, "src"), loader: "ts" },
  bundle: true,
  outfile,
  format: "esm",
  jsx: "automatic",
  jsxImportSource: "preact",
});
const { affectedOf, csvOf, embedCode, fieldProblems, fieldsOf, formOf, moment, rerankCode, settingsOf, zoomOf } = await import(outfile);
rmSync(folder, { recursive: true });

test("a moment has one form in local time", () => {
  const atS = Date.UTC(2026, 10, 28, 17, 45, 5) / 1000;
  assert.equal(moment(atS), "2026-11-28 23:30");
  assert.equal(moment(atS, "second"), "2026-11-28 23:30:05");
  assert.equal(moment(atS, "day"), "2026-11-28");
  for (const none of [null, undefined, Number.NaN, 1e308]) assert.equal(moment(none), "–");
});

test("a cell that a spreadsheet would run begins with an apostrophe", () => {
  for (const start of ["=", "+", "-", "@", "\t", "\r", "\n"]) {
    const cell = csvOf([[`${start}1+1`]]);
    assert.ok(/^"?'/.test(cell), JSON.stringify(cell));
  }
  assert.equal(csvOf([["a", 1, null, -2, 'b"c']]), 'a,1,,-2,"b""c"');
});

test("a zoom is one that the gateway takes and that can be shown", () => {
  const zoom = (text) => zoomOf(new URLSearchParams(text));
  assert.deepEqual(zoom("from=10&until=20"), [10, 20]);
  for (const text of ["", "from=10", "from=20&until=10", "from=0&until=1e308", "from=1&until=Infinity", "from=x&until=y"]) {
    assert.equal(zoom(text), null, text);
  }
});

test("tenants with errors are grouped, the one that failed last in front", () => {
  const calls = ["b", "a", "b", null].map((tenant, at) => ({ tenant, at_s: 9 - at }));
  assert.deepEqual(
    affectedOf(calls).map(({ tenant, failed, last }) => [tenant, failed, last.at_s]),
    [["b", 2, 9], ["a", 1, 8], [null, 1, 6]],
  );
});

test("the code of a call is that of the documentation", () => {
  const codes = embedCode("bge", ["it's"], { dimensions: 8, late: true });
  assert.deepEqual(Object.keys(codes), ["curl", "Python", "TypeScript", "Go", "Java"]);
  assert.match(codes.Python, /from openai import OpenAI[^]*model="bge"[^]*dimensions=8[^]*extra_body=\{"late": True\}/);
  assert.match(codes.curl, /'http:\/\/gateway:8080\/v1\/embeddings'[^]*it'\\''s/);
  assert.match(rerankCode("rank", "q", ["d"]).Go, /"http:\/\/gateway:8080\/v1\/rerank"/);
});

test("the settings of an upstream become a form and settings again", () => {
  const all = [
    [{ backend: "bedrock", model: "cohere.embed-v4:0", bedrock: { region: "eu-west-1", input_type: { query: "x" } } }, ["bedrock.region", "model"]],
    [{ backend: "openai", vendor: "mistral", api_key: "${UPSTREAM_KEY}", task: "embed" }, ["api_key", "task", "vendor"]],
    [{ backend: "nim", nim: { hosted: true } }, ["nim.hosted"]],
    [{ backend: "nim", nim: { hosted: false }, discover: "dns", replicas: ["http://a", "http://b"] }, ["discover", "replicas"]],
    [{ backend: "watsonx", watsonx: { project_id: "p", input_tokens: 512 } }, ["watsonx.input_tokens", "watsonx.project_id"]],
    [{ backend: "huggingface", huggingface: { task: "rerank" }, proxy: "none" }, ["huggingface.task"]],
    [{ backend: "azure", azure: { entra: true } }, []],
    [{ backend: "tei", when_unavailable: "refuse" }, []],
  ];
  for (const [settings, shown] of all) {
    const form = formOf({ name: "a", settings, problem: null });
    assert.deepEqual(Object.keys(form.values).sort(), shown);
    assert.deepEqual(settingsOf(form), settings);
  }
});

test("a field of a section is written next to the further settings", () => {
  const form = { backend: "vertex", values: { "vertex.project": " p ", "bedrock.region": "eu-west-1" }, more: '{"vertex": {"input_type": {}}}' };
  assert.deepEqual(settingsOf(form), { backend: "vertex", vertex: { input_type: {}, project: "p" } });
});

test("a problem of a section stands at its field", () => {
  const message = "nothing has changed: upstreams.a.vertex.project: is missing; upstreams.a.vertex.input_type: is none; upstreams.a.limits.x: no limit";
  const { fields } = fieldProblems({ status: 400, message }, "upstreams.a", fieldsOf("vertex").map(({ key }) => key));
  assert.deepEqual([...fields], [["vertex.project", "is missing"], ["vertex", "is none"], ["limits", "no limit"]]);
});
