// Tenants and keys: lists, settings, limits, and usage.
import { useId, useState } from "preact/hooks";
import { named, RequestError, saveFile, send } from "../api.js";
import { count, isBudget, lines, money, NONE, rate } from "../format.js";
import { useAction, useOnce } from "../hooks.js";
import { Answer, ask, CopyButton, Note, Problem, Select, State, Table, TextArea, TextField } from "../parts.jsx";
import { Days, useDays, UsageTable } from "./own.jsx";

const SCOPES = ["embed", "rerank", "tokenize", "metrics", "admin"];
const LIMITS_NOTE = "one a line, such as tokens_per_day: 1000000, requests_per_minute: 600 or budget_per_month: 250.50";

// Limits as lines of text.
function limitsOf(text) {
  return Object.fromEntries(
    lines(text).map((line) => {
      const [name, amount] = line.split(/[:=]/).map((part) => part.trim());
      if (!amount || !/^[0-9_]+(\.[0-9]+)?$/.test(amount)) {
        throw new RequestError(0, `a limit is a name and a number, such as tokens_per_day: 1000, not ${line}`);
      }
      return [name, Number(amount.replaceAll("_", ""))];
    }),
  );
}

const textOf = (limits) =>
  Object.entries(limits)
    .map(([name, amount]) => `${name}: ${amount}`)
    .join("\n");
const shownLimits = (limits) =>
  Object.entries(limits)
    .map(([name, amount]) => `${name}: ${isBudget(name) ? money(amount) : count(amount)}`)
    .join(", ") || NONE;
const prefixed = (prefix, limits) =>
  Object.fromEntries(Object.entries(limits).map(([name, amount]) => [prefix + name, amount]));
const namesOf = (text) => lines(text.replaceAll(",", "\n"));

function NewKey({ created }) {
  const id = useId();
  if (!created) return null;
  return (
    <div class="good-news" role="status">
      <p>
        The key {created.shown.id} of {created.shown.tenant}, shown only now:
      </p>
      <p>
        <code id={id}>{created.key}</code> <CopyButton text={created.key} target={id} />
      </p>
      {created.notes.map((note) => (
        <Note>{note}</Note>
      ))}
    </div>
  );
}

// The gateway answers calls with the keys of such a tenant 403.
const UnknownTenant = ({ value }) => (
  <>
    {value} <State value="not defined" />
  </>
);

const EMPTY_KEY = { tenant: "", id: "", expires: "", models: "", limits: "", scopes: [] };

function Keys({ turn }) {
  const [changed, setChanged] = useState(0);
  const { content, problem } = useOnce(async () => (await send("/admin/keys")).content, `${turn} ${changed}`);
  const [form, setForm] = useState(EMPTY_KEY);
  const set = (field) => (value) => setForm((before) => ({ ...before, [field]: value }));
  const create = useAction(async () => {
    if (!form.tenant.trim()) throw new RequestError(0, "Write the name of a tenant.");
    const models = namesOf(form.models);
    const body = {
      tenant: form.tenant.trim(),
      ...(form.id.trim() ? { id: form.id.trim() } : {}),
      ...(form.expires ? { expires: form.expires } : {}),
      ...(form.scopes.length ? { scopes: form.scopes } : {}),
      ...(models.length ? { models } : {}),
      limits: limitsOf(form.limits),
    };
    const { content: created } = await send("/admin/keys", { body });
    setForm(EMPTY_KEY);
    setChanged((before) => before + 1);
    return created;
  });
  const revoke = useAction(async (id) => {
    await send(named("/admin/keys", id), { method: "DELETE" });
    setChanged((before) => before + 1);
    return `${id} is revoked; every gateway refuses it within a second.`;
  });
  const toggle = (scope) =>
    set("scopes")(form.scopes.includes(scope) ? form.scopes.filter((one) => one !== scope) : [...form.scopes, scope]);
  return (
    <>
      <h3>Keys</h3>
      {problem ? (
        <Note id="keys-problem">{problem.message}</Note>
      ) : (
        <>
          <Table
            id="keys"
            label="Keys"
            empty="No keys yet; those of router.yaml are listed only there."
            columns={[["id"], ["tenant", "text"], ["scopes", "text"], ["models", "text"], ["limits", "text"], ["expires"], [""]]}
            rows={(content ?? []).map((key) => [
              key.id,
              key.has_tenant ? key.tenant : <UnknownTenant value={key.tenant} />,
              key.scopes ? key.scopes.join(", ") : "all operations",
              key.models ? key.models.join(", ") : "all",
              shownLimits(key.limits),
              key.expires ? new Date(key.expires * 1000).toISOString().slice(0, 16).replace("T", " ").concat(" UTC") : "never",
              <button
                type="button"
                class="quiet"
                onClick={ask(`Revoke the key ${key.id}?`, () => revoke.run(key.id))}
              >
                Revoke {key.id}
              </button>,
            ])}
          />
          <Answer id="revoke-answer" action={revoke}>
            <p role="status">{revoke.outcome}</p>
          </Answer>
        </>
      )}
      <h4>Make a key</h4>
      <form onSubmit={create.run} id="key-create-form">
        <TextField label="Tenant of the key" id="new-key-tenant" value={form.tenant} onInput={set("tenant")} />
        <TextField label="Id" id="new-key-id" value={form.id} onInput={set("id")} note="empty: chosen for you" />
        <TextField label="Expires" id="new-key-expires" type="date" value={form.expires} onInput={set("expires")} note="at the beginning of the day in UTC; empty: never" />
        <fieldset>
          <legend>Scopes; none: all operations</legend>
          {SCOPES.map((scope) => (
            <label>
              <input type="checkbox" checked={form.scopes.includes(scope)} onChange={() => toggle(scope)} /> {scope}
            </label>
          ))}
        </fieldset>
        <TextField label="Models" id="new-key-models" value={form.models} onInput={set("models")} note="with commas; empty: all" />
        <TextArea label="Limits of the key" id="new-key-limits" value={form.limits} onInput={set("limits")} rows={2} note={LIMITS_NOTE} />
        <button disabled={create.busy}>Make the key</button>
      </form>
      <Answer id="key-answer" action={create}>
        <NewKey created={create.outcome} />
      </Answer>
    </>
  );
}

const TENANT_COLUMNS = [["models", "text"], ["limits", "text"], ["weight", "number"], ["class"], ["left of budgets", "text"]];
const settingsOf = ({ models, limits, model_limits: ofModels, weight, priority }) => [
  models ? models.join(", ") : "all",
  [limits, ...Object.entries(ofModels).map(([model, of]) => prefixed(`model ${model} `, of))]
    .map(shownLimits)
    .filter((shown) => shown !== NONE)
    .join(", ") || NONE,
  count(weight),
  priority,
];

const EMPTY_TENANT = { name: "", models: "", limits: "", weight: "1", priority: "interactive" };

function Tenants({ snapshot, rates, turn }) {
  const [changed, setChanged] = useState(0);
  const stored = useOnce(async () => (await send("/admin/tenants")).content, `${turn} ${changed}`);
  const limited = useOnce(async () => (await send("/admin/limits")).content, `${turn} ${changed}`);
  const left = new Map((limited.content ?? []).map((tenant) => [tenant.name, shownLimits(tenant.remaining)]));
  const inFile = (limited.content ?? []).filter((tenant) => tenant.in_file);
  const [form, setForm] = useState(EMPTY_TENANT);
  // The tenant whose settings fill the form, and those that it does not show.
  const [edited, setEdited] = useState(null);
  const [others, setOthers] = useState({});
  const set = (field) => (value) => setForm((before) => ({ ...before, [field]: value }));
  const edit = (tenant) => () => {
    const { models, limits, weight, priority, ...rest } = tenant.settings;
    setOthers(rest);
    setEdited(tenant);
    setForm({
      name: tenant.name,
      models: (models ?? []).join(", "),
      limits: textOf(limits),
      weight: String(weight),
      priority,
    });
  };
  const save = useAction(async () => {
    const name = form.name.trim();
    if (!name) throw new RequestError(0, "Write a name.");
    const models = namesOf(form.models);
    const limits = limitsOf(form.limits);
    const shown = { weight: Number(form.weight), priority: form.priority };
    // An edited tenant loses what was removed in the form. Another one that exists keeps what the form does not set.
    const isEdited = name === edited?.name;
    const body = isEdited
      ? { ...others, ...shown, models: models.length ? models : null, limits }
      : { ...shown, limits, ...(models.length ? { models } : {}) };
    const path = named("/admin/tenants", name) + (isEdited ? "?replace=true" : "");
    // Another operator may have changed it since it was listed.
    const headers = isEdited ? { "if-match": edited.etag } : {};
    const { content } = await send(path, { method: "PUT", body, headers }).catch((error) => {
      if (error.status === 412) {
        setChanged((before) => before + 1);
        throw new RequestError(412, `${name} was changed meanwhile. Edit it again from the list above.`);
      }
      throw error;
    });
    setChanged((before) => before + 1);
    setForm(EMPTY_TENANT);
    setEdited(null);
    setOthers({});
    return [`${name} is saved.`, ...content.notes].join(" ");
  });
  const remove = useAction(async (name) => {
    await send(named("/admin/tenants", name), { method: "DELETE" });
    setChanged((before) => before + 1);
    return `${name} and its keys are removed.`;
  });
  return (
    <>
      <h3>Traffic</h3>
      <Table
        id="tenants"
        label="Traffic of tenants"
        empty="No calls yet."
        columns={[
          ["tenant", "text"],
          ["calls/s", "number"],
          ["tokens/s", "number"],
          ["refused/s", "number"],
          ["calls", "number"],
          ["tokens", "number"],
          ["refused", "number"],
        ]}
        rows={(snapshot?.tenants ?? []).map((tenant) => {
          const own = rates?.tenants.get(tenant.name);
          return [
            tenant.name,
            rate(own?.calls),
            rate(own?.tokens),
            rate(own?.refused),
            count(tenant.calls),
            count(tenant.tokens),
            count(tenant.refused),
          ];
        })}
      />
      <h3>Tenants</h3>
      <Problem>{limited.problem?.message}</Problem>
      {inFile.length > 0 && (
        <Table
          id="file-tenants"
          label="Tenants of router.yaml"
          columns={[["in router.yaml", "text"], ...TENANT_COLUMNS]}
          rows={inFile.map((tenant) => [tenant.name, ...settingsOf(tenant), left.get(tenant.name)])}
        />
      )}
      {stored.problem ? (
        <Note id="tenants-problem">{stored.problem.message}</Note>
      ) : (
        <Table
          id="stored-tenants"
          label="Tenants"
          empty="No tenants are stored yet."
          columns={[["tenant", "text"], ...TENANT_COLUMNS, [""]]}
          rows={(stored.content ?? []).map((tenant) => [
            tenant.in_file ? `${tenant.name} (router.yaml defines it)` : tenant.name,
            ...settingsOf(tenant.settings),
            tenant.in_file ? NONE : left.get(tenant.name) ?? NONE,
            <span class="row">
              <button type="button" class="quiet" onClick={edit(tenant)}>
                Edit {tenant.name}
              </button>
              <button
                type="button"
                class="quiet"
                onClick={ask(`Remove the tenant ${tenant.name} and its keys?`, () => remove.run(tenant.name))}
              >
                Remove {tenant.name}
              </button>
            </span>,
          ])}
        />
      )}
      <Answer id="tenant-removal-answer" action={remove}>
        <p role="status">{remove.outcome}</p>
      </Answer>
      <h4>Add or change a tenant</h4>
      <form onSubmit={save.run} id="tenant-form">
        <TextField label="Name of the tenant" id="tenant-name" value={form.name} onInput={set("name")} />
        <TextField label="Models of the tenant" id="tenant-models" value={form.models} onInput={set("models")} note="with commas; empty: all" />
        <TextArea label="Limits of the tenant" id="tenant-limits" value={form.limits} onInput={set("limits")} rows={2} note={LIMITS_NOTE} />
        <TextField label="Weight" id="tenant-weight" type="number" min="1" value={form.weight} onInput={set("weight")} />
        <Select
          label="Class"
          id="tenant-priority"
          value={form.priority}
          onChange={set("priority")}
          options={["interactive", "bulk"]}
        />
        <button disabled={save.busy}>Save the tenant</button>
      </form>
      <Answer id="tenant-answer" action={save}>
        <p role="status">{save.outcome}</p>
      </Answer>
    </>
  );
}

function Usage({ turn }) {
  const days = useDays();
  const [tenant, setTenant] = useState("");
  const query = new URLSearchParams({ since: days.since, until: days.until, by: "key" });
  if (tenant) query.set("tenant", tenant);
  const { content, problem } = useOnce(async () => (await send(`/admin/usage?${query}`)).content, `${turn} ${query}`);
  const download = useAction(async () => {
    const { content: table } = await send(`/admin/usage?${query}&form=csv`, { as: "text" });
    saveFile(table, "text/csv", `usage-${days.since}-${days.until}.csv`);
    return "downloaded";
  });
  return (
    <>
      <h3>Usage</h3>
      <form class="row" onSubmit={download.run} id="usage-form">
        <Days {...days} prefix="usage" />
        <TextField label="Only the tenant" id="usage-tenant" value={tenant} onInput={setTenant} />
        <button disabled={download.busy}>Download as CSV</button>
      </form>
      <Answer id="usage-answer" action={download} />
      <Problem>{problem?.message}</Problem>
      {content && <UsageTable rows={content.data} id="usage" currency={content.currency} />}
    </>
  );
}

export function TenantsAndKeys(props) {
  return (
    <>
      <Tenants {...props} />
      <Keys turn={props.turn} />
      <Usage turn={props.turn} />
    </>
  );
}
