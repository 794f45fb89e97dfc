// Upstreams and their replicas: state, load, and what operators may do with them.
import { useState } from "preact/hooks";
import { named, RequestError, send } from "../api.js";
import { count, duration, lines, milliseconds, NONE } from "../format.js";
import { useAction, useOnce } from "../hooks.js";
import { Answer, ask, Note, Select, State, Table, TextArea, TextField } from "../parts.jsx";
import { Report } from "./report.jsx";
import { Verify } from "./verify.jsx";

const BACKENDS = ["tei", "infinity", "vllm", "openai", "cohere", "jina", "voyage", "torch"];
const EMPTY = { name: "", backend: "tei", replicas: "", model: "", window: "", serve: "", more: "" };
// Fields of the form; all other settings are written as JSON.
const OWN = ["backend", "replicas", "model", "in_flight_batches"];

function parsed(text) {
  if (!text.trim()) return {};
  let settings;
  try {
    settings = JSON.parse(text);
  } catch (error) {
    throw new RequestError(0, `further settings are not JSON: ${error.message}`);
  }
  if (typeof settings !== "object" || settings === null || Array.isArray(settings)) {
    throw new RequestError(0, 'further settings are an object, such as {"tokenizer": "BAAI/bge-m3"}');
  }
  return settings;
}

function settingsOf(form) {
  const replicas = lines(form.replicas.replaceAll(",", "\n"));
  return {
    ...parsed(form.more),
    backend: form.backend,
    ...(replicas.length ? { replicas } : {}),
    ...(form.model.trim() ? { model: form.model.trim() } : {}),
    ...(form.window ? { in_flight_batches: Number(form.window) } : {}),
  };
}

function formOf({ name, settings }) {
  const more = Object.fromEntries(Object.entries(settings).filter(([field]) => !OWN.includes(field)));
  return {
    ...EMPTY,
    name,
    backend: settings.backend,
    replicas: (settings.replicas ?? []).join("\n"),
    model: settings.model ?? "",
    window: String(settings.in_flight_batches ?? ""),
    more: Object.keys(more).length ? JSON.stringify(more, null, 2) : "",
  };
}

function stateOf(replica) {
  if (!replica.is_drained) return replica.state;
  if (replica.in_flight_batches) return `draining, ${count(replica.in_flight_batches)} in flight`;
  return replica.state === "drained" ? "drained" : `drained, ${replica.state}`;
}

// Engines of this gateway and addresses of DNS are not drained.
const isDrainable = ({ name }) => name.includes("://") && !name.includes("#");

function DrainButton({ replica, drain, undrain }) {
  const { name, upstream } = replica;
  if (replica.is_drained) {
    return (
      <button
        type="button"
        class="quiet short"
        aria-label={`Put back ${name} of ${upstream}`}
        disabled={undrain.busy}
        onClick={() => undrain.run(replica)}
      >
        Put back
      </button>
    );
  }
  return (
    isDrainable(replica) && (
      <button
        type="button"
        class="quiet short"
        aria-label={`Drain ${name} of ${upstream}`}
        disabled={drain.busy}
        onClick={ask(`Give ${name} of ${upstream} no new work, until you put it back?`, () => drain.run(replica))}
      >
        Drain
      </button>
    )
  );
}

// What became of a drain: it is over when nothing is in flight, and its server can be stopped.
function Drained({ place, snapshot }) {
  const replica = snapshot?.replicas.find((one) => one.upstream === place.upstream && one.name === place.name);
  if (!replica?.is_drained) return <p>{place.name} gets work again, once it responds.</p>;
  const left = replica.in_flight_batches;
  return (
    <p>
      {place.name} gets no new work. {left ? `Batches in flight: ${count(left)}.` : "Nothing is in flight: its server can be stopped."}
    </p>
  );
}

const replicaRows = (snapshot, drain, undrain) =>
  snapshot.replicas.map((replica) => [
    replica.upstream,
    replica.name,
    <State value={stateOf(replica)} />,
    replica.since_s === null ? NONE : duration(snapshot.at_s - replica.since_s),
    count(replica.in_flight_batches),
    count(replica.window_batches),
    milliseconds(replica.latency_s),
    count(replica.attempts),
    count(replica.failed),
    replica.reason,
    <DrainButton replica={replica} drain={drain} undrain={undrain} />,
  ]);

export function Upstreams({ snapshot, turn }) {
  const [form, setForm] = useState(EMPTY);
  const [changed, setChanged] = useState(0);
  const added = useOnce(async () => (await send("/admin/upstreams")).content, `${turn} ${changed}`);
  const set = (field) => (value) => setForm((before) => ({ ...before, [field]: value }));
  const done = (report) => {
    setChanged((before) => before + 1);
    return report;
  };
  const save = useAction(async () => {
    const name = form.name.trim();
    if (!name) throw new RequestError(0, "Write a name.");
    const { content } = await send(named("/admin/upstreams", name), { method: "PUT", body: settingsOf(form) });
    if (!form.serve.trim()) return done(content);
    const served = await send(named("/admin/models", form.serve.trim()), { method: "PUT", body: { upstream: name } });
    return done({ ...content, changes: [...content.changes, ...served.content.changes] });
  });
  const reload = useAction(async () => done((await send("/admin/reload", { method: "POST" })).content));
  const place = ({ upstream, name }) => ({ body: { upstream, replica: name } });
  const drain = useAction(async (replica) => {
    await send("/admin/replicas/drain", place(replica));
    return replica;
  });
  const undrain = useAction(async (replica) => {
    await send("/admin/replicas/undrain", place(replica));
    return replica;
  });
  const removing = useAction(async (name) => {
    return done((await send(named("/admin/upstreams", name), { method: "DELETE" })).content);
  });
  return (
    <>
      <h3>Replicas</h3>
      <Table
        id="replicas"
        label="Replicas"
        columns={[
          ["upstream", "text"],
          ["replica", "text long"],
          ["state"],
          ["for", "number"],
          ["in flight", "number"],
          ["window", "number"],
          ["latency", "number"],
          ["attempts", "number"],
          ["failed", "number"],
          ["why", "text"],
          [""],
        ]}
        rows={snapshot ? replicaRows(snapshot, drain, undrain) : []}
      />
      <Answer id="drain-answer" action={drain}>
        {drain.outcome && <Drained place={drain.outcome} snapshot={snapshot} />}
      </Answer>
      <Answer id="undrain-answer" action={undrain} />
      <Verify upstreams={(snapshot?.lanes ?? []).map((lane) => lane.upstream)} />
      <h3>Added upstreams</h3>
      <Note>
        Upstreams of router.yaml are changed there: edit the file, then read it again. A replica that is removed here or
        there finishes its calls first.
      </Note>
      {added.problem ? (
        <Note>{added.problem.message}</Note>
      ) : (
        <Table
          id="added-upstreams"
          label="Added upstreams"
          columns={[["name"], ["settings", "text"], ["problem", "text"], [""]]}
          rows={(added.content ?? []).map((entry) => [
            entry.name,
            <code>{JSON.stringify(entry.settings)}</code>,
            entry.problem ?? NONE,
            <span class="row">
              <button type="button" class="quiet" onClick={() => setForm(formOf(entry))}>
                Edit {entry.name}
              </button>
              <button
                type="button"
                class="quiet"
                onClick={ask(`Remove the upstream ${entry.name}?`, () => removing.run(entry.name))}
              >
                Remove {entry.name}
              </button>
            </span>,
          ])}
        />
      )}
      <Answer id="removal-answer" action={removing}>
        <Report outcome={removing.outcome} />
      </Answer>
      <form onSubmit={reload.run} id="reload-form">
        <button disabled={reload.busy}>Read router.yaml again</button>
      </form>
      <Answer id="reload-answer" action={reload}>
        <Report outcome={reload.outcome} />
      </Answer>
      <h3>Add or replace an upstream</h3>
      <form onSubmit={save.run} id="upstream-form">
        <TextField label="Name of the upstream" id="upstream-name" value={form.name} onInput={set("name")} />
        <Select label="Backend" id="upstream-backend" value={form.backend} onChange={set("backend")} options={BACKENDS} />
        <TextArea
          label="Addresses of its replicas, one a line"
          id="upstream-replicas"
          value={form.replicas}
          onInput={set("replicas")}
          rows={2}
          note="none for torch, which runs here"
        />
        <TextField
          label="Model at the server, or checkpoint of torch"
          id="upstream-model"
          value={form.model}
          onInput={set("model")}
        />
        <TextField
          label="Window: batches in flight to a replica"
          id="upstream-window"
          type="number"
          min="1"
          value={form.window}
          onInput={set("window")}
          note="empty: learned"
        />
        <TextArea
          label="Further settings, as JSON"
          id="upstream-more"
          value={form.more}
          onInput={set("more")}
          rows={2}
          note={'secrets as references, such as {"api_key": "${UPSTREAM_KEY}"}'}
        />
        <TextField label="Serve it as the model" id="upstream-serve" value={form.serve} onInput={set("serve")} note="optional" />
        <button disabled={save.busy}>Save the upstream</button>
      </form>
      <Answer id="upstream-answer" action={save}>
        <Report outcome={save.outcome} />
      </Answer>
    </>
  );
}
