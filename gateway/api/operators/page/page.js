// Script of the page at /ui. Rules: the API key stays in the variable `key`, never in storage, a cookie or an
// address. Text from a server or a person is inserted as text, never as markup.
"use strict";

const REFRESH_INTERVAL_MS = 1000;
const STATUS_TIMEOUT_MS = 5000;
const CALL_TIMEOUT_MS = 120000;
const TEXTS_MAX = 40;
const IMAGES_MAX = 12;
const IMAGE_BYTES_MAX = 4000000;
const PAGE_WIDTH = 800;

let key = "";
let previous = null;
let refreshTimer = null;
let requestNumber = 0;
let images = [];

const $ = (id) => document.getElementById(id);

// ---- requests ------------------------------------------------------------------------------------------

class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function send(path, body, timeoutMs = CALL_TIMEOUT_MS) {
  const headers = { accept: "application/json" };
  if (!/^[!-~]*$/.test(key)) throw new RequestError(0, "a key is of plain letters, digits and signs, without spaces");
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
    throw new RequestError(0, error.name === "TimeoutError" ? "no answer in time" : "the gateway does not answer");
  }
  const content = await reply.json().catch(() => null);
  if (!reply.ok) throw new RequestError(reply.status, reasonOf(reply.status, content));
  return { content, headers: reply.headers };
}

function reasonOf(status, content) {
  if (status === 401 && !key) return "type an API key above";
  return String(content?.error?.message ?? content?.message ?? content?.error ?? `status ${status}`);
}

// ---- elements ------------------------------------------------------------------------------------------

function createElement(tag, text = "", classes = "") {
  const element = document.createElement(tag);
  if (text !== "") element.textContent = text;
  if (classes) element.className = classes;
  return element;
}

// A table that is wider than the page scrolls by itself; the page does not.
function scrollable(table, name) {
  const region = createElement("div", "", "wide");
  region.tabIndex = 0;
  region.setAttribute("role", "region");
  region.setAttribute("aria-label", name);
  region.append(table);
  return region;
}

function createTable(columns, rows, emptyText = "None yet.") {
  if (!rows.length) return createElement("p", emptyText, "note");
  const table = createElement("table");
  const head = table.createTHead().insertRow();
  for (const [name, kind] of columns) {
    const cell = createElement("th", name, kind === "number" || kind === "bar" ? kind : "");
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((value, index) => {
      line.append(value instanceof Node ? value : createElement("td", value, columns[index][1] ?? ""));
    });
  }
  return table;
}

const GOOD = ["up", "ready", "running", "downloaded", "verified"];
const BAD = ["down", "refused", "unavailable", "failed"];
const STATES = Object.fromEntries([...GOOD.map((state) => [state, "good"]), ...BAD.map((state) => [state, "bad"])]);

function stateCell(state) {
  const cell = createElement("td");
  cell.append(createElement("span", state, `state ${STATES[state] ?? ""}`));
  return cell;
}

function showMessage(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

const integerFormat = new Intl.NumberFormat("en");
const shortFormat = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const count = (value) => integerFormat.format(value);
const rate = (value) => (value === null ? "–" : shortFormat.format(value));
const milliseconds = (seconds) => (seconds === null ? "–" : `${shortFormat.format(seconds * 1000)} ms`);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function duration(seconds) {
  const total = Math.floor(seconds);
  if (total < 120) return `${total} s`;
  if (total < 7200) return `${Math.floor(total / 60)} min`;
  return total < 172800 ? `${Math.floor(total / 3600)} h` : `${Math.floor(total / 86400)} d`;
}

// ---- status --------------------------------------------------------------------------------------------

// A counter that is smaller than previous belongs to a restarted gateway and counts from zero.
const increase = (earlier, later) => (later >= earlier ? later - earlier : later);

function histogramBetween(earlier, later) {
  const total = (histogram) => histogram?.counts.at(-1) ?? 0;
  if (!earlier || earlier.bounds_s.length !== later.bounds_s.length || total(earlier) > total(later)) return later;
  return { bounds_s: later.bounds_s, counts: later.counts.map((value, index) => value - earlier.counts[index]) };
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

function ratesOf(snapshot) {
  const seconds = previous ? snapshot.at_s - previous.at_s : 0;
  if (seconds <= 0) return null;
  const earlierTenants = new Map(previous.tenants.map((tenant) => [tenant.name, tenant]));
  const earlierLanes = new Map(previous.lanes.map((lane) => [lane.upstream, lane]));
  const outcomes = Object.entries(snapshot.calls.outcomes).map(([kind, value]) => [
    kind,
    increase(previous.calls.outcomes[kind] ?? 0, value) / seconds,
  ]);
  const tenants = new Map(
    snapshot.tenants.map((tenant) => {
      const earlier = earlierTenants.get(tenant.name) ?? { calls: 0, tokens: 0, refused: 0 };
      const rateOf = (field) => increase(earlier[field], tenant[field]) / seconds;
      return [tenant.name, { calls: rateOf("calls"), tokens: rateOf("tokens"), refused: rateOf("refused") }];
    }),
  );
  return {
    calls: outcomes.reduce((sum, [, value]) => sum + value, 0),
    tokens: [...tenants.values()].reduce((sum, tenant) => sum + tenant.tokens, 0),
    failures: outcomes.filter(([kind, value]) => kind !== "ok" && value > 0),
    durations: histogramBetween(previous.calls.durations, snapshot.calls.durations),
    attempts: new Map(
      snapshot.lanes.map((lane) => [
        lane.upstream,
        histogramBetween(earlierLanes.get(lane.upstream)?.attempts, lane.attempts),
      ]),
    ),
    tenants,
  };
}

function showFigures(snapshot, rates) {
  const figures = [
    ["calls/s", rate(rates?.calls ?? null)],
    ["tokens/s", rate(rates?.tokens ?? null)],
    ["p50", rates ? milliseconds(quantile(rates.durations, 0.5)) : "–"],
    ["p95", rates ? milliseconds(quantile(rates.durations, 0.95)) : "–"],
    ["failures/s", rates ? rate(rates.failures.reduce((sum, [, value]) => sum + value, 0)) : "–"],
    ["in flight", count(snapshot.calls_in_flight)],
  ];
  $("figures").replaceChildren(
    ...figures.map(([name, value]) => {
      const box = createElement("div");
      box.append(createElement("dt", name), createElement("dd", value));
      return box;
    }),
  );
  const kinds = (rates?.failures ?? []).map(([kind, value]) => `${kind} ${rate(value)}/s`);
  const failures = kinds.length ? [createElement("p", `Failures: ${kinds.join(" · ")}`, "problem")] : [];
  $("failures").replaceChildren(...failures);
}

function showLanes(snapshot, rates) {
  const columns = [["upstream"], ["waiting inputs", "number"], ["tokens", "number"], ["oldest", "number"]];
  columns.push(["in flight", "number"], ["window", "number"], ["attempt p50", "number"]);
  const rows = snapshot.lanes.map((lane) => [
    lane.upstream,
    count(lane.queued_inputs),
    count(lane.queued_tokens),
    lane.queued_inputs ? milliseconds(lane.oldest_s) : "–",
    count(lane.in_flight_batches),
    count(lane.window_batches),
    rates ? milliseconds(quantile(rates.attempts.get(lane.upstream), 0.5)) : "–",
  ]);
  $("lanes").replaceChildren(createTable(columns, rows));
}

function showReplicas(snapshot) {
  const columns = [["upstream"], ["replica", "text"], ["state"], ["for", "number"], ["in flight", "number"]];
  columns.push(["window", "number"], ["latency", "number"], ["attempts", "number"], ["failed", "number"]);
  columns.push(["why", "text"]);
  const rows = snapshot.replicas.map((replica) => [
    replica.upstream,
    replica.name,
    stateCell(replica.state),
    replica.since_s === null ? "–" : duration(snapshot.at_s - replica.since_s),
    count(replica.in_flight_batches),
    count(replica.window_batches),
    milliseconds(replica.latency_s),
    count(replica.attempts),
    count(replica.failed),
    replica.reason,
  ]);
  $("replicas").replaceChildren(createTable(columns, rows));
}

function showModels(snapshot) {
  const columns = [["model", "text"], ["upstream"], ["backend"], ["state"], ["operations", "text"]];
  columns.push(["width", "number"], ["vector space", ""]);
  const rows = snapshot.models.map((model) => [
    model.name,
    model.upstream,
    model.backend,
    stateCell(model.state),
    model.operations.join(", "),
    model.dimensions === null ? "–" : count(model.dimensions),
    model.fingerprint ?? "–",
  ]);
  $("models").replaceChildren(createTable(columns, rows));
}

function showInstances(snapshot) {
  const columns = [["instance", "text"], ["kind"], ["loads", "text"], ["upstream"], ["state"], ["pid", "number"]];
  columns.push(["restarts", "number"], ["device"], ["why", "text"]);
  const rows = snapshot.instances.map((instance) => [
    instance.name,
    instance.kind,
    instance.model_id,
    instance.upstream,
    stateCell(instance.status),
    instance.pid === null ? "–" : String(instance.pid),
    count(instance.restarts),
    instance.device ?? "–",
    instance.reason ?? "",
  ]);
  $("instances-part").hidden = !rows.length;
  $("instances").replaceChildren(createTable(columns, rows));
}

const bytesFormat = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const bytes = (value) => (value >= 1e9 ? `${bytesFormat.format(value / 1e9)} GB` : `${bytesFormat.format(value / 1e6)} MB`);

function downloadOf(checkpoint) {
  if (checkpoint.state !== "downloading") return "–";
  const done = checkpoint.done_bytes ?? 0;
  const total = checkpoint.total_bytes;
  const share = total ? `${Math.round((100 * done) / total)} % of ${bytes(total)}` : bytes(done);
  return `${share}, ${bytes(checkpoint.bytes_per_s ?? 0)}/s`;
}

function showRegistry(snapshot) {
  const columns = [["model", "text"], ["state"], ["download", "number"], ["on disk", "number"], ["upstreams", "text"]];
  columns.push(["why", "text"]);
  const rows = snapshot.registry.map((checkpoint) => [
    checkpoint.model,
    stateCell(checkpoint.state),
    downloadOf(checkpoint),
    bytes(checkpoint.stored_bytes),
    checkpoint.upstreams.join(", ") || "–",
    checkpoint.error ?? "",
  ]);
  $("registry-part").hidden = !rows.length;
  $("registry").replaceChildren(createTable(columns, rows));
}

function showTenants(snapshot, rates) {
  const columns = [["tenant", "text"], ["calls/s", "number"], ["tokens/s", "number"], ["refused/s", "number"]];
  columns.push(["calls", "number"], ["tokens", "number"], ["refused", "number"]);
  const rows = snapshot.tenants.map((tenant) => {
    const own = rates?.tenants.get(tenant.name);
    return [
      tenant.name,
      rate(own?.calls ?? null),
      rate(own?.tokens ?? null),
      rate(own?.refused ?? null),
      count(tenant.calls),
      count(tenant.tokens),
      count(tenant.refused),
    ];
  });
  $("tenants").replaceChildren(createTable(columns, rows, "No calls yet."));
}

function showChanges(snapshot) {
  const columns = [["at"], ["of", "text"], ["now"], ["why", "text"]];
  const rows = snapshot.changes
    .slice(0, 12)
    .map((change) => [clock(change.at_s), change.subject, change.what, change.reason]);
  $("changes").replaceChildren(createTable(columns, rows, "None."));
}

// A redraw would clear the selection of a user who is about to copy text.
function hasSelection(element) {
  const selection = getSelection();
  return !selection.isCollapsed && element.contains(selection.anchorNode);
}

function showStatus(snapshot) {
  if (hasSelection($("status-body"))) return;
  const rates = ratesOf(snapshot);
  const workers = snapshot.workers > 1 ? ` · ${snapshot.workers} workers, seen by worker ${snapshot.worker}` : "";
  const store = snapshot.store.away ? `${snapshot.store.kind}, UNAVAILABLE` : snapshot.store.kind;
  const up = `up ${duration(snapshot.uptime_s)}`;
  const facts = `version ${snapshot.version} · ${up}${workers} · quotas in ${store}`;
  $("status-line").textContent = `${facts} · ${clock(snapshot.at_s)}`;
  showFigures(snapshot, rates);
  showLanes(snapshot, rates);
  showReplicas(snapshot);
  showModels(snapshot);
  showInstances(snapshot);
  showRegistry(snapshot);
  showTenants(snapshot, rates);
  showChanges(snapshot);
  $("status-body").hidden = false;
  previous = snapshot;
}

async function refresh() {
  // Of an earlier request, perhaps with an earlier key.
  clearTimeout(refreshTimer);
  if (document.hidden) return scheduleRefresh();
  const number = ++requestNumber;
  try {
    const { content } = await send("/admin/status", null, STATUS_TIMEOUT_MS);
    if (number !== requestNumber) return;
    showMessage($("status-problem"), "");
    showStatus(content);
  } catch (error) {
    if (number !== requestNumber) return;
    $("status-line").textContent = previous ? `Last seen at ${clock(previous.at_s)}.` : "Not seen yet.";
    showMessage($("status-problem"), statusProblem(error));
    if (error.status >= 400 && error.status < 500) {
      // The gateway throttles addresses that keep sending a wrong key: ask again for a different one only.
      $("status-body").hidden = true;
      previous = null;
      return;
    }
  }
  scheduleRefresh();
}

function statusProblem(error) {
  if (error.status === 403) return `${error.message}: the status needs a key with the scope admin`;
  return error.status ? error.message : `${error.message}; asking again`;
}

function scheduleRefresh() {
  clearTimeout(refreshTimer);
  refreshTimer = setTimeout(refresh, REFRESH_INTERVAL_MS);
}

// ---- playground ----------------------------------------------------------------------------------------

async function listModels() {
  $("models-problem").className = key ? "problem" : "note";
  if (!key) return showMessage($("models-problem"), "Type an API key above to try the models.");
  try {
    const { content } = await send("/v1/models", null, STATUS_TIMEOUT_MS);
    showMessage($("models-problem"), "");
    fillSelect($("embed-model"), content.data, "embed");
    fillSelect($("rerank-model"), content.data, "rerank");
    const pictured = content.data.filter((model) => model.operations.includes("embed_image"));
    // A model of pages gives a vector for each patch, and none for the whole picture.
    fillSelect($("images-model"), pictured, "embed");
    fillSelect($("pages-model"), pictured, "encode");
    for (const name of ["images", "pages"]) $(name).hidden = !$(`${name}-model`).options.length;
    fillCheckboxes(content.data.filter((model) => model.operations.includes("embed")));
  } catch (error) {
    const separate = "This address is for operators only and serves no models, so /ui shows only the status.";
    showMessage($("models-problem"), error.status === 404 ? separate : `Listing the models failed: ${error.message}`);
  }
}

function fillSelect(select, models, operation) {
  const chosen = select.value;
  const names = models.filter((model) => model.operations.includes(operation)).map((model) => model.id);
  select.replaceChildren(...names.map((name) => createElement("option", name)));
  const preferred = models.find((model) => model.default_for.includes(operation))?.id;
  if (names.includes(chosen)) select.value = chosen;
  else if (names.includes(preferred)) select.value = preferred;
}

function fillCheckboxes(models) {
  $("compare-models").replaceChildren(
    ...models.map((model, index) => {
      const label = createElement("label");
      const box = createElement("input");
      box.type = "checkbox";
      box.name = "compared";
      box.value = model.id;
      box.checked = index < 4;
      label.append(box, createElement("span", model.id));
      return label;
    }),
  );
}

async function embed(model, input) {
  const { content, headers } = await send("/v1/embeddings", { model, input, encoding_format: "float" });
  return {
    vectors: content.data.map((item) => item.embedding),
    tokens: content.usage.total_tokens,
    space: headers.get("x-embedding-fingerprint"),
    truncated: headers.get("x-truncated-inputs"),
  };
}

function cosine(left, right) {
  let product = 0;
  let leftSquares = 0;
  let rightSquares = 0;
  for (let index = 0; index < left.length; index++) {
    product += left[index] * right[index];
    leftSquares += left[index] ** 2;
    rightSquares += right[index] ** 2;
  }
  return leftSquares && rightSquares ? product / Math.sqrt(leftSquares * rightSquares) : 0;
}

// From pale for a cosine of 0 and below to deep blue for 1.
function shaded(cell, value) {
  const depth = Math.min(1, Math.max(0, value));
  cell.style.backgroundColor = `hsl(210 ${40 + 40 * depth}% ${96 - 66 * depth}%)`;
  // At this depth black and white have the same contrast with the background.
  cell.style.color = depth > 0.75 ? "#ffffff" : "#000000";
  return cell;
}

// heads: elements or texts of the columns; without them, the numbers of the rows.
function heatMap(caption, names, cellAt, heads = names.map((_, index) => String(index + 1))) {
  const table = createElement("table", "", "heat");
  table.append(createElement("caption", caption));
  const head = table.createTHead().insertRow();
  head.append(createElement("td"));
  for (const content of heads) {
    const cell = createElement("th");
    cell.append(content);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  names.forEach((name, row) => {
    const line = body.insertRow();
    const title = createElement("th", `${row + 1}. ${name}`);
    title.scope = "row";
    line.append(title);
    heads.forEach((_, column) => line.append(cellAt(row, column)));
  });
  return scrollable(table, caption);
}

function cosineCell(left, right) {
  if (left.length !== right.length) return createElement("td", `${left.length} ≠ ${right.length}`);
  const value = cosine(left, right);
  return shaded(createElement("td", value.toFixed(3)), value);
}

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const shortened = (text) => (text.length > 60 ? `${text.slice(0, 59)}…` : text);

async function embedTexts() {
  const texts = lines($("embed-texts").value);
  if (!texts.length) throw new RequestError(0, "Write at least one text.");
  if (texts.length > TEXTS_MAX) throw new RequestError(0, `${texts.length} texts; the picture holds ${TEXTS_MAX}.`);
  const { vectors, tokens, space, truncated } = await embed($("embed-model").value, texts);
  const notes = [`${vectors.length} vectors of ${vectors[0].length} numbers`, `${count(tokens)} tokens`];
  if (space) notes.push(`vector space ${space}`);
  if (truncated) notes.push(`truncated: ${truncated}`);
  const cellAt = (row, column) => cosineCell(vectors[row], vectors[column]);
  return [createElement("p", notes.join(" · "), "note"), heatMap("Cosine similarity", texts.map(shortened), cellAt)];
}

function addImages(files) {
  const added = [...files].filter((file) => file.type.startsWith("image/"));
  const room = IMAGES_MAX - images.length;
  const large = added.filter((file) => file.size > IMAGE_BYTES_MAX).map((file) => file.name);
  const taken = added.filter((file) => file.size <= IMAGE_BYTES_MAX).slice(0, room);
  images = [...images, ...taken.map((file) => ({ file, url: URL.createObjectURL(file) }))];
  const problems = [];
  if (large.length) problems.push(`larger than ${IMAGE_BYTES_MAX / 1e6} MB: ${large.join(", ")}`);
  if (added.length - large.length > room) problems.push(`at most ${IMAGES_MAX} images`);
  if (added.length < files.length) problems.push("only images are taken");
  showMessage($("images-problem"), problems.join("; "));
  showImages();
}

function clearImages() {
  for (const image of images) URL.revokeObjectURL(image.url);
  images = [];
  $("images-files").value = "";
  showMessage($("images-problem"), "");
  showImages();
}

function thumbnail(image) {
  const element = createElement("img");
  Object.assign(element, { src: image.url, alt: image.file.name, title: image.file.name });
  return element;
}

function showImages() {
  $("images-chosen").replaceChildren(...images.map(thumbnail));
  $("images-clear").hidden = !images.length;
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new RequestError(0, `${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

async function embedImages() {
  const texts = lines($("images-texts").value);
  const shown = images;
  if (!texts.length || !shown.length) throw new RequestError(0, "Choose at least one image, and write at least one text.");
  if (texts.length > TEXTS_MAX) throw new RequestError(0, `${texts.length} texts; the picture holds ${TEXTS_MAX}.`);
  const uris = await Promise.all(shown.map((image) => dataUri(image.file)));
  const { vectors, space } = await embed($("images-model").value, [...texts, ...uris.map((image) => ({ image }))]);
  const ofImages = vectors.slice(texts.length);
  const notes = [`${vectors.length} vectors of ${vectors[0].length} numbers`];
  if (space) notes.push(`vector space ${space}`);
  const cellAt = (row, column) => cosineCell(vectors[row], ofImages[column]);
  return [
    createElement("p", notes.join(" · "), "note"),
    heatMap("Cosine of each text with each image", texts.map(shortened), cellAt, shown.map(thumbnail)),
    createElement("p", "Cosines of texts and images are small for most models; compare them within a row.", "note"),
  ];
}

// Both have length 1, so that the product is the cosine.
const product = (left, right) => left.reduce((sum, value, index) => sum + value * right[index], 0);

// It is turned as its EXIF data says, and as the model reads it.
const loadPicture = (file) =>
  createImageBitmap(file).catch(() => {
    throw new RequestError(0, "this browser cannot show the page");
  });

// best: the best cosine of each patch with the chosen tokens, row by row.
function drawPatches(canvas, picture, grid, best) {
  canvas.width = PAGE_WIDTH;
  canvas.height = Math.max(1, Math.round((PAGE_WIDTH * picture.height) / picture.width));
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  const [least, most] = [Math.min(...best), Math.max(...best)];
  const [width, height] = [canvas.width / grid.columns, canvas.height / grid.rows];
  best.forEach((value, index) => {
    const depth = most > least ? (value - least) / (most - least) : 0;
    context.fillStyle = `hsl(${240 - 240 * depth} 90% 50% / ${0.15 + 0.4 * depth})`;
    context.fillRect((index % grid.columns) * width, Math.floor(index / grid.columns) * height, width, height);
  });
}

async function markPage() {
  const [file] = $("pages-file").files;
  const query = $("pages-query").value.trim();
  if (!file || !query) throw new RequestError(0, "Choose a page, and write a question.");
  if (file.size > IMAGE_BYTES_MAX) throw new RequestError(0, `${file.name} is larger than ${IMAGE_BYTES_MAX / 1e6} MB`);
  const uri = await dataUri(file);
  const body = { model: $("pages-model").value, input: [query, { image: uri }], encoding_format: "float" };
  const { content } = await send("/v1/multi-vector", body);
  const [question, page] = content.data;
  const grid = page.patch_grid;
  if (!grid) throw new RequestError(0, "the reply does not say where the patches of the page are");
  const picture = await loadPicture(file);
  const patches = page.embeddings.slice(grid.first, grid.first + grid.rows * grid.columns);
  const cosines = question.embeddings.map((token) => patches.map((patch) => product(token, patch)));
  const score = cosines.reduce((sum, ofToken) => sum + Math.max(...ofToken), 0) / cosines.length;
  const canvas = createElement("canvas", "", "page-patches");
  canvas.setAttribute("role", "img");
  const choice = createElement("select");
  choice.id = "pages-token";
  const names = ["all tokens of the question", ...cosines.map((_, index) => `token ${index + 1}`)];
  choice.append(...names.map((name, index) => Object.assign(createElement("option", name), { value: index })));
  const draw = () => {
    const chosen = choice.selectedIndex ? [cosines[choice.selectedIndex - 1]] : cosines;
    const best = patches.map((_, patch) => Math.max(...chosen.map((ofToken) => ofToken[patch])));
    drawPatches(canvas, picture, grid, best);
    const place = best.indexOf(Math.max(...best));
    const row = Math.floor(place / grid.columns) + 1;
    const column = (place % grid.columns) + 1;
    canvas.setAttribute("aria-label", `best patch: row ${row} of ${grid.rows}, column ${column} of ${grid.columns}`);
  };
  choice.addEventListener("change", draw);
  draw();
  const label = createElement("label", "Mark by");
  label.htmlFor = choice.id;
  const notes = [`score ${score.toFixed(3)}`, `${grid.rows} × ${grid.columns} patches`, `${cosines.length} tokens`];
  return [createElement("p", notes.join(" · "), "note"), label, choice, canvas];
}

async function rerankDocuments() {
  const [query, documents] = [$("rerank-query").value.trim(), lines($("rerank-documents").value)];
  if (!query || !documents.length) throw new RequestError(0, "Write a query and at least one document.");
  const { content } = await send("/v1/rerank", { model: $("rerank-model").value, query, documents });
  const scores = content.results.map((result) => result.relevance_score);
  const [least, most] = [Math.min(0, ...scores), Math.max(1, ...scores)];
  const rows = content.results.map((result, index) => {
    const cell = createElement("td", "", "bar");
    const bar = createElement("meter");
    Object.assign(bar, { min: least, max: most, value: result.relevance_score });
    bar.setAttribute("aria-hidden", "true");
    cell.append(bar);
    return [String(index + 1), result.relevance_score.toFixed(4), cell, documents[result.index]];
  });
  const columns = [["#", "number"], ["score", "number"], ["", "bar"], ["document", "text"]];
  return [scrollable(createTable(columns, rows), "Documents by score")];
}

function problemCell(problem, columns) {
  const cell = createElement("td", problem, "problem");
  cell.colSpan = columns;
  return cell;
}

async function compareModels() {
  const names = [...document.querySelectorAll("input[name=compared]:checked")].map((box) => box.value);
  const text = $("compare-text").value.trim();
  if (names.length < 2 || !text) throw new RequestError(0, "Write a text, and choose two models or more.");
  const replies = await Promise.all(
    names.map((name) => embed(name, [text]).catch((error) => ({ problem: error.message }))),
  );
  const rows = replies.map((reply, index) =>
    reply.problem
      ? [names[index], problemCell(reply.problem, 3)]
      : [names[index], count(reply.vectors[0].length), count(reply.tokens), reply.space ?? "–"],
  );
  const columns = [["model", "text"], ["width", "number"], ["tokens", "number"], ["vector space"]];
  const embeddings = replies
    .map((reply, index) => ({ name: names[index], vector: reply.vectors?.[0] }))
    .filter((embedding) => embedding.vector);
  const elements = [scrollable(createTable(columns, rows), "Models")];
  if (embeddings.length > 1) {
    const cellAt = (row, column) => cosineCell(embeddings[row].vector, embeddings[column].vector);
    const labels = embeddings.map((embedding) => embedding.name);
    elements.push(heatMap("Cosine of the same text", labels, cellAt));
    const widths = new Set(embeddings.map((embedding) => embedding.vector.length));
    if (widths.size > 1) {
      elements.push(createElement("p", "Vectors of unequal width cannot be compared.", "note"));
    }
    elements.push(createElement("p", "Only models of the same vector space are expected to agree.", "note"));
  }
  return elements;
}

function onSubmit(name, action) {
  $(`${name}-form`).addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = event.submitter ?? event.target.querySelector("button[type=submit], button:not([type])");
    const answer = $(`${name}-answer`);
    button.disabled = true;
    try {
      answer.replaceChildren(...(await action()));
    } catch (error) {
      const reason = error instanceof RequestError ? error.message : "this page does not understand the reply";
      answer.replaceChildren(createElement("p", reason, "problem"));
    } finally {
      button.disabled = false;
    }
  });
}

// ---- start ---------------------------------------------------------------------------------------------

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  previous = null;
  refresh();
  listModels();
});
document.addEventListener("visibilitychange", () => document.hidden || !previous || refresh());
onSubmit("embed", embedTexts);
onSubmit("images", embedImages);
onSubmit("pages", markPage);
onSubmit("rerank", rerankDocuments);
$("images-files").addEventListener("change", (event) => addImages(event.target.files));
$("images-clear").addEventListener("click", clearImages);
$("images-drop").addEventListener("dragover", (event) => event.preventDefault());
$("images-drop").addEventListener("drop", (event) => {
  event.preventDefault();
  addImages(event.dataTransfer.files);
});
onSubmit("compare", compareModels);
refresh();
listModels();
