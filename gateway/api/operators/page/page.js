// The page at /ui. Rules: the key stays in `key` below, in no storage, cookie or address; whatever comes from a
// server or a person is put in as text, never as markup.
"use strict";

const LOOK_EVERY_MS = 1000;
const STATUS_TIMEOUT_MS = 5000;
const CALL_TIMEOUT_MS = 120000;
const TEXTS_MAX = 40;

let key = "";
let before = null;
let looking = null;
let asked = 0;

const $ = (id) => document.getElementById(id);

// ---- asking --------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, body, timeoutMs = CALL_TIMEOUT_MS) {
  const headers = { accept: "application/json" };
  if (!/^[!-~]*$/.test(key)) throw new Refused(0, "a key is of plain letters, digits and signs, without spaces");
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  let reply;
  try {
    reply = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(timeoutMs),
    });
  } catch (error) {
    throw new Refused(0, error.name === "TimeoutError" ? "no answer in time" : "the gateway does not answer");
  }
  const told = await reply.json().catch(() => null);
  if (!reply.ok) throw new Refused(reply.status, reasonOf(reply.status, told));
  return { told, headers: reply.headers };
}

function reasonOf(status, told) {
  const said = told?.error?.message ?? told?.message ?? told?.error ?? `status ${status}`;
  if (status === 401) return key ? `${said}: this key is not known here` : `${said}: type an API key above`;
  return String(said);
}

// ---- building ------------------------------------------------------------------------------------------

function made(tag, text = "", classes = "") {
  const element = document.createElement(tag);
  if (text !== "") element.textContent = text;
  if (classes) element.className = classes;
  return element;
}

function tableOf(columns, rows, none = "None yet.") {
  if (!rows.length) return made("p", none, "note");
  const table = made("table");
  const head = table.createTHead().insertRow();
  for (const [name, kind] of columns) {
    const cell = made("th", name, kind === "number" ? "number" : "");
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((value, index) => {
      line.append(value instanceof Node ? value : made("td", value, columns[index][1] ?? ""));
    });
  }
  return table;
}

const STATES = { up: "good", ready: "good", down: "bad", refused: "bad", unavailable: "bad" };

function stateCell(state) {
  const cell = made("td");
  cell.append(made("span", state, `state ${STATES[state] ?? ""}`));
  return cell;
}

function tell(place, text) {
  place.textContent = text;
  place.hidden = !text;
}

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const count = (value) => whole.format(value);
const rate = (value) => (value === null ? "–" : short.format(value));
const milliseconds = (seconds) => (seconds === null ? "–" : `${short.format(seconds * 1000)} ms`);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function span(seconds) {
  const whole = Math.floor(seconds);
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min`;
  return whole < 172800 ? `${Math.floor(whole / 3600)} h` : `${Math.floor(whole / 86400)} d`;
}

// ---- status --------------------------------------------------------------------------------------------

const grown = (was, now) => (now >= was ? now - was : now);

function during(was, now) {
  const total = (one) => one?.counts.at(-1) ?? 0;
  if (!was || was.bounds_s.length !== now.bounds_s.length || total(was) > total(now)) return now;
  return { bounds_s: now.bounds_s, counts: now.counts.map((value, index) => value - was.counts[index]) };
}

function quantile(durations, share) {
  const rank = share * (durations.counts.at(-1) ?? 0);
  if (!rank) return null;
  let lowerS = 0;
  let below = 0;
  for (const [index, boundS] of durations.bounds_s.entries()) {
    const reached = durations.counts[index];
    if (reached >= rank) return lowerS + ((boundS - lowerS) * (rank - below)) / (reached - below);
    [lowerS, below] = [boundS, reached];
  }
  return lowerS;
}

function ratesOf(now) {
  const seconds = before ? now.at_s - before.at_s : 0;
  if (seconds <= 0) return null;
  const wereTenants = new Map(before.tenants.map((one) => [one.name, one]));
  const wereLanes = new Map(before.lanes.map((one) => [one.upstream, one]));
  const outcomes = Object.entries(now.calls.outcomes).map(([kind, value]) => [
    kind,
    grown(before.calls.outcomes[kind] ?? 0, value) / seconds,
  ]);
  const tenants = new Map(
    now.tenants.map((one) => {
      const was = wereTenants.get(one.name) ?? { calls: 0, tokens: 0, refused: 0 };
      const each = (field) => grown(was[field], one[field]) / seconds;
      return [one.name, { calls: each("calls"), tokens: each("tokens"), refused: each("refused") }];
    }),
  );
  return {
    calls: outcomes.reduce((sum, [, value]) => sum + value, 0),
    tokens: [...tenants.values()].reduce((sum, one) => sum + one.tokens, 0),
    failures: outcomes.filter(([kind, value]) => kind !== "ok" && value > 0),
    durations: during(before.calls.durations, now.calls.durations),
    attempts: new Map(
      now.lanes.map((one) => [one.upstream, during(wereLanes.get(one.upstream)?.attempts, one.attempts)]),
    ),
    tenants,
  };
}

function showFigures(now, rates) {
  const figures = [
    ["calls/s", rate(rates?.calls ?? null)],
    ["tokens/s", rate(rates?.tokens ?? null)],
    ["p50", rates ? milliseconds(quantile(rates.durations, 0.5)) : "–"],
    ["p95", rates ? milliseconds(quantile(rates.durations, 0.95)) : "–"],
    ["failures/s", rates ? rate(rates.failures.reduce((sum, [, value]) => sum + value, 0)) : "–"],
    ["in flight", count(now.calls_in_flight)],
  ];
  $("figures").replaceChildren(
    ...figures.map(([name, value]) => {
      const box = made("div");
      box.append(made("dt", name), made("dd", value));
      return box;
    }),
  );
  const kinds = (rates?.failures ?? []).map(([kind, value]) => `${kind} ${rate(value)}/s`);
  $("failures").replaceChildren(...(kinds.length ? [made("p", `Failures: ${kinds.join(" · ")}`, "problem")] : []));
}

function showLanes(now, rates) {
  const columns = [["upstream"], ["waiting inputs", "number"], ["tokens", "number"], ["oldest", "number"]];
  columns.push(["in flight", "number"], ["window", "number"], ["attempt p50", "number"]);
  const rows = now.lanes.map((one) => [
    one.upstream,
    count(one.queued_inputs),
    count(one.queued_tokens),
    one.queued_inputs ? milliseconds(one.oldest_s) : "–",
    count(one.in_flight_batches),
    count(one.window_batches),
    rates ? milliseconds(quantile(rates.attempts.get(one.upstream), 0.5)) : "–",
  ]);
  $("lanes").replaceChildren(tableOf(columns, rows));
}

function showReplicas(now) {
  const columns = [["upstream"], ["replica", "text"], ["state"], ["for", "number"], ["in flight", "number"]];
  columns.push(["window", "number"], ["latency", "number"], ["attempts", "number"], ["failed", "number"]);
  columns.push(["why", "text"]);
  const rows = now.replicas.map((one) => [
    one.upstream,
    one.name,
    stateCell(one.state),
    one.since_s === null ? "–" : span(now.at_s - one.since_s),
    count(one.in_flight_batches),
    count(one.window_batches),
    milliseconds(one.latency_s),
    count(one.attempts),
    count(one.failed),
    one.reason,
  ]);
  $("replicas").replaceChildren(tableOf(columns, rows));
}

function showModels(now) {
  const columns = [["model", "text"], ["upstream"], ["backend"], ["state"], ["operations", "text"]];
  columns.push(["width", "number"], ["vector space", ""]);
  const rows = now.models.map((one) => [
    one.name,
    one.upstream,
    one.backend,
    stateCell(one.state),
    one.operations.join(", "),
    one.dimensions === null ? "–" : count(one.dimensions),
    one.fingerprint ?? "–",
  ]);
  $("models").replaceChildren(tableOf(columns, rows));
}

function showTenants(now, rates) {
  const columns = [["tenant", "text"], ["calls/s", "number"], ["tokens/s", "number"], ["refused/s", "number"]];
  columns.push(["calls", "number"], ["tokens", "number"], ["refused", "number"]);
  const rows = now.tenants.map((one) => {
    const own = rates?.tenants.get(one.name);
    return [
      one.name,
      rate(own?.calls ?? null),
      rate(own?.tokens ?? null),
      rate(own?.refused ?? null),
      count(one.calls),
      count(one.tokens),
      count(one.refused),
    ];
  });
  $("tenants").replaceChildren(tableOf(columns, rows, "Nobody has called yet."));
}

function showChanges(now) {
  const columns = [["at"], ["of", "text"], ["now"], ["why", "text"]];
  const rows = now.changes.slice(0, 12).map((one) => [clock(one.at_s), one.subject, one.what, one.reason]);
  $("changes").replaceChildren(tableOf(columns, rows, "None."));
}

// Drawing anew would take away what somebody has marked to copy.
function isBeingMarked(place) {
  const marked = getSelection();
  return !marked.isCollapsed && place.contains(marked.anchorNode);
}

function showStatus(now) {
  if (isBeingMarked($("status-body"))) return;
  const rates = ratesOf(now);
  const workers = now.workers > 1 ? ` · ${now.workers} workers, told by number ${now.worker}` : "";
  const store = now.store.away ? `${now.store.kind}, AWAY` : now.store.kind;
  const up = `up ${span(now.uptime_s)}`;
  $("status-line").textContent = `version ${now.version} · ${up}${workers} · quotas in ${store} · ${clock(now.at_s)}`;
  showFigures(now, rates);
  showLanes(now, rates);
  showReplicas(now);
  showModels(now);
  showTenants(now, rates);
  showChanges(now);
  $("status-body").hidden = false;
  before = now;
}

async function look() {
  if (document.hidden) return next();
  const own = ++asked;
  try {
    const { told } = await ask("/admin/status", null, STATUS_TIMEOUT_MS);
    if (own !== asked) return;
    tell($("status-problem"), "");
    showStatus(told);
  } catch (error) {
    if (own !== asked) return;
    $("status-line").textContent = before ? `Last seen at ${clock(before.at_s)}.` : "Not seen yet.";
    tell($("status-problem"), statusProblem(error));
    if (error.status >= 400 && error.status < 500) {
      // Asking again and again with a wrong key would slow this address down.
      $("status-body").hidden = true;
      return;
    }
  }
  next();
}

function statusProblem(error) {
  if (error.status === 403) return `${error.message}: the status needs a key with the scope admin`;
  return error.status ? error.message : `${error.message}; asking again`;
}

function next() {
  clearTimeout(looking);
  looking = setTimeout(look, LOOK_EVERY_MS);
}

// ---- playground ----------------------------------------------------------------------------------------

async function listModels() {
  $("models-problem").className = key ? "problem" : "note";
  if (!key) return tell($("models-problem"), "Type an API key above to try the models.");
  try {
    const { told } = await ask("/v1/models", null, STATUS_TIMEOUT_MS);
    tell($("models-problem"), "");
    offer($("embed-model"), told.data, "embed");
    offer($("rerank-model"), told.data, "rerank");
    offerChoices(told.data.filter((one) => one.operations.includes("embed")));
  } catch (error) {
    const away = "Operators have an address of their own here, where models are not called: /ui shows the status alone.";
    tell($("models-problem"), error.status === 404 ? away : `The models are not listed: ${error.message}`);
  }
}

function offer(select, models, operation) {
  const chosen = select.value;
  const names = models.filter((one) => one.operations.includes(operation)).map((one) => one.id);
  select.replaceChildren(...names.map((name) => made("option", name)));
  if (names.includes(chosen)) select.value = chosen;
}

function offerChoices(models) {
  $("compare-models").replaceChildren(
    ...models.map((one, index) => {
      const label = made("label");
      const box = made("input");
      box.type = "checkbox";
      box.name = "compared";
      box.value = one.id;
      box.checked = index < 4;
      label.append(box, made("span", one.id));
      return label;
    }),
  );
}

async function embedded(model, input) {
  const { told, headers } = await ask("/v1/embeddings", { model, input, encoding_format: "float" });
  return {
    vectors: told.data.map((one) => one.embedding),
    tokens: told.usage.total_tokens,
    space: headers.get("x-embedding-fingerprint"),
    cut: headers.get("x-truncated-inputs"),
  };
}

function cosine(one, other) {
  let product = 0;
  let ones = 0;
  let others = 0;
  for (let index = 0; index < one.length; index++) {
    product += one[index] * other[index];
    ones += one[index] ** 2;
    others += other[index] ** 2;
  }
  return ones && others ? product / Math.sqrt(ones * others) : 0;
}

// Pale where little is alike, deep blue where all is: 0 and below to 1.
function shaded(cell, value) {
  const depth = Math.min(1, Math.max(0, value));
  cell.style.backgroundColor = `hsl(210 ${40 + 40 * depth}% ${96 - 66 * depth}%)`;
  // Where black and white stand out from the ground alike.
  cell.style.color = depth > 0.75 ? "#ffffff" : "#000000";
  return cell;
}

function heatMap(caption, names, between) {
  const table = made("table", "", "heat");
  table.append(made("caption", caption));
  const head = table.createTHead().insertRow();
  head.append(made("td"));
  names.forEach((_, index) => {
    const cell = made("th", String(index + 1));
    cell.scope = "col";
    head.append(cell);
  });
  const body = table.createTBody();
  names.forEach((name, row) => {
    const line = body.insertRow();
    const title = made("th", `${row + 1}. ${name}`);
    title.scope = "row";
    line.append(title);
    names.forEach((_, column) => line.append(between(row, column)));
  });
  const wide = made("div", "", "wide");
  wide.tabIndex = 0;
  wide.append(table);
  return wide;
}

function cosineCell(one, other) {
  if (one.length !== other.length) return made("td", `${one.length} ≠ ${other.length}`);
  const value = cosine(one, other);
  return shaded(made("td", value.toFixed(3)), value);
}

const lines = (text) => text.split("\n").map((one) => one.trim()).filter(Boolean);
const shortened = (text) => (text.length > 60 ? `${text.slice(0, 59)}…` : text);

async function embedTexts() {
  const texts = lines($("embed-texts").value);
  if (!texts.length) throw new Refused(0, "Write at least one text.");
  if (texts.length > TEXTS_MAX) throw new Refused(0, `${texts.length} texts; the picture holds ${TEXTS_MAX}.`);
  const { vectors, tokens, space, cut } = await embedded($("embed-model").value, texts);
  const notes = [`${vectors.length} vectors of ${vectors[0].length} numbers`, `${count(tokens)} tokens`];
  if (space) notes.push(`vector space ${space}`);
  if (cut) notes.push(`cut: ${cut}`);
  const between = (row, column) => cosineCell(vectors[row], vectors[column]);
  return [made("p", notes.join(" · "), "note"), heatMap("Cosine similarity", texts.map(shortened), between)];
}

async function rerankDocuments() {
  const [query, documents] = [$("rerank-query").value.trim(), lines($("rerank-documents").value)];
  if (!query || !documents.length) throw new Refused(0, "Write a query and at least one document.");
  const { told } = await ask("/v1/rerank", { model: $("rerank-model").value, query, documents });
  const scores = told.results.map((one) => one.relevance_score);
  const [least, most] = [Math.min(0, ...scores), Math.max(1, ...scores)];
  const rows = told.results.map((one, place) => {
    const cell = made("td");
    const bar = made("meter");
    Object.assign(bar, { min: least, max: most, value: one.relevance_score });
    bar.setAttribute("aria-hidden", "true");
    cell.append(bar);
    return [String(place + 1), one.relevance_score.toFixed(4), cell, documents[one.index]];
  });
  return [tableOf([["#", "number"], ["score", "number"], [""], ["document", "text"]], rows)];
}

async function compareModels() {
  const names = [...document.querySelectorAll("input[name=compared]:checked")].map((one) => one.value);
  const text = $("compare-text").value.trim();
  if (names.length < 2 || !text) throw new Refused(0, "Write a text, and choose two models or more.");
  const replies = await Promise.all(
    names.map((name) => embedded(name, [text]).catch((error) => ({ problem: error.message }))),
  );
  const rows = replies.map((one, index) =>
    one.problem
      ? [names[index], made("td", one.problem, "problem"), "", ""]
      : [names[index], count(one.vectors[0].length), count(one.tokens), one.space ?? "–"],
  );
  const columns = [["model", "text"], ["width", "number"], ["tokens", "number"], ["vector space"]];
  const told = replies.map((one, index) => ({ name: names[index], vector: one.vectors?.[0] })).filter((one) => one.vector);
  const answer = [tableOf(columns, rows)];
  if (told.length > 1) {
    const between = (row, column) => cosineCell(told[row].vector, told[column].vector);
    answer.push(heatMap("Cosine of the same text", told.map((one) => one.name), between));
    const widths = new Set(told.map((one) => one.vector.length));
    if (widths.size > 1) {
      answer.push(made("p", "Vectors of unequal width cannot be compared.", "note"));
    }
    answer.push(made("p", "Only models of one vector space are meant to agree; others differ, and rightly so.", "note"));
  }
  return answer;
}

function onSubmit(name, work) {
  $(`${name}-form`).addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = event.target.querySelector("button");
    const answer = $(`${name}-answer`);
    button.disabled = true;
    try {
      answer.replaceChildren(...(await work()));
    } catch (error) {
      const told = error instanceof Refused ? error.message : "the answer was not what this page understands";
      answer.replaceChildren(made("p", told, "problem"));
    } finally {
      button.disabled = false;
    }
  });
}

// ---- beginning -----------------------------------------------------------------------------------------

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  before = null;
  look();
  listModels();
});
document.addEventListener("visibilitychange", () => document.hidden || !before || look());
onSubmit("embed", embedTexts);
onSubmit("rerank", rerankDocuments);
onSubmit("compare", compareModels);
look();
listModels();
