// Models: where each is served, its offer and its prices.
import { useState } from "preact/hooks";
import { named, RequestError, send } from "../api.js";
import { bytes, count, money, NONE } from "../format.js";
import { useAction, useOnce } from "../hooks.js";
import { Answer, ask, Note, Select, State, Table, TextField } from "../parts.jsx";
import { Report } from "./report.jsx";

function downloadOf(checkpoint) {
  if (checkpoint.state !== "downloading") return NONE;
  const done = checkpoint.done_bytes ?? 0;
  const total = checkpoint.total_bytes;
  const share = total ? `${Math.round((100 * done) / total)} % of ${bytes(total)}` : bytes(done);
  return `${share}, ${bytes(checkpoint.bytes_per_s ?? 0)}/s`;
}

const notesOf = (model) => [...model.notes, ...(model.cache ? [`cache: ${model.cache}`] : [])].join("; ");

// All upstreams, those that are no member with their role.
const upstreamsOf = (model) =>
  (model.upstreams ?? []).map(({ name, role }) => (role === "member" ? name : `${name} (${role})`)).join(", ") ||
  model.upstream;

function Served({ snapshot }) {
  const hasNotes = snapshot.models.some(notesOf);
  const hasPrices = snapshot.models.some((model) => model.price_per_million_tokens);
  return (
    <Table
      id="models"
      label="Models"
      columns={[
        ["model", "text"],
        ["state"],
        ["upstreams", "text"],
        ["backend"],
        ["operations", "text long"],
        ["width", "number"],
        ["vector space"],
        ["memory", "number"],
        ...(hasPrices ? [[`${snapshot.currency} per million tokens`, "number"]] : []),
        ...(hasNotes ? [["notes", "text long"]] : []),
      ]}
      rows={snapshot.models.map((model) => [
        model.name,
        <State value={model.state} />,
        upstreamsOf(model),
        model.backend,
        model.operations.join(", "),
        count(model.dimensions),
        model.fingerprint ?? NONE,
        model.memory_bytes ? bytes(model.memory_bytes) : NONE,
        ...(hasPrices ? [money(model.price_per_million_tokens)] : []),
        ...(hasNotes ? [notesOf(model)] : []),
      ])}
    />
  );
}

// The share of a canary or a mirror; of the others, weight and priority.
function shareOf(upstream) {
  if (upstream.share !== null) return `${(100 * upstream.share).toPrecision(3)} %`;
  return `weight ${upstream.weight}, priority ${upstream.priority}`;
}

function Groups({ snapshot }) {
  const rows = snapshot.models.flatMap((model) =>
    (model.upstreams ?? []).map((upstream) => [
      model.name,
      upstream.name,
      // No good news of an upstream without a replica in use.
      upstream.standing === "serving" && upstream.state !== "ready" ? "serving" : <State value={upstream.standing} />,
      <State value={upstream.state} />,
      upstream.role,
      shareOf(upstream),
      count(upstream.calls),
      upstream.cosine === null ? NONE : upstream.cosine.toFixed(4),
      upstream.reason,
    ]),
  );
  if (!rows.length) return null;
  return (
    <>
      <h3>Models with several upstreams</h3>
      <Table
        id="model-upstreams"
        label="Models with several upstreams"
        columns={[
          ["model", "text"],
          ["upstream"],
          ["standing"],
          ["state"],
          ["role"],
          ["share"],
          ["calls", "number"],
          ["least cosine", "number"],
          ["why", "text long"],
        ]}
        rows={rows}
      />
    </>
  );
}

function Additions({ snapshot, turn }) {
  const [changed, setChanged] = useState(0);
  const added = useOnce(async () => (await send("/admin/models")).content, `${turn} ${changed}`);
  const upstreams = snapshot.lanes.map((lane) => lane.upstream);
  const [name, setName] = useState("");
  const [upstream, setUpstream] = useState("");
  const done = ({ content }) => {
    setChanged((before) => before + 1);
    return content;
  };
  const save = useAction(async () => {
    if (!name.trim()) throw new RequestError(0, "Write a name.");
    const body = { upstream: upstream || upstreams[0] };
    return done(await send(named("/admin/models", name.trim()), { method: "PUT", body }));
  });
  const removing = useAction(async (gone) => done(await send(named("/admin/models", gone), { method: "DELETE" })));
  return (
    <>
      <h3>Added names</h3>
      {added.problem ? (
        <Note>{added.problem.message}</Note>
      ) : (
        <Table
          id="added-models"
          label="Added models"
          columns={[["name", "text"], ["settings", "text"], ["problem", "text"], [""]]}
          rows={(added.content ?? []).map((entry) => [
            entry.name,
            <code>{JSON.stringify(entry.settings)}</code>,
            entry.problem ?? NONE,
            <button
              type="button"
              class="quiet"
              onClick={ask(`Remove the model ${entry.name}?`, () => removing.run(entry.name))}
            >
              Remove {entry.name}
            </button>,
          ])}
        />
      )}
      <Answer id="model-removal-answer" action={removing}>
        <Report outcome={removing.outcome} />
      </Answer>
      <form onSubmit={save.run} id="model-form">
        <TextField label="Name for callers" id="model-name" value={name} onInput={setName} />
        <Select
          label="Upstream"
          id="model-upstream"
          value={upstream || upstreams[0]}
          onChange={setUpstream}
          options={upstreams}
        />
        <button disabled={save.busy}>Save the name</button>
      </form>
      <Answer id="model-answer" action={save}>
        <Report outcome={save.outcome} />
      </Answer>
    </>
  );
}

function Host({ snapshot }) {
  const [hubName, setHubName] = useState("");
  const acting = useAction(async ({ name, verb }) => {
    const { content } = await send(`${named("/admin/registry", name)}/${verb}`, { method: "POST" });
    return `${content.model_id}: ${content.status}`;
  });
  const act = (name, verb) => () => acting.run({ name, verb });
  const pull = useAction(async () => {
    const name = hubName.trim();
    if (!name) throw new RequestError(0, "Write the model's name on the Hub.");
    await send("/admin/registry", { body: { model_id: name } });
    const { content } = await send(`${named("/admin/registry", name)}/download`, { method: "POST" });
    return `${content.model_id}: ${content.status}`;
  });
  return (
    <>
      <h3>Models on this host</h3>
      <Table
        id="registry"
        label="Models on this host"
        empty="None, or no `manager` in router.yaml."
        columns={[
          ["model", "text"],
          ["state"],
          ["download", "number"],
          ["on disk", "number"],
          ["upstreams", "text"],
          ["why", "text"],
          [""],
        ]}
        rows={snapshot.registry.map((checkpoint) => [
          checkpoint.model,
          <State value={checkpoint.state} />,
          downloadOf(checkpoint),
          bytes(checkpoint.stored_bytes),
          checkpoint.upstreams.join(", ") || NONE,
          checkpoint.error ?? "",
          <span class="row">
            <button type="button" class="quiet" onClick={act(checkpoint.model, "download")}>
              Download {checkpoint.model}
            </button>
            <button type="button" class="quiet" onClick={act(checkpoint.model, "load")}>
              Check {checkpoint.model}
            </button>
          </span>,
        ])}
      />
      <Answer id="registry-answer" action={acting}>
        <p role="status">{acting.outcome}</p>
      </Answer>
      <form onSubmit={pull.run} id="pull-form">
        <TextField label="Model of the Hub" id="pull-name" value={hubName} onInput={setHubName} />
        <button disabled={pull.busy}>Pull the model</button>
      </form>
      <Answer id="pull-answer" action={pull}>
        <p role="status">{pull.outcome}</p>
      </Answer>
    </>
  );
}

const VERBS = [
  ["start", "Start"],
  ["stop", "Stop"],
  ["restart", "Restart"],
];

function Instances({ snapshot }) {
  const acting = useAction(async ({ name, verb }) => {
    const address = `${named("/admin/instances", name)}/${verb}`;
    if (verb === "logs") return (await send(address)).content;
    const { content } = await send(address, { method: "POST" });
    return `${content.name ?? name}: ${content.status ?? "done"}`;
  });
  const act = (name, verb) => () => acting.run({ name, verb });
  if (!snapshot.instances.length) return null;
  const shown = typeof acting.outcome === "string" ? acting.outcome : JSON.stringify(acting.outcome, null, 2);
  return (
    <>
      <h3>Instances</h3>
      <Table
        id="instances"
        label="Instances"
        columns={[
          ["instance", "text"],
          ["kind"],
          ["loads", "text"],
          ["upstream", "text"],
          ["state"],
          ["pid", "number"],
          ["restarts", "number"],
          ["device"],
          ["why", "text"],
          [""],
        ]}
        rows={snapshot.instances.map((instance) => [
          instance.name,
          instance.kind,
          instance.model_id,
          instance.upstream,
          <State value={instance.status} />,
          instance.pid === null ? NONE : String(instance.pid),
          count(instance.restarts),
          instance.device ?? NONE,
          instance.reason ?? "",
          <span class="row">
            {VERBS.map(([verb, label]) => (
              <button
                type="button"
                class="quiet"
                onClick={verb === "start" ? act(instance.name, verb) : ask(`${label} ${instance.name}?`, act(instance.name, verb))}
              >
                {label} {instance.name}
              </button>
            ))}
            <button type="button" class="quiet" onClick={act(instance.name, "logs")}>
              Logs of {instance.name}
            </button>
          </span>,
        ])}
      />
      <Answer id="instances-answer" action={acting}>
        {acting.outcome && (
          <pre tabIndex={0} aria-label="Reply">
            {shown}
          </pre>
        )}
      </Answer>
    </>
  );
}

export function Models({ snapshot, turn }) {
  if (!snapshot) return null;
  return (
    <>
      <h3>Served</h3>
      <Served snapshot={snapshot} />
      <Groups snapshot={snapshot} />
      <Additions snapshot={snapshot} turn={turn} />
      <Host snapshot={snapshot} />
      <Instances snapshot={snapshot} />
    </>
  );
}
