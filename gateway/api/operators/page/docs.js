// Script of the page at /docs: sends the requests of its forms. Rules: the API key stays in its field, never in
// storage, a cookie or an address; requests go to this gateway only; replies are shown as text.
"use strict";

const TIMEOUT_MS = 120000;
const SHOWN_CHARACTERS = 20000;
// The gateway may be below a path of a proxy.
const base = location.pathname.replace(/\/docs(\/reference)?\/?$/, "");

function addressOf(path) {
  if (/[{}]/.test(path)) throw new Error("put a name in place of the braces in the path");
  const address = new URL(base + path, location.origin);
  if (!path.startsWith("/") || address.origin !== location.origin) throw new Error("a path begins with one slash");
  return address;
}

function requestOf(form) {
  const key = document.getElementById("key").value.trim();
  if (!/^[!-~]*$/.test(key)) throw new Error("a key is of plain letters, digits and signs, without spaces");
  const options = { method: form.dataset.method, headers: {} };
  if (key) options.headers.authorization = `Bearer ${key}`;
  if (form.elements.body) {
    try {
      JSON.parse(form.elements.body.value);
    } catch (error) {
      throw new Error(`the body is not JSON: ${error.message}`);
    }
    options.headers["content-type"] = "application/json";
    options.body = form.elements.body.value;
  }
  return options;
}

async function textOf(reply) {
  const kind = reply.headers.get("content-type") ?? "";
  if (!/json|text|javascript|xml/.test(kind)) return `${(await reply.arrayBuffer()).byteLength} bytes of ${kind || "no type"}`;
  let text = await reply.text();
  if (kind.includes("json")) {
    try {
      text = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      // Shown as it came.
    }
  }
  return text.length > SHOWN_CHARACTERS ? `${text.slice(0, SHOWN_CHARACTERS)}\n… ${text.length} characters` : text;
}

async function answer(form) {
  const begun = performance.now();
  const reply = await fetch(addressOf(form.elements.path.value.trim()), {
    ...requestOf(form),
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  const text = await textOf(reply);
  const headers = [...reply.headers].map(([name, value]) => `${name}: ${value}`).join("\n");
  return `${reply.status} ${reply.statusText}, ${Math.round(performance.now() - begun)} ms\n${headers}\n\n${text}`;
}

async function submit(event) {
  event.preventDefault();
  const form = event.target;
  const output = form.querySelector("pre");
  const button = form.querySelector("button");
  button.disabled = true;
  output.hidden = false;
  output.textContent = "waiting for the reply";
  try {
    output.textContent = await answer(form);
  } catch (error) {
    output.textContent = error.name === "TimeoutError" ? "no reply in time" : error.message;
  } finally {
    button.disabled = false;
  }
}

// Operation that a model in /v1/models must list to answer a path.
function operationOf(path) {
  if (/rank|score/.test(path)) return "rerank";
  return /classify|predict/.test(path) ? "classify" : "embed";
}

// The examples name models of the documentation: those of this gateway take their place, unless one is typed.
async function nameModels() {
  const key = document.getElementById("key").value.trim();
  const options = { headers: { authorization: `Bearer ${key}` }, credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) };
  const reply = await fetch(`${base}/v1/models`, options);
  if (!reply.ok) return;
  const models = (await reply.json()).data;
  const known = new Set(models.map((model) => model.id));
  for (const form of document.querySelectorAll("form[data-method=POST]")) {
    const body = form.elements.body;
    const model = models.find((served) => (served.operations ?? []).includes(operationOf(form.elements.path.value)));
    if (!body || !model) continue;
    if (!/^\/(admin|v1\/models)/.test(form.elements.path.value)) form.elements.path.value = form.elements.path.value.replace("{name}", model.id);
    body.value = body.value.replace(/"model":\s*"(models\/)?([^"\\]*)"/g, (whole, prefix, name) =>
      known.has(name) ? whole : `"model": ${JSON.stringify((prefix ?? "") + model.id)}`,
    );
  }
}

document.getElementById("key").addEventListener("change", () => nameModels().catch(() => {}));
for (const form of document.querySelectorAll("form[data-method]")) form.addEventListener("submit", submit);
const whole = document.getElementById("document");
whole.href = base + whole.getAttribute("href");
for (const element of document.querySelectorAll(".try")) element.hidden = false;
